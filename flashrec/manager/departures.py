"""Nodes that are to leave the job: who says so, when they are let go, and when they come back.

Slurm's DRAIN is a wish, never a verdict: the node works, and the job on it must not be killed for it. The machine moves
its ranks at a step boundary when there is another place for them (`core.swap`), then asks for the node to be retired.
Health is judged in `manager.health`; here are Slurm and the job's user.
"""

from __future__ import annotations

from typing import Protocol

from flashrec.core import events as e
from flashrec.core.effects import RetireNode
from flashrec.manager.agents import AgentKeeper
from flashrec.manager.control import ControlPlane
from flashrec.manager.verdicts import Verdicts
from flashrec.manager.voice import say

DRAIN, ASKED = "drain", "asked"


class Job(Protocol):
    """The manager, as far as departures go."""

    control: ControlPlane
    verdicts: Verdicts

    def emit(self, event: e.AnyEvent) -> None: ...


class Departures:
    """agents: who starts agents. One object for the whole job."""

    def __init__(self, job: Job, agents: AgentKeeper) -> None:
        self._job, self._agents = job, agents
        self._draining: set[str] = set()
        self._asked: set[str] = set()

    def slurm_said(self, node: str, states: frozenset[str]) -> None:
        """Slurm's state of one node, as the keeper polled it."""
        if "UNKNOWN" in states:
            return
        if "DRAIN" in states and node not in self._draining:
            self._draining.add(node)
            why = f"Slurm says {'+'.join(sorted(states))}"
            say(f"node {node} is to leave at a step boundary: {why}")
            self._job.emit(e.NodeLeaving(node, why, DRAIN))
        elif "DRAIN" not in states and node in self._draining:
            self._draining.discard(node)
            say(f"node {node} may be used again: Slurm says {'+'.join(sorted(states))}")
            link = self._job.control.links.get(node)
            self._job.emit(e.NodeMended(node, link.incarnation if link else 0, "Slurm drains it no more", DRAIN))
            if node not in self._asked:
                self._job.verdicts.recall(node)
                self._agents.recall(node)

    def ask(self, node: str, reason: str) -> None:
        """The user wants the node given up, for good."""
        self._asked.add(node)
        self._job.emit(e.NodeLeaving(node, reason, ASKED))

    def retire(self, effect: RetireNode) -> None:
        """Its agent ends in good order; until the node is mended none is admitted or started there."""
        say(f"node {effect.node} is not used any more: {effect.reason}")
        self._agents.dismiss(effect.node)
        self._job.verdicts.retire(effect.node, effect.reason)

    def forget(self, node: str) -> None:
        """The node is not the job's any more; if it comes again, it comes anew."""
        self._draining.discard(node)
        self._asked.discard(node)
