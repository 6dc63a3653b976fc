"""Nodes that are to leave: what Slurm and the user say becomes events, and never a verdict."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flashrec.core import events as e
from flashrec.core.effects import RetireNode
from flashrec.manager.departures import Departures


class World:
    """Plays manager, verdicts and keeper; node n1 has the third life of its agent."""

    def __init__(self) -> None:
        self.events: list[e.AnyEvent] = []
        self.done: list[tuple[str, str]] = []
        self.control: Any = SimpleNamespace(links={"n1": SimpleNamespace(incarnation=3)})
        self.verdicts: Any = SimpleNamespace(
            retire=lambda node, reason: self.done.append(("retire", node)),
            recall=lambda node: self.done.append(("admit", node)),
        )
        agents: Any = SimpleNamespace(
            dismiss=lambda node: self.done.append(("start none", node)),
            recall=lambda node: self.done.append(("start", node)),
        )
        self.departures = Departures(self, agents)

    def emit(self, event: e.AnyEvent) -> None:
        self.events.append(event)

    def slurm_says(self, node: str, *states: str) -> None:
        self.departures.slurm_said(node, frozenset(states))


@pytest.mark.parametrize("base", ["ALLOCATED", "MIXED", "DRAINING", "IDLE"])
def test_drain_of_a_node_in_use_is_a_wish_and_nothing_is_killed(base: str) -> None:
    world = World()
    world.slurm_says("n1", base, "DRAIN")
    world.slurm_says("n1", base, "DRAIN")
    assert world.events == [e.NodeLeaving("n1", f"Slurm says {'+'.join(sorted((base, 'DRAIN')))}", "drain")], "once"
    assert not world.done


def test_a_node_that_is_not_drained_any_more_may_be_used_again() -> None:
    world = World()
    world.slurm_says("n1", "ALLOCATED")
    assert not world.events
    world.slurm_says("n1", "ALLOCATED", "DRAIN")
    world.departures.retire(RetireNode("n1", "Slurm says DRAIN"))
    assert world.done == [("start none", "n1"), ("retire", "n1")]
    world.slurm_says("n1", "UNKNOWN")
    assert len(world.events) == 1, "could not look"
    world.slurm_says("n1", "ALLOCATED")
    assert world.events[1:] == [e.NodeMended("n1", 3, "Slurm drains it no more", "drain")]
    assert world.done[2:] == [("admit", "n1"), ("start", "n1")]
    world.slurm_says("n1", "ALLOCATED")
    assert len(world.events) == 2


def test_what_the_user_has_given_up_is_not_taken_back() -> None:
    world = World()
    world.departures.ask("n2", "replace asked for")
    world.slurm_says("n2", "ALLOCATED", "DRAIN")
    world.slurm_says("n2", "ALLOCATED")
    assert world.events == [
        e.NodeLeaving("n2", "replace asked for", "asked"),
        e.NodeLeaving("n2", "Slurm says ALLOCATED+DRAIN", "drain"),
        e.NodeMended("n2", 0, "Slurm drains it no more", "drain"),
    ]
    assert not world.done


def test_a_node_that_comes_from_the_pool_again_comes_anew() -> None:
    world = World()
    world.slurm_says("n1", "ALLOCATED", "DRAIN")
    world.departures.forget("n1")
    world.slurm_says("n1", "ALLOCATED", "DRAIN")
    assert len(world.events) == 2
