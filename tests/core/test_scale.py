"""What a job costs the core as it grows, in looks at ranks and nodes: proportional to the ranks, whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from flashrec.core import effects as fx
from flashrec.core import events as e
from flashrec.core.detection import Detector
from flashrec.core.limits import Timing
from flashrec.core.lives import Judgement
from flashrec.core.machine import Machine
from flashrec.core.probing import choose
from flashrec.core.types import Phase, Report
from flashrec.core.unanimous import Unanimous

PER_NODE = 8


class Counted(list[Any]):
    """A list that counts how many of its items were looked at."""

    looks = 0

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            self.looks += 1
            yield item

    def __getitem__(self, index: Any) -> Any:
        self.looks += 1
        return super().__getitem__(index)


class Job:
    """A job of the core alone, whose ranks say at once what is expected of them."""

    def __init__(self, num_nodes: int, num_spares: int = 8) -> None:
        self.machine = Machine()
        self.nodes = tuple(f"n{i:04d}" for i in range(num_nodes + num_spares))
        self.incarnations = dict.fromkeys(self.nodes, 1)
        self.machine.handle(e.JobStarted(self.nodes, num_nodes, PER_NODE), 0.0)
        self.slots = self.machine.members.slots = Counted(self.machine.members.slots)

    def say(self, event: e.AnyEvent) -> list[fx.AnyEffect]:
        return self.machine.handle(event, 1.0)

    def of_all(self, event: type[Any], *more: Any) -> None:
        for slot in list.__iter__(self.slots):
            self.say(event(slot.rank, slot.incarnation, *more))

    def start(self) -> None:
        for node in self.nodes:
            self.say(e.AgentJoined(node, 1))
        self.of_all(e.WorkerStarted, 1)
        self.of_all(e.WorkerJoined)
        self.of_all(e.WorkerRestored, 1, 5)
        assert self.machine.phase is Phase.RUNNING
        self.of_all(e.WorkerCommitted, 1, 6)

    def lose(self, nodes: tuple[str, ...]) -> None:
        for node in nodes:
            self.say(e.NodeCondemned(node, 1, "lost"))
        generation, world = self.machine.generation, len(self.slots)
        for slot in list.__iter__(self.slots):
            group = tuple(range(slot.rank % PER_NODE, world, PER_NODE))
            report = Report(-1, -1, -1, False, group) if slot.joins else Report(6, 6, 5, True, group)
            self.say(e.WorkerReported(slot.rank, slot.incarnation, generation, report))
        assert self.machine.phase is Phase.FORMING
        self.of_all(e.WorkerFormed, generation)
        self.of_all(e.WorkerRestored, generation, 6)
        assert self.machine.phase is Phase.RUNNING
        self.of_all(e.WorkerCommitted, generation, 7)

    def finish(self) -> None:
        self.of_all(e.WorkerFinished, 9)
        for slot in list(list.__iter__(self.slots)):
            self.say(e.WorkerExited(slot.rank, slot.incarnation, "finished", True, "done"))
        assert self.machine.phase is Phase.STOPPED


def looks_per_rank(num_nodes: int) -> dict[str, float]:
    job = Job(num_nodes)
    found, before = {}, 0
    lost = job.nodes[2:3], job.nodes[4:8]
    for what, act in {
        "start": job.start,
        "one node": lambda: job.lose(lost[0]),
        "four nodes": lambda: job.lose(lost[1]),
        "end": job.finish,
    }.items():
        act()
        found[what] = (job.slots.looks - before) / len(job.slots)
        before = job.slots.looks
    return found


def test_every_part_of_a_job_costs_a_few_looks_at_each_rank() -> None:
    small, large = looks_per_rank(8), looks_per_rank(128)
    for what, looks in large.items():
        assert looks <= 1.25 * small[what] + 1, (what, small, large)
        assert looks <= 120, (what, looks)


class CountedNames(dict[str, Any]):
    """Records by name, of which nobody goes through all."""

    looks = 0

    def values(self) -> Any:
        self.looks += len(self)
        return super().values()

    def items(self) -> Any:
        self.looks += len(self)
        return super().items()


def test_an_answer_to_a_probe_costs_no_look_at_other_nodes() -> None:
    """In a bad moment thousands of nodes are suspected, and several others answer for each."""
    detector, names = Detector(Timing()), [f"n{number:03d}" for number in range(100)]
    for name in names:
        detector.joined(name, 1, 0.0)

    def silent(tenths: range) -> Judgement:
        for tenth in tenths:
            for name in names[1:]:
                detector.heard(name, 1, tenth / 10)
            found = detector.tick(tenth / 10)
        return found

    asked = silent(range(11)).probes
    lives = detector._lives = CountedNames(detector._lives)
    for probe in asked:
        detector.probed(probe.number, probe.by, probe.node, probe.node != "n000")
    assert asked and lives.looks == 0
    assert [v.state for v in silent(range(11, 16)).verdicts] == ["dead"], "and it counts: nobody reaches it"


def test_probers_are_found_without_going_through_all_nodes() -> None:
    fit = Counted(f"n{number:04d}" for number in range(4096))
    assert choose("n4000", fit, 3) == {"n4001": "n4002", "n4002": "n4003", "n4003": "n4004"}
    assert fit.looks <= 100


@pytest.mark.parametrize("order", ["forward", "backward", "inside out"])
def test_a_phase_costs_two_looks_a_rank_in_whatever_order_they_come(order: str) -> None:
    ranks = {
        "forward": range(300),
        "backward": range(299, -1, -1),
        "inside out": sorted(range(300), key=lambda i: abs(i - 150)),
    }
    done = [False] * 300
    asked, looks = Unanimous(), 0

    def is_done(rank: int) -> bool:
        nonlocal looks
        looks += 1
        return done[rank]

    for number, rank in enumerate(ranks[order]):
        done[rank] = True
        assert asked.is_met(range(300), is_done) is (number == 299)
    assert looks <= 3 * 300


def test_what_was_met_before_is_asked_again() -> None:
    asked = Unanimous()
    assert not asked.is_met([1, 1, 0], bool)
    assert not asked.is_met([0, 1, 1], bool)
    assert asked.is_met([1, 1, 1], bool) and not asked.is_met([1, 0, 1], bool)
    assert not asked.is_met([1, 0], bool)  # a shorter list


def test_nodes_that_are_lost_together_are_one_failure() -> None:
    job = Job(8)
    job.start()
    stale = e.NodeCondemned("n0004", 7, "of another life")
    asked = job.say(e.NodesCondemned((e.NodeCondemned("n0002", 1, "lost"), stale, e.NodeCondemned("n0003", 1, "lost"))))
    assert [type(effect) for effect in asked].count(fx.AnnounceFence) == 1 and job.machine.generation == 2
    (launch,) = [effect for effect in asked if isinstance(effect, fx.LaunchWorkers)]
    assert sorted(task.rank for tasks in launch.placement.values() for task in tasks) == [*range(16, 32)]
    assert job.machine.members.nodes["n0004"].alive
    assert job.say(e.NodesCondemned((stale,))) == [] and job.machine.generation == 2
