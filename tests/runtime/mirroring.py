"""Mirrors of several ranks in one process: real sockets and real states, with a control plane that is a table."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashrec.core.types import Report
from flashrec.runtime.errors import Superseded
from flashrec.runtime.mirrors import placement
from flashrec.runtime.mirrors.part import Mirrors
from flashrec.runtime.mirrors.placement import Places
from flashrec.wire import messages as m
from tests.runtime.test_mirrors import SECRET, TIMEOUT_S, Trained

EACH_OTHER = Places(("n1", "n2"), ("", ""), {0: 1, 1: 0})
ONLY_0 = Places(("n1", "n2"), ("", ""), {0: 1})
NOBODY = Places(("n1", "n2"), ("", ""), {})
REPORT = Report(6, 5, 5, True, (0,))


class Keys:
    """The control plane: what is set can be read by all; a fence ends who waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[tuple[str, int], bytes] = {}
        self.announced = 1
        self.posted: list[tuple[str, int, int]] = []  # group, generation, by which rank

    def store(self, rank: int, group: str, members: tuple[int, ...], generation: int) -> Any:
        assert rank in members, "nobody else is pushed what is set"

        def put(key: str, value: bytes) -> None:
            with self._changed:
                self.posted.append((group, generation, rank))
                self._values[group, generation] = value
                self._changed.notify_all()

        def get(key: str) -> bytes:
            with self._changed:
                assert self._changed.wait_for(
                    lambda: (group, generation) in self._values or self.announced > generation, TIMEOUT_S
                )
                if self.announced > generation:
                    raise Superseded
                return self._values[group, generation]

        return SimpleNamespace(set=put, get=get)

    def fence(self) -> None:
        with self._changed:
            self.announced += 1
            self._changed.notify_all()


class Worker:
    """What mirrors need of one; sent, marks: what they told the manager, and the timeline."""

    def __init__(self, rank: int, keys: Keys, joins: bool) -> None:
        self.rank, self.secret, self.keys = rank, SECRET, keys
        self.env = SimpleNamespace(rank=rank, joins=joins, node=f"n{rank + 1}", switch="s", incarnation=3)
        self.progress = SimpleNamespace(generation=1)
        self.limits = SimpleNamespace(transfer_timeout_s=10 * TIMEOUT_S, resume_timeout_s=TIMEOUT_S)
        self.sent: list[m.MirrorsMeasured] = []
        self.marks: list[dict[str, Any]] = []
        self.control = SimpleNamespace(welcome=SimpleNamespace(address="127.0.0.1"), send=self.sent.append)
        self.timeline = SimpleNamespace(mark=lambda what, **fields: self.marks.append({"what": what, **fields}))
        self.board = keys  # as far as `announced` goes

    def store(self, group: str, members: tuple[int, ...], generation: int, timeout_s: float) -> Any:
        return self.keys.store(self.rank, group, members, generation)


class Job:
    """Makes the mirrors of ranks. places: what they find when they look where all are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys, self.places, self.asked = Keys(), EACH_OTHER, list[dict[str, Any]]()
        self.trained: dict[int, Trained] = {}
        self.workers: dict[int, Worker] = {}
        self.made: list[Mirrors] = []
        monkeypatch.setattr(placement, "find", self._find)

    def _find(self, node: str, switch: str, replicas: Any, mode: Any, device: Any, *, first: bool) -> Places:
        self.asked.append({"node": node, "switch": switch, "replicas": replicas, "mode": mode, "first": first})
        return self.places

    def mirrors(self, rank: int, mode: bool | str = True, joins: bool = False) -> Mirrors:
        worker: Any = Worker(rank, self.keys, joins)
        self.workers[rank], self.trained[rank] = worker, Trained(rank)
        made = Mirrors(worker, self.trained[rank].state, mode, lambda: (rank,), torch.device("cpu"))
        self.made.append(made)
        return made

    def begin(self, generation: int) -> None:
        for worker in self.workers.values():
            worker.progress.generation = generation


def step(v: int, *all_mirrors: Mirrors) -> None:
    for mirrors in all_mirrors:
        mirrors.open(v)
    for mirrors in all_mirrors:
        mirrors.before_vote(v)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def report(mirrors: Mirrors) -> tuple[tuple[int, ...], dict[int, tuple[int, ...]]]:
    """What it says after a fence."""
    said = mirrors.freeze(REPORT)
    assert (said.v, said.voted, said.passed) == (REPORT.v, REPORT.voted, REPORT.passed)
    return said.keeps, said.holds
