"""Training scripts of the tests. They run in worker processes; faults are here, not in the product."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import hashlib
import json
import logging
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_process_group  # by name, and long before flashrec.init(): as scripts do
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import flashrec
from flashrec.runtime import api, gloo, tree, vote
from flashrec.runtime import session as loop
from flashrec.runtime.limits import Limits
from flashrec.runtime.torch_private import ddp as private_ddp
from flashrec.runtime.torch_private import groups, versions
from tests.runtime.support import die

torch.use_deterministic_algorithms(True)  # here, because its imports take a second and the fork server has them then
WIDTH = 24
LIMITS = Limits(connect_timeout_s=10, fence_timeout_s=15, plan_timeout_s=40, resume_timeout_s=40, transfer_timeout_s=20)


class Net(nn.Module):
    """Small, but with everything that has state: batch norm, dropout, several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(4 * WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
        )
        self.last = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


class Faults:
    """Ends this process at (rank, life, step, place); life 1 is the first process of a rank."""

    def __init__(self, wanted: list[tuple[int, int, int, str]]) -> None:
        rank, life = int(os.environ.get("RANK", "0")), int(os.environ.get("FLASHREC_INCARNATION", "0"))
        self._mine = {(step, place) for r, n, step, place in wanted if (r, n) == (rank, life)}

    def visit(self, step: int, place: str) -> None:
        if (step, f"stop-{place}") in self._mine:
            print(f"fault t={time.monotonic():.6f} at {step} {place}", file=sys.stderr, flush=True)
            self._mine.discard((step, f"stop-{place}"))  # once
            os.kill(os.getpid(), signal.SIGSTOP)
        if (step, place) in self._mine:
            if place == "raise":
                raise ValueError(f"bug at step {step}")
            print(f"fault t={time.monotonic():.6f} at {step} {place}", file=sys.stderr, flush=True)
            die()


def start(limits: Limits = LIMITS) -> int:
    """What every program begins with. Returns the rank."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s", force=True)
    faulthandler.register(signal.SIGUSR1)  # where does it hang?
    torch.set_num_threads(1)
    flashrec.init(limits)
    init_process_group("gloo")
    return dist.get_rank()


def wait_before_steps(out: str) -> None:
    """Form groups, then never get to the first step."""
    start()
    print("formed", file=sys.stderr, flush=True)
    dist.recv(torch.zeros(1), src=(dist.get_rank() + 1) % dist.get_world_size())


def endless(out: str) -> None:
    """Small steps until somebody ends it."""
    start()
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.04)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in flashrec.Session(model, optimizer).steps(1_000_000):
        with step:
            model(torch.ones(4, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def share_buffers(out: str) -> None:
    """Buffers of several kinds, others on each rank; what is there after the buffers of rank 0 were shared."""
    start()
    rank, net = dist.get_rank(), nn.Module()
    net.weight = nn.Parameter(torch.ones(2))
    net.register_buffer("mean", torch.ones(3) if rank else torch.tensor([-0.0, float("nan"), 3.0]))
    net.register_buffer("count", torch.tensor(7 + rank))
    net.register_buffer("mask", torch.tensor([bool(rank), not rank, True]))
    net.register_buffer("short", torch.full((2, 3), 0.1 + rank, dtype=torch.bfloat16).t())
    net.register_buffer("none", torch.empty(0))
    buffers = private_ddp.SharedBuffers(DistributedDataParallel(net, init_sync=False))
    net.count = torch.tensor(9 + rank)  # another one in its place, as scripts do
    before = [buffer._version for buffer in net.buffers()]
    issued = api._Process.worker.groups.num_issued()
    buffers.share()
    found = [buffer.contiguous().view(-1).view(torch.uint8).tolist() for buffer in net.buffers()]
    is_like_before = [buffer._version for buffer in net.buffers()] == before
    said = {"bytes": found, "versions": is_like_before, "issued": api._Process.worker.groups.num_issued() - issued}
    Path(out).write_text(json.dumps(said))


def change_buffers(out: str) -> None:
    """Rank 0 changes its buffers before step 2. What each forward begins with, and the collectives it issues before."""
    start()
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    num_issued = api._Process.worker.groups.num_issued
    means: list[list[float]] = []
    issued: list[int] = []

    def begins(*_: object) -> None:
        means.append(net[1].running_mean.tolist())
        issued[-1] = num_issued() - issued[-1]

    def run() -> torch.Tensor:
        issued.append(num_issued())
        found: torch.Tensor = ddp(torch.randn(4, 2))
        return found

    session = flashrec.Session(ddp, optimizer)
    net.register_forward_pre_hook(begins)
    with torch.no_grad():
        run()
    for step in session.steps(3):
        if step == 1 and dist.get_rank() == 0:
            net[1].running_mean.fill_(5.0)
        with step:
            run().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    run()
    Path(out).write_text(json.dumps({"means": means, "issued": issued}))


def stand_still(out: str, folder: str) -> None:
    """Rank 1 stands still, in four ways one after the other; each ends when FOLDER has a file of its name."""
    start()
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.04)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = flashrec.Session(model, optimizer)

    def until_told(name: str, holds_lock: bool = False) -> None:
        library = ctypes.PyDLL(None)
        while not (Path(folder) / name).exists():
            if holds_lock:
                library.usleep(500_000)
                break
            time.sleep(0.01)

    for step in session.steps(12):
        with step:
            if step == 3 and dist.get_rank() == 1:
                until_told("in-step")
            model(torch.ones(4, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step == 5 and dist.get_rank() == 1:
            until_told("between")
        if step == 7 and dist.get_rank() == 1:
            with session.quiet("outer"):
                with session.quiet("inner"):
                    until_told("quiet")
                until_told("outer")
        if step == 9 and dist.get_rank() == 1:
            with session.quiet("lock"):
                until_told("lock", holds_lock=True)
                print("page", Path(os.environ["FLASHREC_SOCKET"] + ".1.1.page").read_bytes(), file=sys.stderr)


def committer(out: str, timeout_s: float = 60.0) -> None:
    """Asks after each step whether its checkpoint may be put in place."""
    start()
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.04)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = flashrec.Session(model, optimizer)
    for step in session.steps(1_000_000):
        with step:
            model(torch.ones(4, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.is_done:
            answer = session.may_commit(timeout_s=timeout_s)
            print(f"step {step + 1} may commit: {answer}", file=sys.stderr, flush=True)


def fork_a_child(out: str) -> None:
    """A data loader's worker: forked in the middle, ends with an exception and runs its exit functions."""
    start()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in flashrec.Session(model, optimizer).steps(2):
        with step:
            child = os.fork()
            if child == 0:
                sys.excepthook(ValueError, ValueError("in the child"), None)
                atexit._run_exitfuncs()
                os._exit(0)
            os.waitpid(child, 0)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()


