"""Scripts of the contract suite: they use groups in every way that torch has, over several generations."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import flashrec
from flashrec.runtime import api, gloo, stuck
from flashrec.runtime.limits import Limits
from flashrec.runtime.store import TableStore
from tests.runtime import programs
from tests.runtime.engines import kinds

WORLD_SIZE = 4
ABSENT = {kinds.broadcast: 0, kinds.scatter: 1, kinds.reduce: 2, kinds.gather: 2}  # whose absence blocks somebody


def _limits(**changed: float) -> Limits:
    return Limits(**(programs.LIMITS.__dict__ | changed))


class Groups:
    """Every way to have a group: the world, `new_group`, of two devices, the dimensions of a DeviceMesh."""

    def __init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        pair = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
        self.groups = {
            "world": dist.group.WORLD,
            "pair": pair,
            "named": dist.new_group([3, 0, 2, 1], backend="cpu:gloo,cuda:gloo", sort_ranks=False),
            "a": self.mesh["a"].get_group(),
            "b": self.mesh["b"].get_group(),
        }
        self.names = {name: group.group_name for name, group in self.groups.items()}
        self.ids = self._ids()

    def _ids(self) -> list[int]:
        from_mesh = [self.mesh[dim].get_group() for dim in ("a", "b")]
        return [id(group) for group in [*self.groups.values(), dist.group.WORLD, *from_mesh]]

    def is_kept(self) -> bool:
        """The same objects under the same names, of the same size and rank."""
        names = {name: group.group_name for name, group in self.groups.items()}
        resolved = {
            name: dist.distributed_c10d._resolve_process_group(found) is self.groups[name]
            for name, found in names.items()
        }
        return self._ids() == self.ids and names == self.names and all(resolved.values())


def _wrong(groups: Groups, compiled: Any) -> list[str]:
    """Names of what did not give what it must; nothing but [] is right."""
    found = [
        f"{kind.__name__} in {name}"
        for name, group in groups.groups.items()
        for kind in kinds.KINDS
        if not kinds.is_right(kind(group))
    ]
    found += [f"DTensor in {dim}" for dim in ("a", "b") if not kinds.is_right(kinds.dtensor(groups.mesh[dim]))]
    found += [] if torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0 * WORLD_SIZE)) else ["compiled"]
    return found + ([] if groups.is_kept() else ["handles"])


def use_everything(out: str) -> None:
    """In each step, all kinds of collectives in all kinds of groups, until there is a file 'enough'. The first life of
    rank 3 stops when there is a file 'stop'."""
    rank, folder = programs.start(_limits()), Path(out).parent
    may_stop = rank == 3 and api._Process.worker.env.incarnation == 1
    groups, graphs = Groups(), []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def reduce(value: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(value, "sum", groups.groups["world"]) * 2

    compiled = torch.compile(reduce, backend=backend, fullgraph=True) if rank == 0 else reduce  # its import takes long

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    wrong: list[str] = []
    generations: set[int] = set()
    for step in flashrec.Session(model, optimizer).steps(1_000_000):
        with step:
            bad = _wrong(groups, compiled)
            if may_stop and (folder / "stop").exists():
                print("fault: stops", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGSTOP)
            last = torch.tensor([float((folder / "enough").exists())])
            dist.all_reduce(last)
            model(torch.full((2, 4), float(rank))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.is_done:
            wrong += bad
            generations.add(api._Process.worker.progress.generation)
            if last.item() > 0:
                break
    weights = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
    agreed = weights.clone()
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    result = {
        "wrong": wrong,
        "generations": sorted(generations),
        "graphs": len(graphs),
        "same": torch.equal(agreed, weights),
    }
    Path(out).write_text(json.dumps(result))


def stop_when_known(out: str, **config: Any) -> None:
    """A replacement that stops as soon as it has said where it can be reached. Of the groups that are formed side by
    side only one gets its address: a stopped process can be connected to, so with all of them a peer may be through."""
    post, posting = TableStore.set, threading.Lock()

    def post_and_stop(store: TableStore, key: str, value: Any) -> None:
        with posting:
            post(store, key, value)
            if gloo.addresses([value.encode() if isinstance(value, str) else bytes(value)]):
                print("fault: stops", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGSTOP)
                while True:  # the other threads stop a moment later than this one
                    time.sleep(1)

    TableStore.set = post_and_stop  # type: ignore[method-assign]
    programs.train(out, **config)


def never_idle(out: str) -> None:
    """As if gloo had lost an operation."""
    stuck.is_idle = lambda: False
    programs.endless(out)


def wait_in_each(out: str) -> None:
    """At step i all ranks but one are in kind i of collective until a fence cuts it; some may get through."""
    rank = programs.start(_limits())
    pair = dist.new_group([1, 0, 3, 2], sort_ranks=False)
    board = api._Process.worker.board
    model = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session = flashrec.Session(model, optimizer)
    cut: dict[str, list[Any]] = {}
    for step in session.steps(len(kinds.KINDS) + 1):
        generation = api._Process.worker.progress.generation
        with step:
            if generation == int(step) + 1:  # else the fence of this step has been
                _wait_in(kinds.KINDS[step] if step < len(kinds.KINDS) else None, rank, pair, board, generation, cut)
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    Path(out).write_text(json.dumps({"cut": cut}))


def _wait_in(kind: Any, rank: int, group: Any, board: Any, generation: int, cut: dict[str, list[Any]]) -> None:
    absent = ABSENT.get(kind, generation % WORLD_SIZE)
    print(f"fault: generation {generation}", file=sys.stderr, flush=True)
    if kind is not None and rank != absent:
        try:
            kind(group)
        except RuntimeError:
            cut[kind.__name__] = [time.monotonic()]
    assert board.wait_fence(generation, 60)
    time.sleep(0.2)  # the control thread cuts meanwhile
    for later in (kinds.all_reduce, kinds.barrier, kinds.all_gather_into_tensor):
        _note(f"later {later.__name__}", later, group, cut)
        _note(f"later {later.__name__}", later, dist.group.WORLD, cut)
    raise RuntimeError("gloo: as the collective said")


def _note(name: str, kind: Any, group: Any, cut: dict[str, list[Any]]) -> None:
    start = time.monotonic()
    try:
        kind(group)
    except RuntimeError:
        cut.setdefault(name, []).append(time.monotonic() - start)
    else:
        raise AssertionError(f"{name} of an older generation did not raise")
