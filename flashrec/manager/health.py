"""What the agents say about the health of their nodes, and what follows from it.

A node is a place for ranks only after its first result, or after `admit_timeout_s` without one. A sick node gets ranks
only if there is no other place for them, and those it has move away at a step boundary (`NodeLeaving`). When more than
`max_sick` nodes turn sick together, they more likely share what is wrong, so the others stay in use.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from flashrec.config.schema import Health
from flashrec.core import events as e
from flashrec.manager.control import ControlPlane, Link
from flashrec.manager.journal import Journal
from flashrec.wire import messages as m

CAUSE = "health"
TOGETHER_S = 300.0


class Job(Protocol):
    """The manager, as far as health goes."""

    nodes: tuple[str, ...]
    job_id: int | None
    control: ControlPlane
    journal: Journal

    def emit(self, event: e.AnyEvent) -> None: ...

    def emit_all(self, events: Sequence[e.AnyEvent]) -> None: ...

    def report_faulty(self, node: str, reason: str) -> str: ...

    def say(self, text: str) -> None: ...


class HealthDesk:
    """`pass_on` takes every event of the agents on its way to the machine, `hear` what they say of their health."""

    def __init__(self, job: Job, rules: Health) -> None:
        self._job, self._rules = job, rules
        self._waiting: dict[str, e.AgentJoined] = {}
        self._states: dict[str, m.NodeHealth] = {}
        self._leaving: set[str] = set()
        self._onsets: dict[str, float] = {}
        self._said: set[str] = set()

    def pass_on(self, events: Sequence[e.AnyEvent]) -> None:
        """The news that an agent has joined (which comes alone) waits for what it says about its node."""
        event = events[0]
        if not isinstance(event, e.AgentJoined) or not self._rules.enabled:
            self._job.emit_all(events)
            return
        self._waiting[event.node] = event
        self._states.pop(event.node, None)
        asyncio.get_running_loop().call_later(self._rules.admit_timeout_s, self._waited, event)

    def hear(self, link: Link, said: m.NodeHealth) -> None:
        """The agent of a node has looked. Words about a former life of it do not count."""
        if said.incarnation != link.incarnation:
            return
        node = link.node
        self._states[node] = said
        self._job.journal.note("node health", node=node, state=said.state, reasons=said.reasons)
        if said.state == "sick":
            self._sick(node, said.reasons)
        elif said.state == "well":
            self._well(node, said.incarnation)
        else:
            self._say_once(f"health not known: {'; '.join(said.reasons) or 'no check could look'}", node)
        if node not in self._leaving:
            self._admit(node)
        if len(self._states) >= len(self._job.nodes) and all(known in self._states for known in self._job.nodes):
            self._admit_all()  # nobody else is awaited: the machine has to choose among these

    def forget(self, node: str) -> None:
        """The node is not the job's any more."""
        self._waiting.pop(node, None)
        self._states.pop(node, None)
        self._onsets.pop(node, None)
        self._leaving.discard(node)

    def state_of(self, node: str) -> str:
        """'well', 'sick' or 'unknown'."""
        return self._states[node].state if node in self._states else "unknown"

    # ---- what follows -----------------------------------------------------------------------------------------

    def _sick(self, node: str, reasons: tuple[str, ...]) -> None:
        what, now = "; ".join(reasons), time.monotonic()
        others = [n for n, began in self._onsets.items() if n != node and now - began < TOGETHER_S]
        self._onsets[node] = now
        if len(others) >= self._rules.max_sick:
            self._job.say(
                f"node {node} is sick too ({what}), but {len(others)} others are since the last {TOGETHER_S:g} s: that "
                "is more likely something they share, so it stays in use (health.max_sick)"
            )
            return
        self._job.say(
            f"node {node} is sick: {what}. It gets ranks only if there is no other place, and its ranks move away when "
            "there is one; `flashrec node-health` on the node shows more"
        )
        self._leaving.add(node)
        self._job.emit(e.NodeLeaving(node, f"sick: {what}", CAUSE))
        if self._job.job_id is not None:
            self._job.report_faulty(node, f"sick: {what}")

    def _well(self, node: str, incarnation: int) -> None:
        self._onsets.pop(node, None)
        if node in self._leaving:
            self._leaving.discard(node)
            self._job.say(f"node {node} is well again")
            self._job.emit(e.NodeMended(node, incarnation, "well again", CAUSE))

    def _waited(self, event: e.AgentJoined) -> None:
        if self._waiting.get(event.node) is not event:
            return
        if event.node not in self._states:
            reason = f"health not known: no result within {self._rules.admit_timeout_s:g} s"
            self._job.journal.note("node health", node=event.node, state="unknown", reasons=(reason,))
            self._say_once(reason, event.node)
        self._admit(event.node)

    def _admit(self, node: str) -> None:
        """Let the machine know of its agent, if that is still the same."""
        event, link = self._waiting.pop(node, None), self._job.control.links.get(node)
        if event is not None and link is not None and link.incarnation == event.incarnation:
            self._job.emit(event)

    def _admit_all(self) -> None:
        for node in list(self._waiting):
            self._admit(node)

    def _say_once(self, what: str, node: str) -> None:
        """The same may hold for every node of the job."""
        if what not in self._said:
            self._said.add(what)
            self._job.say(f"node {node}: {what} (the same is not said again for other nodes)")
