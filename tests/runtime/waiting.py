"""Training scripts whose ranks wait in Python, at places that a fence has to reach or to leave alone."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import flashrec
from flashrec.runtime import api
from flashrec.runtime.limits import Limits
from tests.runtime import programs
from tests.runtime.support import die

STEPS, AT = 5, 2


class Stalling(Dataset[torch.Tensor]):
    """Its worker process stands still at sample AT, once."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == AT and not self._marker.exists():
            self._marker.write_text("")
            time.sleep(3600)
        return torch.tensor(float(index))


def in_event(_: Path) -> None:
    threading.Event().wait()


def in_lock(_: Path) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def in_queue(_: Path) -> None:
    queue.Queue[int]().get()


def in_sleeps(_: Path) -> None:
    while True:
        time.sleep(0.01)


def in_subprocess(_: Path) -> None:
    subprocess.run(["sleep", "3600"], check=True)  # killed by run() itself when it is interrupted


def in_stubborn(_: Path) -> None:
    """What the script does in its `finally` may wait, too."""
    try:
        threading.Event().wait()
    finally:
        threading.Event().wait()


WAITS: dict[str, Callable[[Path], None]] = {
    "event": in_event, "lock": in_lock, "queue": in_queue, "sleeps": in_sleeps, "subprocess": in_subprocess,
    "stubborn": in_stubborn,
}  # fmt: skip


def wait(out: str, kinds: list[str], victim: int, loader_of: int = -1, at: int = AT) -> None:
    """At step `at` each rank waits for ever in its own way, kinds[rank]; the victim of the first life ends."""
    programs.start(Limits(**(programs.LIMITS.__dict__ | {"interrupt_after_s": 0.3})))
    rank, folder = dist.get_rank(), Path(out).parent
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    session = flashrec.Session(model, optimizer)
    if rank == loader_of:
        multiprocessing.current_process()._config["daemon"] = False  # the tests made it one, which may have no children
        data = session.data(DataLoader(Stalling(folder / "stalled"), batch_size=1, num_workers=1))
    seen: list[float] = []
    waits, redone = api._Process.worker.env.incarnation == 1, 0
    for step in session.steps(STEPS):
        with step:
            loss = model(torch.full((1, 2), float(step) + rank)).sum()
            if rank == loader_of:
                if step == at:
                    print("fault: asks", file=sys.stderr, flush=True)
                value = float(data.batch(step))
            if step == at and waits:
                waits = False
                if rank == victim:
                    while not all((folder / f"waits{other}").exists() for other in range(len(kinds)) if other != rank):
                        time.sleep(0.01)
                    die()
                print("fault: waits", file=sys.stderr, flush=True)
                (folder / f"waits{rank}").write_text("")
                WAITS[kinds[rank]](folder)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.is_done and rank == loader_of:
            seen.append(value)
        redone += not step.is_done
    digest = [param.detach().numpy().tobytes().hex() for param in model.parameters()]
    Path(out).write_text(json.dumps({"digest": digest, "redone": redone, "seen": seen}))


def leave_alone(out: str, place: str) -> None:
    """Rank 0 stands still at PLACE until a fence is there and much longer than `interrupt_after_s`; place one of
    'optimizer', 'committed', 'between', 'ours', 'computing'. Nothing may be interrupted there."""
    programs.start(Limits(**(programs.LIMITS.__dict__ | {"interrupt_after_s": 0.2})))
    worker = api._Process.worker
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    session = flashrec.Session(model, optimizer)
    places: list[str] = []
    matrix = torch.ones(1000, 1000)

    def visit(step: int, here: str) -> None:
        if dist.get_rank() == 0 and step == AT and here == place and not places:
            places.append(here)
            print("fault: stands still", file=sys.stderr, flush=True)
            worker.board.wait_fence(1, 30)
            if here == "ours":
                worker.board.wait_for_ever(1.0)
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline and here != "ours":
                if here == "computing":
                    matrix.mm(matrix)
                else:
                    time.sleep(0.1)
            places.append("gone on")

    now = [0]
    optimizer.register_step_pre_hook(lambda *_: visit(now[0], "optimizer"))
    for step in session.steps(STEPS):
        now[0] = int(step)
        with step:
            model(torch.full((1, 2), float(step))).sum().backward()
            visit(step, "ours")
            visit(step, "computing")
            optimizer.step()
            visit(step, "committed")
            optimizer.zero_grad()
        visit(step, "between")
    digest = [param.detach().numpy().tobytes().hex() for param in model.parameters()]
    Path(out).write_text(json.dumps({"digest": digest, "places": places}))


def deaf(out: str) -> None:
    """Rank 0 waits in a call that goes on after a signal, as a C library does."""
    programs.start(Limits(interrupt_after_s=0.2, interrupt_timeout_s=1.5))
    model = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in flashrec.Session(model, optimizer).steps(STEPS):
        with step:
            if dist.get_rank() == 0 and step == AT:
                print("fault: waits", file=sys.stderr, flush=True)
                _wait_in_c()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def _wait_in_c() -> None:
    library = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        library.pthread_mutex_lock(mutex)  # the second one waits for itself, and goes on waiting after a signal


def with_handler(out: str, number: int) -> None:
    """The script has a handler of its own for our signal."""
    signal.signal(number, lambda *_: None)
    programs.start()