def blind(out: str) -> None:
    """gloo's addresses are not recognised."""
    gloo.parse_address = lambda blob: None
    start()


def deaf(out: str) -> None:
    """Connections are not shut at a fence, as if gloo had lost the operation."""
    gloo.shut = lambda listening: []
    train(out, faults=[(1, 1, 3, "stop-backward")], limits={"unblock_timeout_s": 1.0})


def busy(out: str) -> None:
    """Computes for longer than any limit, without a collective; a fence hits it there."""
    start(Limits(unblock_timeout_s=0.3))
    model = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in flashrec.Session(model, optimizer).steps(3):
        with step:
            model(torch.ones(1, 2)).sum().backward()
            if step == 1 and api._Process.worker.progress.generation == 1:
                assert api._Process.worker.board.wait_fence(1, 30)
                time.sleep(1.0)
            optimizer.step()
            optimizer.zero_grad()


def late_group(out: str) -> None:
    """Use groups, then free them before the interpreter ends, as good scripts do."""
    found = _use_groups()
    world = weakref.ref(dist.group.WORLD)
    gc.collect()
    dist.destroy_process_group()
    assert world() is None, f"the runtime keeps a destroyed group alive: {gc.get_referrers(world())}"
    Path(out).write_text(json.dumps(found))


def _use_groups() -> dict[str, Any]:
    """Collectives on the groups of a DeviceMesh, object and functional ones too, before and after a fence."""
    rank = start()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = flashrec.Session(model, optimizer)
    found = []
    for step in session.steps(40):
        with step:
            value = torch.full((4,), float(rank))
            dist.all_reduce(value, group=mesh["a"].get_group())
            gathered = torch.zeros(8)
            dist.all_gather_into_tensor(gathered, value, group=mesh["b"].get_group())
            objects = [None] * 4
            dist.all_gather_object(objects, rank)
            functional = torch.distributed._functional_collectives.all_reduce(value, "sum", mesh["b"])
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.is_done:
            found.append([gathered.tolist(), objects, functional.tolist()])
        time.sleep(0.005)
    return {"same": all(item == found[0] for item in found), "first": found[0]}


