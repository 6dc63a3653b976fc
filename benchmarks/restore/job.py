"""The ranks of one row: they build the layout with real process groups, then measure in turns.

Rank 0 is the source, the target is the next rank that holds the same shard; of DDP one more rank is a further source.
Every way is timed from a barrier on to the end of the target. Peak memory is VmHWM, set back before each restore.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.restore import raw
from flashrec.runtime import transfer
from flashrec.runtime.state import State
from flashrec.runtime.transfer.pieces import cut
from flashrec.runtime.transfer.source import num_streams

SECRET = b"0" * 32
TENSORS_OF = {"few": 8, "many": 2000}
_TIMEOUT_S = 60.0
_ADAM = 3  # a parameter and two of the optimizer


class Measured(msgspec.Struct):
    """Of one round. seconds: by way. cpu_s: of source and target together, by way. peak: highest memory over what the
    rank holds when the restore is over, by end."""

    seconds: dict[str, float]
    cpu_s: dict[str, float]
    peak: dict[str, float]


class Row(msgspec.Struct):
    layout: str
    tensors: str
    num_tensors: int
    num_bytes: int  # that travel
    streams: int
    rounds: list[Measured] = []


WORLD = {"ddp": 3, "hsdp": 4}
TARGET = {"ddp": 1, "hsdp": 2}


def main(rank: int, folder: str, layout: str, tensors: str, num_bytes: int, rounds: int) -> None:
    """One process. Rank TARGET[layout] writes the row."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD[layout])
    model = _build(layout, tensors, num_bytes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    state = State(model, [optimizer], {}, sends_random_state=False)
    role = {0: "source", TARGET[layout]: "target"}.get(rank, "further" if layout == "ddp" else "")
    bench = _Bench(role, TARGET[layout], state, optimizer)
    row = Row(layout, tensors, len(bench.specs), bench.num_bytes, bench.streams)
    ways = bench.ways(["restore", "joiner", "raw", "memcpy", *(["striped"] if layout == "ddp" else [])])
    for number in range(-1, rounds):  # the first is not counted
        measured = Measured({}, {}, {})
        for name in list(ways)[:: 1 if number % 2 else -1]:
            bench.measure(name, ways[name], measured)
        if number >= 0:
            row.rounds.append(measured)
    if role == "target":
        (Path(folder) / "row.json").write_bytes(msgspec.json.encode(row))
    dist.barrier()
    # torch 2.13 can hang at the end: DDP's reducer lets go of the last reference to the group, whose destructor joins a
    # thread while this one holds the interpreter, and that thread wants it to give back a tensor of the barrier.
    os._exit(0)


def _build(layout: str, tensors: str, num_bytes: int) -> nn.Module:
    """A model of which each rank holds about `num_bytes` with its optimizer state; `tensors`: one of TENSORS_OF."""
    shards = 2 if layout == "hsdp" else 1
    numel = shards * num_bytes // (4 * _ADAM * (TENSORS_OF[tensors] // _ADAM + 1))
    width = max(4, int(numel**0.5) // 4 * 4)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(TENSORS_OF[tensors] // _ADAM + 1)))
    if layout == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    return model


class _Bench:
    def __init__(self, role: str, target: int, state: State, optimizer: torch.optim.Optimizer) -> None:
        self._role, self._target, self._state, self._optimizer = role, target, state, optimizer
        self._port = 0
        self.specs = state.manifest(0, {}).specs()
        self.num_bytes = sum(spec.num_bytes for spec in self.specs)
        self.streams = num_streams(len(cut(self.specs)), 1)
        memory = torch.ones(self.num_bytes if role in ("source", "target") else 0, dtype=torch.uint8)
        self._memory, self._copy = memory, torch.zeros_like(memory) if role == "target" else memory

    def ways(self, names: list[str]) -> dict[str, Callable[[], None]]:
        return {name: getattr(self, f"_{name}") for name in names}

    def measure(self, name: str, way: Callable[[], None], into: Measured) -> None:
        if name == "joiner" and self._role == "target":
            self._optimizer.state.clear()  # as a new process has it
        with transfer.listen("127.0.0.1") as self._listener:
            port = torch.tensor([self._listener.getsockname()[1]])
            dist.broadcast(port, self._target)
            self._port = int(port)
            Path("/proc/self/clear_refs").write_text("5")
            dist.barrier()
            began, cpu = time.perf_counter(), _cpu_s()
            way()
            seconds, cpu = time.perf_counter() - began, _cpu_s() - cpu
        peak = _memory_kib("VmHWM") / _memory_kib("VmRSS")
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (self._role, seconds, cpu, peak))
        into.seconds[name] = next(seconds for role, seconds, _, _ in every if role == "target")
        into.cpu_s[name] = sum(cpu for _, _, cpu, _ in every)
        if name in ("restore", "joiner", "striped"):
            into.peak |= {f"{role} {name}": peak for role, _, _, peak in every if role in ("source", "target")}

    def _restore(self, sources: tuple[int, ...] = (0,)) -> None:
        if self._role == "target":
            transfer.receive_state(
                self._listener, transfer.Sockets(), SECRET, self._state, _TIMEOUT_S, sources=sources
            )  # fmt: skip
        elif dist.get_rank() in sources:
            transfer.send(
                transfer.Address("127.0.0.1", self._port), transfer.Sockets(), SECRET,
                transfer.Holding.of(self._state, 7, {}), _TIMEOUT_S, source=dist.get_rank(), num_sources=len(sources),
            )  # fmt: skip

    def _joiner(self) -> None:
        self._restore()

    def _striped(self) -> None:
        self._restore((0, 2))

    def _raw(self) -> None:
        if self._role == "target":
            raw.receive(self._listener, self._copy, self.streams)
        elif self._role == "source":
            raw.send(self._port, self._memory, self.streams)

    def _memcpy(self) -> None:
        if self._role == "target":
            raw.copy(self._copy, self._memory)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _memory_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
