"""Who is admitted when, who has to leave, and what is said about it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from flashrec.config.schema import Health
from flashrec.core import events as e
from flashrec.manager.health import HealthDesk
from flashrec.wire import messages as m

NODES = ("n1", "n2", "n3", "n4")


class Job:
    """The manager as the desk sees it. `join` and `say_health` are what an agent does."""

    def __init__(self, **rules: Any) -> None:
        self.nodes, self.job_id = NODES, 7
        self.journal, self.notes = SimpleNamespace(note=self._note), []
        self.control: Any = SimpleNamespace(links={})
        self.events: list[e.AnyEvent] = []
        self.said: list[str] = []
        self.reported: list[tuple[str, str]] = []
        self.desk = HealthDesk(self, Health(**rules))

    def _note(self, what: str, **fields: Any) -> None:
        self.notes.append({"what": what, **fields})

    def emit_all(self, events: Sequence[e.AnyEvent]) -> None:
        self.events += events

    def emit(self, event: e.AnyEvent) -> None:
        self.events.append(event)

    def report_faulty(self, node: str, reason: str) -> str:
        self.reported.append((node, reason))
        return ""

    def say(self, text: str) -> None:
        self.said.append(text)

    def join(self, node: str, incarnation: int = 1) -> None:
        self.control.links[node] = SimpleNamespace(node=node, incarnation=incarnation)
        self.desk.pass_on((e.AgentJoined(node, incarnation),))

    def say_health(self, node: str, state: str, *reasons: str, incarnation: int = 1) -> None:
        self.desk.hear(self.control.links[node], m.NodeHealth(incarnation, state, reasons))

    def joined(self) -> list[str]:
        return [event.node for event in self.events if isinstance(event, e.AgentJoined)]

    def leaving(self) -> list[str]:
        return [event.node for event in self.events if isinstance(event, e.NodeLeaving)]


def play(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 10))


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def test_a_node_is_admitted_with_its_first_result_and_other_events_pass() -> None:
    async def scene() -> None:
        job = Job()
        job.join("n1")
        job.desk.pass_on((e.WorkerJoined(0, 1), e.WorkerJoined(1, 1)))
        assert job.events == [e.WorkerJoined(0, 1), e.WorkerJoined(1, 1)]
        job.say_health("n1", "well")
        assert job.events[2:] == [e.AgentJoined("n1", 1)]
        job.say_health("n1", "well")
        assert len(job.events) == 3
        assert (job.desk.state_of("n1"), job.desk.state_of("n2")) == ("well", "unknown")

    play(scene)


def test_switched_off_nobody_waits() -> None:
    async def scene() -> None:
        job = Job(enabled=False)
        job.join("n1")
        assert job.joined() == ["n1"]

    play(scene)


def test_a_node_that_says_nothing_is_admitted_after_a_while_with_a_note() -> None:
    async def scene() -> None:
        job = Job(admit_timeout_s=0.05)
        job.join("n1")
        job.join("n2")
        await until(lambda: len(job.joined()) == 2)
        assert [note["state"] for note in job.notes] == ["unknown", "unknown"]
        (said,) = job.said
        assert "node n1: health not known: no result within 0.05 s" in said
        job.say_health("n1", "well")
        assert len(job.joined()) == 2

    play(scene)


def test_could_not_look_is_no_objection_and_is_said_once() -> None:
    async def scene() -> None:
        job = Job()
        for node in ("n1", "n2"):
            job.join(node)
            job.say_health(node, "unknown", "checks: no checks are installed")
        assert job.joined() == ["n1", "n2"] and not job.leaving()
        assert len(job.said) == 1 and "health not known: checks: no checks are installed" in job.said[0]

    play(scene)


def test_a_sick_node_waits_until_the_others_have_joined_and_is_then_the_last_resort() -> None:
    """The machine knows that it is to leave before it hears of its agent, so it takes a spare."""

    async def scene() -> None:
        job = Job()
        for node in NODES:
            job.join(node)
        job.say_health("n1", "sick", "disk: /tmp is read-only")
        assert job.joined() == [] and job.events == [e.NodeLeaving("n1", "sick: disk: /tmp is read-only", "health")]
        for node in NODES[1:]:
            assert "n1" not in job.joined()
            job.say_health(node, "well")
        assert job.joined() == ["n2", "n3", "n4", "n1"]
        assert job.reported == [("n1", "sick: disk: /tmp is read-only")]
        (said,) = job.said
        assert "node n1 is sick: disk: /tmp is read-only" in said and "flashrec node-health" in said

    play(scene)


def test_a_sick_node_does_not_wait_for_ever() -> None:
    async def scene() -> None:
        job = Job(admit_timeout_s=0.05)
        job.join("n1")
        job.say_health("n1", "sick", "disk: full")
        assert not job.joined()
        await until(job.joined)
        assert not any("not known" in text for text in job.said)

    play(scene)


def test_a_node_that_turns_sick_leaves_and_one_that_is_well_again_may_be_used() -> None:
    async def scene() -> None:
        job = Job()
        for node in NODES:
            job.join(node)
            job.say_health(node, "well")
        job.say_health("n2", "sick", "gpu 0 Xid 79: it has fallen off the bus")
        assert job.events[-1] == e.NodeLeaving("n2", "sick: gpu 0 Xid 79: it has fallen off the bus", "health")
        job.say_health("n2", "well")
        assert job.events[-1] == e.NodeMended("n2", 1, "well again", "health")
        job.say_health("n3", "well")
        assert job.events[-1].node == "n2", "nothing was held against n3"  # type: ignore[union-attr]

    play(scene)


def test_a_former_life_has_no_voice_and_no_place() -> None:
    async def scene() -> None:
        job = Job(admit_timeout_s=0.05)
        job.join("n1")
        job.join("n1", incarnation=2)
        job.say_health("n1", "sick", "disk: full", incarnation=1)
        assert not job.leaving() and job.desk.state_of("n1") == "unknown"
        job.desk._waited(e.AgentJoined("n1", 1))
        assert not job.joined(), "the time that the former life had is not the new one's"
        job.say_health("n1", "well", incarnation=2)
        assert job.events == [e.AgentJoined("n1", 2)]
        job.join("n2")
        del job.control.links["n2"]  # condemned before it has said anything
        await asyncio.sleep(0.1)
        assert job.joined() == ["n1"]

    play(scene)


@pytest.mark.parametrize("max_sick", [1, 2])
def test_many_sick_at_once_share_what_is_wrong(max_sick: int) -> None:
    async def scene() -> None:
        job = Job(max_sick=max_sick)
        for node in NODES:
            job.join(node)
        for node in NODES:
            job.say_health(node, "sick", "mounts: /scratch does not answer")
        assert job.leaving() == list(NODES[:max_sick])
        assert set(job.joined()) == set(NODES)
        assert "something they share" in job.said[-1]
        job.say_health("n4", "well")
        assert not any(isinstance(event, e.NodeMended) for event in job.events), "it was never to leave"

    play(scene)


def test_sick_now_and_then_is_not_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        clock = [1000.0]
        monkeypatch.setattr("flashrec.manager.health.time.monotonic", lambda: clock[0])
        job = Job(max_sick=1)
        for node in NODES:
            job.join(node)
            job.say_health(node, "well")
        for node in NODES:
            clock[0] += 301
            job.say_health(node, "sick", "disk: broken")
        assert job.leaving() == list(NODES)

    play(scene)


def test_a_node_that_left_the_job_is_forgotten() -> None:
    async def scene() -> None:
        job = Job()
        job.join("n1")
        job.say_health("n1", "sick", "disk: full")
        job.desk.forget("n1")
        job.join("n1", incarnation=2)
        job.say_health("n1", "well", incarnation=2)
        assert not any(isinstance(event, e.NodeMended) for event in job.events)

    play(scene)
