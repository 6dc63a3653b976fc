"""What is parked where and when, who gets a rank, and that whatever goes wrong with it leads to an ordinary launch."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashrec.config.schema import Hot
from flashrec.core import events as e
from flashrec.core.types import Assignment, Phase
from flashrec.manager import parking as module
from flashrec.manager.parking import Parking
from flashrec.manager.steps import Parked, Step
from flashrec.wire import messages as m
from tests.core.driver import Driver

COMMAND = ("python", "-u", "train.py")


class Job:
    """Two active nodes with two ranks each and a spare, training; job steps of parked tasks are `script`s."""

    def __init__(
        self, folder: Path, script: str = "sleep 60", command: Sequence[str] = COMMAND, **settings: Any
    ) -> None:
        driver = Driver()
        for line in ("job n1 n2 n3 active=2 per_node=2", "agent n1 n2 n3", "started all", "joined all",
                     "restored all v=0"):  # fmt: skip
            driver.do(line)
        self.driver, self.machine, self.folder, self.script = driver, driver.machine, folder, script
        assert self.machine.phase is Phase.RUNNING
        self.sent: list[tuple[str, Any]] = []
        self.said: list[str] = []
        self.notes: list[dict[str, Any]] = []
        self.cold: list[dict[str, tuple[Assignment, ...]]] = []
        self.made: list[tuple[int, tuple[str, ...], int, Parked]] = []
        self.hearers: dict[type, Callable[[Any, Any], None]] = {}
        links = {name: SimpleNamespace(node=name, incarnation=1) for name in ("n1", "n2", "n3")}
        self.control: Any = SimpleNamespace(
            links=links, on=self.hearers.__setitem__, send=lambda node, message: self.sent.append((node, message)),
            broadcast=lambda message: self.sent.append(("all", message)),
        )  # fmt: skip
        self.jobs: dict[str, int] = {}
        self.now = time.monotonic()
        self.parking = Parking(
            self,
            Hot(**{"park": "imports", "after_s": 5.0} | settings),
            tuple(command),
            self,
            self.cold.append,
            self.note,
        )  # type: ignore[arg-type]

    def say(self, text: str) -> None:
        self.said.append(text)

    def note(self, what: str, **fields: Any) -> None:
        self.notes.append({"what": what, **fields})

    def job_of(self, node: str) -> int:
        return self.jobs.get(node, 5)

    def parked(self, launch: int, nodes: Sequence[str], per_node: int, park: Parked) -> Step:
        self.made.append((launch, tuple(nodes), per_node, park))
        log = self.folder / f"parked-{launch}.log"
        return Step(f"parked {launch}", log, nodes, [["sh", "-c", self.script]], [os.environ])

    def hear(self, node: str, message: Any) -> None:
        self.hearers[type(message)](self.control.links[node], message)

    async def pass_time(self, seconds: float) -> None:
        self.now += seconds
        await self.parking.tick(self.now)

    async def park(self, *, ready: bool = True) -> None:
        await self.pass_time(0.0)
        await self.pass_time(6.0)
        for launch, nodes, per_node, _ in self.made if ready else ():
            for node in nodes:
                for local_id in range(per_node):
                    self.hear(node, m.ParkedReady(launch, local_id, 3.0))

    def lose(self, *ranks: int) -> dict[str, tuple[Assignment, ...]]:
        """These ranks die; the machine launches them again. Returns what is left to be launched the ordinary way."""
        left: dict[str, tuple[Assignment, ...]] = {}
        for rank in ranks:
            event = e.WorkerExited(rank, 1, "none", True, "killed")
            for effect in self.machine.handle(event, 1.0):
                if type(effect).__name__ == "LaunchWorkers":
                    left |= self.parking.give(effect.placement)
        return left

    def used(self) -> list[tuple[str, int, int, int]]:
        """node, launch, local id, rank."""
        return [(n, x.launch, x.local_id, x.task.rank) for n, x in self.sent if isinstance(x, m.UseParked)]


def play(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 20))


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_one_on_each_active_node_and_a_full_set_on_a_spare(tmp_path: Path) -> None:
    async def scene() -> None:
        job = Job(tmp_path)
        await job.pass_time(0.0)
        await job.pass_time(4.9)
        assert not job.made, "training comes first"
        await job.pass_time(0.11)
        assert [made[1:3] for made in job.made] == [(("n1", "n2"), 1), (("n3",), 2)]
        assert job.made[0][3].options()[:4] == ["--park", "imports", "--flags", "2"]
        await job.pass_time(5.0)
        assert len(job.made) == 2, "once"
        assert job.parking.ready() == {}
        await job.park()
        assert job.parking.ready() == {"n1": 1, "n2": 1, "n3": 2}
        await job.parking.stop(0.5)

    play(scene)


def test_nodes_of_another_slurm_job_get_a_step_of_their_own(tmp_path: Path) -> None:
    async def scene() -> None:
        job = Job(tmp_path)
        job.jobs = {"n2": 6}
        await job.park(ready=False)
        assert [made[1:3] for made in job.made] == [(("n1",), 1), (("n2",), 1), (("n3",), 2)]
        await job.parking.stop(0.5)

    play(scene)


def test_a_lost_rank_gets_the_parked_task_of_its_node_and_a_second_one_starts_the_ordinary_way(tmp_path: Path) -> None:
    async def scene() -> None:
        job = Job(tmp_path)
        await job.park()
        left = job.lose(2)
        assert left == {} and job.used() == [("n2", 1, 0, 2)]
        left = job.lose(3)
        assert [a.rank for a in left["n2"]] == [3]
        job.parking.started(2, 2)
        assert job.parking.ready() == {"n1": 1, "n3": 2}
        await job.pass_time(100.0)
        await job.pass_time(100.0)
        assert len(job.made) == 2, "nothing is parked while a recovery is under way"
        await job.parking.stop(0.5)

    play(scene)


def test_the_ranks_of_a_lost_node_take_the_spares_tasks(tmp_path: Path) -> None:
    async def scene() -> None:
        job = Job(tmp_path)
        await job.park()
        effects = job.machine.handle(e.NodeCondemned("n1", 1, "silent", "node"), 1.0)
        (launch,) = [effect for effect in effects if type(effect).__name__ == "LaunchWorkers"]
        assert job.parking.give(launch.placement) == {}
        assert job.used() == [("n3", 2, 0, 0), ("n3", 2, 1, 1)]
        await job.parking.stop(0.5)

    play(scene)


@pytest.mark.parametrize("how", ["not ready", "another life of the agent", "gone"])
def test_what_is_not_there_is_not_used(how: str, tmp_path: Path) -> None:
    async def scene() -> None:
        job = Job(tmp_path)
        await job.park(ready=how != "not ready")
        if how == "gone":
            job.hear("n2", m.ParkedEnded(1, 0, "killed", ran=True))
        elif how != "not ready":
            job.control.links["n2"].incarnation = 2
        left = job.lose(2)
        assert [a.rank for a in left["n2"]] == [2] and job.used() == []
        await job.parking.stop(0.5)

    play(scene)


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_rank_whose_parked_task_turns_out_to_be_gone_starts_the_ordinary_way(is_wanted: bool, tmp_path: Path) -> None:
    async def scene() -> None:
        job = Job(tmp_path)
        await job.park()
        job.lose(2)
        if not is_wanted:
            job.machine.handle(e.NodeCondemned("n2", 1, "silent", "node"), 2.0)
        job.hear("n2", m.ParkedEnded(1, 0, "there is no such parked task"))
        cold = [(node, [(a.rank, a.incarnation) for a in tasks]) for it in job.cold for node, tasks in it.items()]
        assert cold == ([("n2", [(2, 2)])] if is_wanted else [])
        await job.parking.stop(0.5)

    play(scene)


def test_a_node_where_it_fails_twice_is_left_alone_until_its_agent_is_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)

    async def scene() -> None:
        job = Job(tmp_path)
        await job.park(ready=False)
        for local_id in (0, 1):
            job.hear("n3", m.ParkedEnded(2, local_id, "300 MB of memory are left"))
        assert not job.said, "once is not twice"
        await job.pass_time(1.0)
        assert job.made[-1][1:3] == (("n3",), 2)
        job.hear("n3", m.ParkedEnded(3, 0, "300 MB of memory are left"))
        assert job.said == [
            "nothing is parked on node n3, workers start the ordinary way there: 300 MB of memory are left"
        ]
        await job.pass_time(1.0)
        assert len(job.made) == 3
        job.control.links["n3"].incarnation = 2
        await job.pass_time(1.0)
        assert job.made[-1][1:3] == (("n3",), 2), "those of the former life are gone with it"
        await job.parking.stop(0.5)

    play(scene)


@pytest.mark.parametrize("said", ["Unable to contact slurm controller (connect failure)", "Memory is too small"])
def test_an_outage_of_the_controller_is_no_failure_of_the_nodes(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 60.0)

    async def scene() -> None:
        job = Job(tmp_path, script=f"echo 'srun: error: Unable to create step for job 5: {said}'; exit 1")
        await job.park(ready=False)
        await until(lambda: not job.parking.steps)
        assert sum(note["what"] == "parked task lost" for note in job.notes) == 4
        assert all(note["reason"].endswith(said) for note in job.notes if note["what"] == "parked task lost")
        assert bool(job.parking._failures) == ("Memory" in said)
        await job.pass_time(0.0)
        assert len(job.made) == 2, "not at once again"
        await job.pass_time(70.0)
        assert len(job.made) == 4

    play(scene)


def test_a_script_that_cannot_run_without_a_rank_is_parked_with_imports_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)

    async def scene() -> None:
        job = Job(tmp_path, park="script")
        await job.park(ready=False)
        assert job.made[0][3].how == "script"
        job.hear("n3", m.ParkedEnded(2, 0, "RankNotKnown: RANK", ran=True))
        assert job.said == [
            "the script cannot be parked before it has a rank; only imports are, from now on: RankNotKnown: RANK"
        ]
        await job.pass_time(1.0)
        assert job.made[-1][3].how == "imports"
        await job.parking.stop(0.5)

    play(scene)


def test_a_command_that_is_not_python_is_not_parked_and_that_is_said_once(tmp_path: Path) -> None:
    async def scene() -> None:
        job = Job(tmp_path, command=("bash", "train.sh"))
        await job.park(ready=False)
        assert not job.made and job.parking.ready() is None
        assert job.said == [
            "workers start the ordinary way, nothing is parked: the command is not `python [flags] script.py …` or "
            "`python [flags] -m module …`"
        ]
        assert [a.rank for a in job.lose(2)["n2"]] == [2]

    play(scene)


def test_nothing_is_said_of_a_command_where_parking_is_not_wanted(tmp_path: Path) -> None:
    job = Job(tmp_path, command=("bash", "train.sh"), park="none")
    assert not job.said and not job.notes


def test_what_a_parked_process_could_not_repeat_ends_parking(tmp_path: Path) -> None:
    async def scene() -> None:
        job = Job(tmp_path)
        await job.park()
        for rank in (0, 1):
            job.hear("n1", m.WorkerUnlikeParked(rank, 1, "the script sets OMP_NUM_THREADS"))
        assert job.said == [
            "workers start the ordinary way, nothing is parked: rank 0: the script sets OMP_NUM_THREADS"
        ]
        assert [x for x in job.sent if isinstance(x[1], m.ParkingOver)] == [
            ("all", m.ParkingOver("rank 0: the script sets OMP_NUM_THREADS"))
        ]
        assert [a.rank for a in job.lose(2)["n2"]] == [2]
        await job.parking.stop(0.5)

    play(scene)


def test_only_where_no_rank_uses_the_gpu_a_context_is_made(tmp_path: Path) -> None:
    async def scene() -> None:
        job = Job(tmp_path, cuda=True)
        await job.park()
        made = [(nodes, "--cuda" in how.options()) for _, nodes, _, how in job.made]
        assert made == [(("n1", "n2"), False), (("n3",), True)]
        await job.parking.stop(0.5)

    play(scene)


def test_without_being_asked_for_no_context_is_made(tmp_path: Path) -> None:
    async def scene() -> None:
        job = Job(tmp_path)
        await job.park()
        assert len(job.made) == 2 and not any("--cuda" in made[3].options() for made in job.made)
        job.hear("n1", m.WorkerUnlikeParked(0, 1, "the script sets CUDA_VISIBLE_DEVICES", only_cuda=True))
        assert not job.said, "it makes no difference"
        await job.parking.stop(0.5)

    play(scene)


def test_what_a_context_could_not_repeat_ends_contexts_only(tmp_path: Path) -> None:
    async def scene() -> None:
        job = Job(tmp_path, cuda=True)
        await job.park()
        for rank in (0, 1):
            job.hear("n1", m.WorkerUnlikeParked(rank, 1, "the script sets CUDA_VISIBLE_DEVICES", only_cuda=True))
        reason = "rank 0: the script sets CUDA_VISIBLE_DEVICES"
        assert job.said == [f"parked processes make no CUDA context: {reason}"]
        assert [x for x in job.sent if isinstance(x[1], m.ParkingOver)] == [("n3", m.ParkingOver(reason, 2))] * 2
        assert job.parking.ready() == {"n1": 1, "n2": 1}
        await job.pass_time(1.0)
        assert [(made[1], "--cuda" in made[3].options()) for made in job.made[2:]] == [(("n3",), False)]
        await job.parking.stop(0.5)

    play(scene)


def test_a_task_that_has_its_rank_keeps_its_context(tmp_path: Path) -> None:
    async def scene() -> None:
        job = Job(tmp_path, cuda=True)
        await job.park()
        for effect in job.machine.handle(e.NodeCondemned("n1", 1, "silent", "node"), 1.0):
            if type(effect).__name__ == "LaunchWorkers":
                job.parking.give(effect.placement)
        job.hear("n2", m.WorkerUnlikeParked(2, 1, "the script sets CUDA_VISIBLE_DEVICES", only_cuda=True))
        assert job.used() == [("n3", 2, 0, 0), ("n3", 2, 1, 1)]
        assert not [x for x in job.sent if isinstance(x[1], m.ParkingOver)]
        job.hear("n3", m.ParkedEnded(2, 0, "killed", ran=True))
        assert [a.rank for a in job.cold[0]["n3"]] == [0], "its loss would be noticed"
        await job.parking.stop(0.5)

    play(scene)


def test_the_end_of_the_job_is_no_loss(tmp_path: Path) -> None:
    async def scene() -> None:
        job = Job(tmp_path)
        await job.park()
        job.machine.handle(e.StopRequested("over", 0), 3.0)
        job.hear("n2", m.ParkedEnded(1, 0, "the job ends", ran=True))
        assert not [note for note in job.notes if note["what"] == "parked task lost"]
        await job.parking.stop(0.5)

    play(scene)


def test_a_step_of_a_lost_node_goes_on_without_its_srun(tmp_path: Path) -> None:
    async def scene() -> None:
        job = Job(tmp_path)
        await job.park()
        job.parking.abandon("n1")
        await until(lambda: len(job.parking.steps) == 1)
        assert job.parking.ready() == {"n1": 1, "n2": 1, "n3": 2}, "tasks do not end with it"
        await job.parking.stop(0.5)

    play(scene)


def test_nothing_is_parked_on_a_node_that_is_to_leave_or_when_all_steps_are_done(tmp_path: Path) -> None:
    async def scene() -> None:
        job = Job(tmp_path)
        job.machine.members.nodes["n3"].leaving["slurm"] = "drain"
        await job.park(ready=False)
        assert [made[1:3] for made in job.made] == [(("n1", "n2"), 1)]
        done = Job(tmp_path)
        done.machine.handle(e.WorkerFinished(0, 1, 1), 1.0)
        await done.park(ready=False)
        assert not done.made
        await job.parking.stop(0.5)

    play(scene)


def test_a_task_that_does_not_come_is_given_up(tmp_path: Path) -> None:
    async def scene() -> None:
        job = Job(tmp_path)
        await job.park(ready=False)
        await job.pass_time(module.START_TIMEOUT_S)
        assert not [note for note in job.notes if note["what"] == "parked task lost"]
        await job.pass_time(1.0)
        lost = [note["reason"] for note in job.notes if note["what"] == "parked task lost"]
        assert lost == ["not ready within 300 s"] * 4
        job.hear("n3", m.ParkedReady(2, 0, 400.0))
        assert job.sent[-1] == ("n3", m.ParkingOver("it came too late", 2)), "nobody knows of it any more"
        assert job.parking.ready() == {}
        await job.parking.stop(0.5)

    play(scene)


def test_a_step_that_cannot_be_started_is_no_error(tmp_path: Path) -> None:
    async def scene() -> None:
        job = Job(tmp_path)
        job.folder = tmp_path / "nowhere"
        await job.park(ready=False)
        assert sum(note["what"] == "parked task lost" for note in job.notes) == 4

    play(scene)


@pytest.mark.parametrize("event", [e.WorkerExited(0, 1, "none", True, "killed"), None])
def test_what_is_lost_while_a_step_is_being_started_is_seen(
    event: e.WorkerExited | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recovery begins, or the agent of the spare goes, while the first of two steps is on its way."""

    async def scene() -> None:
        job = Job(tmp_path)
        start = Step.start

        async def start_and_lose(step: Step) -> None:
            await start(step)
            if event is None:
                job.control.links.pop("n3", None)
            else:
                job.machine.handle(event, 1.0)

        monkeypatch.setattr(Step, "start", start_and_lose)
        await job.park(ready=False)
        assert [made[1:3] for made in job.made] == [(("n1", "n2"), 1)]
        await job.parking.stop(0.5)

    play(scene)
