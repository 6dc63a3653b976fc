"""Companion jobs with a salloc made of shell: every answer is told once, and every job that was made is cancelled."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashrec.core import events as e
from flashrec.core.effects import ReleaseNode, RequestNode
from flashrec.manager import companions
from flashrec.manager.companions import Companions
from flashrec.slurm.scheduler import JobPlace, ReservationInfo, SlurmError, SlurmUnavailable
from tests.manager.test_salloc import JOB

LIMIT_S = 20
GRANTED = "echo 'salloc: Granted job allocation 12' >&2"
WAITS = (
    "trap 'exit 1' TERM; echo 'salloc: Pending job allocation 12' >&2; while [ ! -e %s ]; do sleep 0.02; done; "
    + GRANTED
)
REFUSED = "echo 'salloc: error: Job submit/allocate failed: Access denied' >&2; exit 1"
OUTAGE = "echo 'salloc: error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
POOL = ReservationInfo("p", ("n4", "n5"), 2, (), (), frozenset(), "", "", None, None, True)


class World:
    """The job, Slurm's answers, and a salloc in PATH. places: what Slurm says of companion jobs, or an error."""

    def __init__(self, folder: Path, *scripts: str) -> None:
        self.folder = folder
        for number, script in enumerate(scripts):
            (folder / f"{number}.sh").write_text(script.replace("%s", str(folder / "free")))
        program = folder / "salloc"
        program.write_text(
            f'#!/bin/sh\ncd {folder}\nn=$(ls try.* 2>/dev/null | wc -l)\necho "$@" > try.$n\n'
            f"[ -e $n.sh ] || n={len(scripts) - 1}\nexec sh $n.sh\n"
        )
        program.chmod(0o755)
        self.events: list[e.AnyEvent] = []
        self.said: list[str] = []
        self.notes: list[str] = []
        self.cancelled: list[int] = []
        self.members: set[str] = {"n1"}
        self.places: dict[int, Any] = {12: JobPlace(12, "RUNNING", ("n4",), "n4")}
        self.cancel_errors: list[Exception] = []
        self.states = {"n4": frozenset({"ALLOCATED"}), "n5": frozenset({"DOWN"})}
        self.reservation_answer: Any = POOL
        self.companions = Companions(
            self,
            7,
            "p",
            5.0,
            0.05,
            self,
            self,
            lambda what, **_: self.notes.append(what),  # type: ignore[arg-type]
        )

    # the job

    def emit(self, event: e.AnyEvent) -> None:
        self.events.append(event)

    def node_came(self, request: int, node: str) -> None:
        self.events.append(e.NodeGranted(request, node))

    def is_member(self, node: str) -> bool:
        return node in self.members

    def say(self, text: str) -> None:
        self.said.append(text)

    # Slurm

    async def job(self, job_id: int) -> Any:
        answer = JOB if job_id == 7 else self.places[job_id]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def jobs(self, **asked: Any) -> Any:
        return (msgspec.structs.replace(JOB, job_id=77),)

    async def touch(self, job_id: int) -> None:
        self.notes.append(f"touched {job_id}")

    async def memory_asked(self, job_id: int) -> str:
        return "0"

    async def time_left(self, job_id: int) -> str:
        return "59:00"

    async def node_states(self, nodes: tuple[str, ...]) -> dict[str, frozenset[str]]:
        return {node: self.states[node] for node in nodes}

    async def reservation(self, name: str) -> Any:
        if isinstance(self.reservation_answer, Exception):
            raise self.reservation_answer
        return self.reservation_answer

    async def cancel(self, job_id: int) -> None:
        if self.cancel_errors:
            raise self.cancel_errors.pop(0)
        self.cancelled.append(job_id)

    # the scene

    def ask(self, *avoid: str, request: int = 1) -> None:
        self.companions.request(RequestNode(request, avoid, "node n2 is lost"))

    async def answer(self, count: int = 1) -> None:
        await until(lambda: len(self.events) >= count)

    @property
    def tries(self) -> list[str]:
        return [path.read_text() for path in sorted(self.folder.glob("try.*"))]


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """Run a scene with these salloc scripts, one for each try; the job ends after it."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(companions, "OUTAGE_RETRY_S", 0.05)

    def run(scene: Callable[[World], Awaitable[None]], *scripts: str) -> World:
        async def whole() -> World:
            world = World(tmp_path, *scripts)
            care = asyncio.create_task(world.companions.run())
            async with asyncio.timeout(LIMIT_S):
                await scene(world)
                care.cancel()
                await world.companions.stop()
            return world

        return asyncio.run(whole())

    return run


def test_a_node_is_granted_and_cancelled_at_the_end(play) -> None:
    async def scene(world: World) -> None:
        world.ask("n9")
        await world.answer()
        assert world.companions.job_of("n4") == 12
        assert world.companions.job_of("n1") is None
        assert world.cancelled == []

    world = play(scene, GRANTED)
    assert world.events == [e.NodeGranted(1, "n4")]
    assert world.cancelled == [12]
    assert "--reservation=p" in world.tries[0] and "--exclude=n9" in world.tries[0]
    assert "--time=59:00" in world.tries[0] and "--mem=0" in world.tries[0]
    assert world.companions.job_of("n4") is None


def test_a_node_that_is_given_back_is_cancelled_once(play) -> None:
    async def scene(world: World) -> None:
        world.ask()
        await world.answer()
        for _ in range(2):
            world.companions.release(ReleaseNode(1, "n4", "no rank is on it"))
        await until(lambda: world.cancelled)
        world.places[12] = SlurmError("squeue: Invalid job id specified")
        await asyncio.sleep(0.2)  # two rounds

    world = play(scene, GRANTED)
    assert world.events == [e.NodeGranted(1, "n4")], "nothing is said about it any more"
    assert world.cancelled == [12]


@pytest.mark.parametrize("how", ["over", "given back"])
def test_a_node_is_used_before_its_salloc_has_ended(play, how: str) -> None:
    async def scene(world: World) -> None:
        world.ask()
        await world.answer()
        if how == "given back":
            world.companions.release(ReleaseNode(1, "n4", "no rank is on it"))
            await until(lambda: world.cancelled)

    world = play(scene, f"trap 'exit 1' TERM; {GRANTED}; while :; do sleep 0.02; done")
    assert world.events == [e.NodeGranted(1, "n4")]
    assert world.cancelled == [12]


def test_a_refusal_is_final_and_names_the_pool(play) -> None:
    async def scene(world: World) -> None:
        world.ask()
        await world.answer()

    world = play(scene, REFUSED)
    assert world.events == [e.NodeRefused(1, "pool p: Job submit/allocate failed: Access denied", False)]
    assert len(world.tries) == 1 and world.cancelled == []


def test_what_the_sites_filter_said_is_told_once(play) -> None:
    async def scene(world: World) -> None:
        world.ask()
        await world.answer()

    said = "echo 'salloc: error: flashrec: pool p: job 7 holds 2 of its nodes' >&2; "
    said += "echo 'salloc: error: Job submit/allocate failed: Unspecified error' >&2; exit 1"
    assert play(scene, said).events == [e.NodeRefused(1, "pool p: job 7 holds 2 of its nodes", False)]


def test_who_has_to_wait_is_told_who_has_the_nodes_and_gets_one_later(play) -> None:
    async def scene(world: World) -> None:
        world.ask()
        await world.answer()
        world.states["n5"] = frozenset({"MIXED", "DRAIN"})
        await asyncio.sleep(0.2)
        world.states["n5"] = frozenset({"IDLE"})
        await world.answer(2)
        (world.folder / "free").touch()
        await world.answer(3)

    world = play(scene, WAITS)
    busy = "pool p: no node free: 1 of 2 in use, 1 not usable"
    assert world.events == [
        e.NodeRefused(1, busy, True),
        e.NodeRefused(1, "pool p: Slurm has given no node yet: 1 of 2 in use", True),
        e.NodeGranted(1, "n4"),
    ]
    assert f"{busy}; waiting up to 5 s" in world.said


def test_not_being_able_to_count_is_no_count(play) -> None:
    async def scene(world: World) -> None:
        world.reservation_answer = SlurmUnavailable("away")
        world.ask()
        await world.answer()

    assert play(scene, WAITS).events == [e.NodeRefused(1, "pool p: no node free", True)]


@pytest.mark.parametrize("how", ["withdrawn", "over"])
def test_a_job_in_the_queue_is_taken_out_of_it(play, how: str) -> None:
    async def scene(world: World) -> None:
        world.ask()
        await world.answer()
        if how == "withdrawn":
            world.companions.release(ReleaseNode(1, "", "every rank has a node"))
            await until(lambda: world.cancelled)

    world = play(scene, WAITS)
    assert world.cancelled == [12]
    assert len(world.events) == 1
    assert "companion not taken" in world.notes


def test_a_grant_that_comes_with_the_withdrawal_is_given_back(play) -> None:
    async def scene(world: World) -> None:
        world.places[12] = SlurmUnavailable("away")  # so that it is not known yet which node it is
        world.ask()
        await until(lambda: world.tries)
        await asyncio.sleep(0.2)
        world.companions.release(ReleaseNode(1, "", "every rank has a node"))
        world.places[12] = JobPlace(12, "RUNNING", ("n4",), "n4")

    world = play(scene, GRANTED)
    assert world.events == []
    assert world.cancelled == [12]


def test_an_outage_is_no_refusal(play) -> None:
    async def scene(world: World) -> None:
        world.ask()
        await until(lambda: e.NodeGranted(1, "n4") in world.events)

    world = play(scene, OUTAGE, OUTAGE, GRANTED)
    assert all(event.may_retry for event in world.events[:-1])
    assert len(world.tries) == 3


def test_waiting_in_vain_in_slurms_queue_is_an_answer(play) -> None:
    """salloc then says what it also says when there is no controller."""

    async def scene(world: World) -> None:
        world.ask()
        await until(lambda: [event for event in world.events if not event.may_retry])

    timed_out = "echo 'salloc: Pending job allocation 12' >&2; sleep 0.2; echo 'salloc: error: Unable to allocate "
    world = play(scene, timed_out + "resources: Connection timed out' >&2; exit 1")
    assert len(world.tries) == 1
    assert world.cancelled == [12], "whatever became of it"


def test_a_node_that_is_in_the_job_already_is_of_no_use(play) -> None:
    async def scene(world: World) -> None:
        world.members.add("n4")
        world.ask()
        await world.answer()

    world = play(scene, GRANTED)
    assert [type(event) for event in world.events] == [e.NodeRefused]
    assert world.cancelled == [12]


@pytest.mark.parametrize(
    ("place", "why"),
    [
        (JobPlace(12, "COMPLETING", ("n4",), "n4"), "companion job 12 is COMPLETING"),
        (JobPlace(12, "RUNNING", (), ""), "companion job 12 is RUNNING"),
        (SlurmError("slurm_load_jobs error: Invalid job id specified"), "companion job 12 is over"),
    ],
)
def test_a_companion_job_that_ends_is_a_lost_node(play, place: Any, why: str) -> None:
    async def scene(world: World) -> None:
        world.ask()
        await world.answer()
        world.places[12] = place
        await world.answer(2)
        world.companions.release(ReleaseNode(1, "n4", why))  # as the machine does

    assert play(scene, GRANTED).events[1:] == [e.NodeLeft(1, "n4", why)]


def test_a_node_that_comes_again_belongs_to_its_new_job(play) -> None:
    """Slurm is faster than our poll: the former companion job has ended, and nobody has told us yet."""

    async def scene(world: World) -> None:
        world.ask()
        await world.answer()
        world.places[13] = JobPlace(13, "RUNNING", ("n4",), "n4")
        world.ask(request=2)
        await world.answer(2)
        assert world.companions.job_of("n4") == 13
        await until(lambda: world.cancelled)
        world.places[12] = SlurmError("Invalid job id specified")
        await asyncio.sleep(0.2)

    world = play(scene, GRANTED, GRANTED.replace("12", "13"))
    assert world.events == [e.NodeGranted(1, "n4"), e.NodeGranted(2, "n4")]
    assert sorted(world.cancelled) == [12, 13]


@pytest.mark.parametrize("error", [SlurmUnavailable("no controller"), SlurmError("Access/permission denied")])
def test_not_being_able_to_look_is_no_end(play, error: Exception) -> None:
    async def scene(world: World) -> None:
        world.ask()
        await world.answer()
        world.places[12] = error
        await asyncio.sleep(0.3)

    assert play(scene, GRANTED).events == [e.NodeGranted(1, "n4")]


def test_a_node_where_no_agent_starts_is_of_no_use(play) -> None:
    async def scene(world: World) -> None:
        world.ask()
        await world.answer()
        world.companions.agent_failed("n4", "srun: error: Unable to contact slurm controller (connect failure)")
        world.companions.agent_failed("n4", "srun: error: bad\npython: not found")
        world.companions.agent_failed("n1", "one of the job's own")
        assert len(world.events) == 1
        world.companions.agent_failed("n4", "python: not found")

    world = play(scene, GRANTED)
    assert world.events[1:] == [e.NodeLeft(1, "n4", "no agent can be started: python: not found")]


def test_cancelling_is_tried_again_and_what_is_left_is_said(play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(world: World) -> None:
        world.ask()
        await world.answer()
        world.cancel_errors = [SlurmUnavailable("away")] * errors

    errors = 2
    assert play(scene, GRANTED).cancelled == [12]
    errors = 99
    world = play(scene, GRANTED)
    assert world.cancelled == []
    assert "scancel 12" in world.said[-1]


def test_a_salloc_that_had_to_be_killed_leaves_no_job(play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(companions, "WITHDRAW_TIMEOUT_S", 0.1)
    monkeypatch.setattr("flashrec.manager.salloc.END_TIMEOUT_S", 0.1)

    async def scene(world: World) -> None:
        world.ask()
        await until(lambda: world.tries)
        await asyncio.sleep(0.1)
        world.companions.release(ReleaseNode(1, "", "not wanted"))

    assert play(scene, "trap '' TERM; while :; do sleep 0.02; done").cancelled == [77], "found by its name"


@pytest.mark.parametrize(("answer", "is_warned"), [(None, True), (POOL, False), (SlurmUnavailable("away"), False)])
def test_a_pool_that_is_not_there_is_said_at_the_start(play, answer: Any, is_warned: bool) -> None:
    async def scene(world: World) -> None:
        world.reservation_answer = answer
        await asyncio.sleep(0.2)

    said = play(scene, GRANTED).said
    assert (said != []) == is_warned
    assert not is_warned or "there is no reservation p" in said[0]


def test_no_salloc_is_a_refusal(play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(world: World) -> None:
        (world.folder / "salloc").unlink()
        monkeypatch.setenv("PATH", "/nonexistent")
        world.ask()
        await world.answer()

    (event,) = play(scene, GRANTED).events
    assert isinstance(event, e.NodeRefused) and not event.may_retry
