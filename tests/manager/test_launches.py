"""Launches with a fake launcher: outages are waited for, failures are told once and by name, nobody is left behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from flashrec.core.events import LaunchFailed
from flashrec.core.membership import Slot
from flashrec.core.types import Assignment
from flashrec.manager import launches
from flashrec.manager.launches import Launches
from flashrec.manager.steps import Step
from flashrec.wire import messages as m

LIMIT_S = 20
OUTAGE = "srun: error: Unable to confirm allocation for job 5: Unable to contact slurm controller (connect failure)"
SETTLING = "srun: error: Unable to create step for job 5: Memory required by task is not available"
BAD = "srun: error: Unable to create step for job 5: Requested node configuration is not available"


class World:
    """One slot per rank in incarnation 1, as the machine would have it; steps run the given shell scripts in turn."""

    def __init__(self, folder: Path, *scripts: str) -> None:
        self.folder, self.scripts = folder, list(scripts)
        self.slots = {rank: Slot(rank, f"n{rank // 2}", rank % 2, incarnation=1, state="launched") for rank in range(4)}
        self.made: list[Step] = []
        self.sent: list[tuple[str, m.Message]] = []
        self.failed: list[LaunchFailed] = []
        self.notes: list[str] = []
        self.jobs: dict[str, int] = {}
        self.launches = Launches(
            self, lambda node, message: self.sent.append((node, message)), self.slot_of, self.failed.append, self.note
        )  # type: ignore[arg-type]

    def job_of(self, node: str) -> int:
        return self.jobs.get(node, 5)

    def workers(self, launch: int, placement: Mapping[str, Sequence[Assignment]]) -> Step:
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        log = self.folder / f"step-{launch}.log"
        self.made.append(Step(f"workers {launch}", log, placement, [["sh", "-c", script]], [os.environ]))
        return self.made[-1]

    def slot_of(self, rank: int, incarnation: int) -> Slot | None:
        slot = self.slots[rank]
        return slot if slot.incarnation == incarnation and slot.state != "unplaced" else None

    def note(self, what: str, **_: Any) -> None:
        self.notes.append(what)

    def begin(self, *ranks: int) -> None:
        placement: dict[str, tuple[Assignment, ...]] = {}
        for rank in ranks:
            slot = self.slots[rank]
            task = Assignment(rank, slot.local_rank, slot.incarnation, 1, False)
            placement[slot.node] = (*placement.get(slot.node, ()), task)
        self.launches.begin(placement)


def play(scene: Callable[[], Awaitable[None]]) -> None:
    """Run a scene; what a launch's own task raises ends it at once, as it would end the job."""

    async def watched() -> None:
        loop, failed = asyncio.get_running_loop(), asyncio.Event()
        found: list[BaseException] = []

        def unhandled(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            found.append(context.get("exception") or RuntimeError(context["message"]))
            failed.set()

        loop.set_exception_handler(unhandled)
        running, bad = asyncio.ensure_future(scene()), asyncio.ensure_future(failed.wait())
        await asyncio.wait([running, bad], timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        bad.cancel()
        if found:
            running.cancel()
            raise found[0]
        assert running.done(), f"the scene did not end within {LIMIT_S} s"
        await running

    asyncio.run(watched())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "OUTAGE_RETRY_S", 0.1)


def test_agents_hear_whom_to_expect_before_anything_starts(tmp_path: Path) -> None:
    async def scene() -> None:
        world = World(tmp_path, "true")
        world.begin(0, 1, 2, 3)
        assert [(node, [a.rank for a in x.tasks], x.launch) for node, x in world.sent] == [
            ("n0", [0, 1], 1), ("n1", [2, 3], 1),
        ]  # fmt: skip
        assert not world.made
        await until(lambda: world.failed)

    play(scene)


def test_nodes_with_different_numbers_of_tasks_get_a_step_each(tmp_path: Path) -> None:
    async def scene() -> None:
        world = World(tmp_path, "true")
        world.begin(0, 2, 3)
        await until(lambda: not world.launches.tasks)
        assert [x.launch for _, x in world.sent] == [1, 2]
        assert sorted(step.nodes for step in world.made) == [{"n0"}, {"n1"}]

    play(scene)


def test_nodes_of_different_slurm_jobs_get_a_step_each(tmp_path: Path) -> None:
    """A node from a pool is in a companion job, and a job step is in one job."""

    async def scene() -> None:
        world = World(tmp_path, "true")
        world.jobs = {"n1": 12}
        world.begin(0, 1, 2, 3)
        await until(lambda: not world.launches.tasks)
        assert sorted(sorted(step.nodes) for step in world.made) == [["n0"], ["n1"]]
        assert [x.launch for _, x in world.sent] == [1, 2]

    play(scene)


def test_whoever_did_not_start_is_told_by_node(tmp_path: Path) -> None:
    async def scene() -> None:
        world = World(tmp_path, f"echo '{BAD}'; exit 1")
        for rank in (0, 2):
            world.slots[rank].state = "up"
        world.begin(0, 1, 2, 3)
        await until(lambda: len(world.failed) == 2)
        assert [(x.node, x.workers) for x in world.failed] == [("n0", ((1, 1),)), ("n1", ((3, 1),))]
        assert "Requested node configuration" in world.failed[0].reason
        assert "code 1" in world.failed[0].reason

    play(scene)


def test_a_step_whose_tasks_have_all_started_has_not_failed(tmp_path: Path) -> None:
    async def scene() -> None:
        world = World(tmp_path, "exit 3")
        for slot in world.slots.values():
            slot.state = "gone"
        world.begin(0, 1, 2, 3)
        await until(lambda: not world.launches.tasks)
        assert world.failed == []
        assert world.launches.worst_code == 3

    play(scene)


def test_a_command_that_cannot_be_started_is_a_failure(tmp_path: Path) -> None:
    async def scene() -> None:
        world = World(tmp_path / "missing", "true")
        world.begin(0)
        await until(lambda: world.failed)
        assert "cannot start workers 1" in world.failed[0].reason

    play(scene)


def test_a_controller_that_has_just_come_back_is_given_time(tmp_path: Path) -> None:
    async def scene() -> None:
        world = World(tmp_path, f"echo '{OUTAGE}'; exit 1", f"echo '{SETTLING}'; exit 1", "exec sleep 60")
        world.begin(0, 1)
        await until(lambda: len(world.made) == 3)
        assert world.failed == []
        for rank in (0, 1):
            world.slots[rank].state = "up"
        await world.launches.stop(0.05)

    play(scene)


def test_but_a_refusal_that_stays_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        world = World(tmp_path, f"echo '{SETTLING}'; exit 1")
        world.begin(0, 1)
        await until(lambda: world.failed)
        assert len(world.made) == 1 + 3
        assert "Memory required by task" in world.failed[0].reason

    monkeypatch.setattr(launches, "MAX_SETTLING_TRIES", 3)
    play(scene)


def test_an_outage_is_waited_for_until_it_works(tmp_path: Path) -> None:
    async def scene() -> None:
        world = World(tmp_path, f"echo '{OUTAGE}'; exit 1", f"echo '{OUTAGE}'; exit 1", "exec sleep 60")
        world.begin(0, 1)
        await until(lambda: len(world.made) == 3)
        assert world.failed == []
        assert world.notes == ["launch waits for Slurm's controller"] * 2
        for rank in (0, 1):
            world.slots[rank].state = "up"
        await world.launches.stop(0.05)

    play(scene)


def test_a_failure_after_an_outage_is_a_failure(tmp_path: Path) -> None:
    """What an earlier try printed does not count any more."""

    async def scene() -> None:
        world = World(tmp_path, f"echo '{OUTAGE}'; exit 1", f"echo '{BAD}'; exit 1")
        world.begin(0)
        await until(lambda: world.failed or len(world.made) > 2)
        assert len(world.made) == 2
        assert "Requested node configuration" in world.failed[0].reason

    play(scene)


def test_an_outage_that_hits_only_some_is_a_failure_of_those(tmp_path: Path) -> None:
    async def scene() -> None:
        world = World(tmp_path, f"echo '{OUTAGE}'; exit 1")
        world.slots[0].state = "up"
        world.begin(0, 1)
        await until(lambda: world.failed)
        assert world.failed[0].workers == ((1, 1),)

    play(scene)


def test_nobody_is_launched_who_is_not_wanted_any_more(tmp_path: Path) -> None:
    async def scene() -> None:
        world = World(tmp_path, f"echo '{OUTAGE}'; exit 1")
        world.begin(0)
        await until(lambda: world.notes)
        world.slots[0].incarnation = 2
        await until(lambda: not world.launches.tasks)
        assert world.failed == []
        assert len(world.made) == 1

    play(scene)


def test_a_superseded_step_is_ended(tmp_path: Path) -> None:
    async def scene() -> None:
        world = World(tmp_path, "exec sleep 60")
        world.begin(0, 1)
        await until(lambda: world.made)
        world.slots[0].incarnation = 2
        world.slots[1].state = "unplaced"
        await until(lambda: not world.launches.tasks)
        assert world.failed == []
        assert world.launches.worst_code == 0

    play(scene)


def test_a_step_that_is_wanted_by_one_rank_goes_on(tmp_path: Path) -> None:
    async def scene() -> None:
        world = World(tmp_path, "exec sleep 1.3")
        world.slots[1].state = "up"
        world.begin(0, 1)
        world.slots[0].incarnation = 2
        await until(lambda: not world.launches.tasks)
        assert not world.made[0].is_forced

    play(scene)


def test_after_the_end_nothing_is_started_any_more(tmp_path: Path) -> None:
    """A launch that waits for the controller must not start its step when the job is over."""

    async def scene() -> None:
        world = World(tmp_path, f"echo '{OUTAGE}'; exit 1")
        world.begin(0)
        await until(lambda: world.notes)
        await world.launches.stop(0.2)
        await until(lambda: not world.launches.tasks)
        assert len(world.made) == 1
        assert world.failed == []

    play(scene)


def test_whoever_had_not_started_when_the_job_ended_has_not_failed(tmp_path: Path) -> None:
    async def scene() -> None:
        world = World(tmp_path, "exec sleep 60")
        world.begin(0)
        await until(lambda: world.made)
        await world.launches.stop(0.05)
        await until(lambda: not world.launches.tasks)
        assert world.failed == [], "the journal is closed by now"

    play(scene)


def test_the_end_ends_a_step_that_does_not_end(tmp_path: Path) -> None:
    async def scene() -> None:
        world = World(tmp_path, "trap '' TERM; echo $$ > " + str(tmp_path / "pid") + "; while :; do sleep 0.05; done")
        world.slots[0].state = "up"
        world.begin(0)
        await until((tmp_path / "pid").exists)
        await world.launches.stop(0.2)
        await until(lambda: not world.launches.tasks)
        assert world.launches.worst_code == 0, "we ended it: its code says nothing about its tasks"

    play(scene)


def test_a_step_starts_all_of_its_processes_or_none(tmp_path: Path) -> None:
    async def scene() -> None:
        first = ["sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 60"]
        step = Step("two", tmp_path / "log", (), [first, [str(tmp_path / "missing")]], [os.environ] * 2)
        with pytest.raises(OSError):
            await step.start()
        assert (await step.wait()).code == 128 + 9

    play(scene)
