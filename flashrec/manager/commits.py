"""Answers `session.may_commit()`: the machine knows which generation and which lives count, `core.permits` the rest."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from flashrec.core.machine import Machine
from flashrec.core.permits import Permits
from flashrec.manager.control import ControlPlane, Link
from flashrec.manager.journal import Journal
from flashrec.wire import messages as m


class Job(Protocol):
    """The manager, as far as commits go."""

    machine: Machine
    control: ControlPlane
    journal: Journal


class CommitDesk:
    """valid_s: how long a permission may be used."""

    def __init__(self, job: Job, valid_s: float) -> None:
        self._job = job
        self._permits = Permits(valid_s, self._is_current)
        self._num_loads = 0

    def hear(self, link: Link, asked: m.CommitAsked) -> None:
        """Answer now, or when the promise to a rank that was replaced meanwhile has run out."""
        machine, now = self._job.machine, time.monotonic()
        if machine.num_loads != self._num_loads:  # all ranks went back: what comes now is older than what was permitted
            self._num_loads, self._permits.newest = machine.num_loads, -1
        if asked.generation != machine.training and not machine.members.is_complete:
            self._answer(link.node, asked, f"generation {asked.generation} is superseded by {machine.generation}")
            return
        permit = self._permits.ask(asked.rank, asked.incarnation, asked.step, now)
        if permit.retry_at is not None:
            asyncio.get_running_loop().call_later(permit.retry_at - now + 0.001, self.hear, link, asked)
            return
        self._answer(link.node, asked, permit.reason)

    def _answer(self, node: str, asked: m.CommitAsked, objection: str) -> None:
        self._job.journal.note(
            "commit refused" if objection else "commit granted", rank=asked.rank, incarnation=asked.incarnation,
            generation=asked.generation, step=asked.step, **({"reason": objection} if objection else {}),
        )  # fmt: skip
        self._job.control.send(
            node,
            m.CommitAnswered(
                asked.rank, asked.incarnation, asked.request, not objection, objection, self._permits.valid_s
            ),
        )

    def _is_current(self, rank: int, incarnation: int) -> bool:
        return self._job.machine.members.acting(rank, incarnation) is not None