def digest(model: nn.Module, optimizer: torch.optim.Optimizer, *, with_buffers: bool = True) -> str:
    found = hashlib.sha256()
    tensors = dict(model.named_parameters()) | (dict(model.named_buffers()) if with_buffers else {})
    for index, slots in optimizer.state_dict()["state"].items():
        tensors |= {f"{index}.{name}": slot for name, slot in slots.items()}
    for name, tensor in tensors.items():
        found.update(name.encode())
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def train(
    out: str,
    steps: int = 6,
    faults: list[tuple[int, int, int, str]] = (),
    lose_vote: tuple[int, int] | None = None,
    micro_batches: int = 1,
    use_scaler: bool = False,
    bucket_view: bool = False,
    num_groups: int = 0,
    late_reduce: str = "",
    limits: dict[str, float] | None = None,
    bucket_cap_mb: float = 0.04,
    zero_first: bool = False,
    plain: bool = False,
    torn: tuple[int, int] | None = None,
    fresh_keys: bool = False,
    seed: int | None = 0,
    votes_by_collective: bool = False,
) -> None:
    """Train, write losses and digests.

    lose_vote: (rank, step) that does not learn the result of its vote before the fence is there. late_reduce: a
    collective after the optimizer, 'before-scheduler' or 'after-scheduler'. votes_by_collective: as on a GPU.
    """
    if plain:
        for name in [name for name in os.environ if name.startswith("FLASHREC_")]:
            del os.environ[name]
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    if fresh_keys:
        versions.find_release = groups.find_release = lambda: None
    if votes_by_collective:
        loop._trees = lambda *_: None
    rank = start(Limits(**(LIMITS.__dict__ | (limits or {}))))
    hit = Faults(list(faults))
    hit.visit(-1, "init")
    handles = [dist.new_group([r for r in range(dist.get_world_size()) if r % 2 == i % 2]) for i in range(num_groups)]
    torch.manual_seed(7)
    net = Net()
    model = DistributedDataParallel(net, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=bucket_view)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=use_scaler)
    world = dist.group.WORLD
    session = flashrec.Session(model, optimizer, state={"scheduler": scheduler, "scaler": scaler}, seed=seed)
    where = [0]
    for number, param in enumerate(net.parameters()):
        if number == 4:
            param.register_post_accumulate_grad_hook(lambda _: hit.visit(where[0], "backward"))
    if lose_vote and lose_vote[0] == rank:
        _lose_vote(lose_vote[1])
    if torn and torn[0] == rank:
        optimizer.register_step_pre_hook(lambda *_: _tear(net, where[0], torn[1]))
    hit.visit(-1, "join")
    losses: dict[int, list[str]] = {}
    redone = 0
    for step in session.steps(steps):
        with step:
            where[0] = int(step)
            hit.visit(step, "forward")
            if zero_first:
                optimizer.zero_grad()
            total = torch.zeros(())
            for micro in range(micro_batches):
                generator = torch.Generator().manual_seed(1000 + 100 * step + 10 * rank + micro)
                x, y = torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)
                loss = F.mse_loss(model(x), y)
                scaler.scale(loss).backward()
                total += loss.detach()
            hit.visit(step, "after-backward")
            if use_scaler:
                if step == 2:
                    next(net.parameters()).grad.fill_(float("inf"))
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            hit.visit(step, "before-vote")
            hit.visit(step, "raise")
            scaler.step(optimizer)
            scaler.update()
            hit.visit(step, "after-optimizer")
            if late_reduce == "before-scheduler":
                dist.all_reduce(total.clone())
            scheduler.step()
            if late_reduce == "after-scheduler":
                dist.all_reduce(total.clone())
            if not zero_first:
                optimizer.zero_grad()
        if step.is_done:
            losses[int(step)] = [float(total).hex(), float(optimizer.param_groups[0]["lr"]).hex()]
        else:
            redone += 1
        hit.visit(step, "between")
    hit.visit(steps, "after-loop")
    result: dict[str, Any] = {
        "losses": losses,
        "redone": redone,
        "digest": digest(model, optimizer, with_buffers=False),
        "full": digest(model, optimizer),
        "scaler": scaler.state_dict(),
        "kept": world is dist.group.WORLD and len(handles) == num_groups,
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }
    Path(out).write_text(json.dumps(result))


def _tear(net: nn.Module, step: int, wanted: int) -> None:
    """An optimizer that communicates (ZeRO) is cut half way; only the first life is hit."""
    if step == wanted and os.environ.get("FLASHREC_INCARNATION") == "1":
        with torch.no_grad():
            next(net.parameters()).add_(1.0)
        assert api._Process.worker.board.wait_fence(api._Process.worker.progress.generation, 30)
        raise RuntimeError("gloo: closed by peer (test)")


def _lose_vote(step: int) -> None:
    """The vote ends well for everybody; here it seems to be cut by the next fence."""
    worker = api._Process.worker
    lost: list[int] = []

    def losing(real: Callable[..., Any]) -> Callable[..., Any]:
        def count(counter: Any, voted: int, wants_pause: bool) -> Any:
            counted = real(counter, voted, wants_pause)
            if voted == step and not lost:
                lost.append(step)
                assert worker.board.wait_fence(worker.progress.generation, 30)
                raise RuntimeError("gloo: the result of the vote is lost (test)")
            return counted

        return count

    vote.AllReduce.count = losing(vote.AllReduce.count)
    tree.Tree.count = losing(tree.Tree.count)
