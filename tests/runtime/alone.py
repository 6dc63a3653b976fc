"""Run a function as one rank of a job that has no other ranks: collectives do nothing. For what is found out without
communication. Each call gets a process of its own, because torch keeps what it has found out about meshes."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from tests.runtime import support


def run(rank: int, world_size: int, function: Callable[..., Any], *args: Any) -> Any:
    """What `function(*args)` returns there; fails with its traceback if it raises."""
    support._start_fork_server()
    ours, theirs = support._context.Pipe()
    process = support._context.Process(target=_child, args=(theirs, rank, world_size, function, args), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(support.TIMEOUT_S), "the process gave no answer"
    answer, error = ours.recv()
    process.join(10)
    assert not error, error
    return answer


def _child(pipe: Any, rank: int, world_size: int, function: Callable[..., Any], args: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        pipe.send((function(*args), ""))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
