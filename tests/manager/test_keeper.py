"""The keeper of agents: asks a lost node again and again, one step at a time, and forgets the steps that have ended."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashrec.config.schema import Config, Recovery
from flashrec.manager import agents
from flashrec.manager.agents import AgentKeeper
from flashrec.manager.steps import Step
from flashrec.slurm.scheduler import JobPlace, SlurmUnavailable

NODES = ("n1", "n2")
DEADLINE_S = 20.0


class FakeLauncher:
    """The first step (all nodes) runs until it is ended; each later one ends at once, without an agent."""

    def __init__(self, logs: Path) -> None:
        self.logs, self.made = logs, []
        self.first, self.later = ["sleep", "60"], ["false"]

    def job_of(self, node: str) -> int:
        return 12 if node == "n9" else 7

    def agents(self, nodes: Sequence[str], launch: int) -> Step:
        argv = self.first if len(nodes) > 1 else self.later
        self.made.append(Step(f"agents {launch}", self.logs / f"{launch}.log", nodes, [argv], [os.environ]))
        return self.made[-1]


class FakeManager:
    """Node n1 is dead for as long as the test says so."""

    def __init__(self) -> None:
        self.config = Config(recovery=Recovery(agent_retry_s=0.001))
        self.nodes, self.job_id, self.dead = NODES, 7, {"n1"}
        self.notes: list[str] = []
        self.failures: list[tuple[str, str]] = []
        self.journal = SimpleNamespace(note=lambda what, **_: self.notes.append(what))
        self.states: dict[str, str] = {}
        self.told: list[tuple[str, frozenset[str]]] = []
        self.detector = SimpleNamespace(
            state_of=lambda node: self.states.get(node, "dead" if node in self.dead else "alive")
        )

    def state_of(self, node: str) -> str:
        return self.states.get(node, "dead" if node in self.dead else "alive")

    def agent_failed(self, node: str, said: str) -> None:
        self.failures.append((node, said))

    def slurm_said(self, node: str, states: frozenset[str]) -> None:
        self.told.append((node, states))


class FakeSlurm:
    """answers: what `job` gives, one after another; the last one for ever."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers, self.asked = answers, 0

    async def job(self, job_id: int) -> JobPlace:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return JobPlace(job_id, "RUNNING", answer, "n2")

    async def node_states(self, nodes: tuple[str, ...]) -> dict[str, frozenset[str]]:
        return {node: frozenset({"ALLOCATED"}) for node in nodes}


async def until(condition: Any) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


def keep(tmp_path: Path, slurm: FakeSlurm | None, watch: Any) -> tuple[FakeManager, FakeLauncher, AgentKeeper]:
    """Run a keeper until `watch(manager, launcher, keeper)` returns, then stop it as the manager does."""
    manager, launcher = FakeManager(), FakeLauncher(tmp_path)

    async def run() -> AgentKeeper:
        keeper = AgentKeeper(manager, manager.config, launcher, slurm)  # type: ignore[arg-type]
        task = asyncio.create_task(keeper.run())
        try:
            await watch(manager, launcher, keeper)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await keeper.stop(0.2)
        return keeper

    return manager, launcher, asyncio.run(run())


def test_steps_that_have_ended_are_forgotten(tmp_path: Path) -> None:
    async def watch(manager: FakeManager, launcher: FakeLauncher, keeper: AgentKeeper) -> None:
        await until(lambda: manager.notes.count("agent did not start") >= 5)
        assert len(keeper.steps) <= 2, "the one of all nodes, and the try under way"

    _, launcher, keeper = keep(tmp_path, None, watch)
    assert len(launcher.made) >= 6
    assert not keeper.steps, "all have been ended"


def test_a_node_that_left_the_job_is_asked_no_more(tmp_path: Path) -> None:
    """Slurm marks it DOWN and takes it from the job: that is said once, and no step is started there any more."""

    async def watch(manager: FakeManager, launcher: FakeLauncher, keeper: AgentKeeper) -> None:
        await until(lambda: "node left the job" in manager.notes)
        await asyncio.sleep(0.6)  # two rounds of the keeper

    slurm = FakeSlurm([NODES, SlurmUnavailable("away"), ("n2",)])
    manager, launcher, _ = keep(tmp_path, slurm, watch)
    assert manager.notes.count("node left the job") == 1
    assert [sorted(step.nodes) for step in launcher.made] == [["n1", "n2"], ["n1"]]
    assert slurm.asked == 3


def test_not_being_able_to_ask_is_no_answer(tmp_path: Path) -> None:
    """Neither has the node left, nor may it be used."""

    async def watch(manager: FakeManager, launcher: FakeLauncher, keeper: AgentKeeper) -> None:
        await until(lambda: slurm.asked >= 3)

    slurm = FakeSlurm([SlurmUnavailable("no controller")])
    manager, launcher, _ = keep(tmp_path, slurm, watch)
    assert "node left the job" not in manager.notes
    assert len(launcher.made) == 1


def test_nobody_has_joined_and_the_step_has_ended_so_all_are_asked_again(tmp_path: Path) -> None:
    """slurmctld was away when the job began: that is no reason to wait for agents that nobody starts."""

    async def watch(manager: FakeManager, launcher: FakeLauncher, keeper: AgentKeeper) -> None:
        manager.states = dict.fromkeys(NODES, "unknown")
        launcher.first = ["sh", "-c", "echo srun: error: no controller; exit 1"]
        await until(lambda: len(launcher.made) >= 3)
        launcher.first, failed = ["sleep", "60"], len(launcher.made)
        await until(lambda: len(launcher.made) >= failed + 1)
        manager.states = {}

    manager, launcher, _ = keep(tmp_path, None, watch)
    assert {frozenset(NODES)} == {step.nodes for step in launcher.made[:4]}
    assert manager.notes.count("agents did not start") >= 3


def test_a_command_that_cannot_be_run_is_tried_again(tmp_path: Path) -> None:
    async def watch(manager: FakeManager, launcher: FakeLauncher, keeper: AgentKeeper) -> None:
        manager.states = dict.fromkeys(NODES, "unknown")
        launcher.first = ["/nonexistent/srun"]
        await until(lambda: len(launcher.made) >= 2)
        launcher.first, launcher.later, failed = ["sleep", "60"], ["/nonexistent/srun"], len(launcher.made)
        await until(lambda: len(launcher.made) >= failed + 1)
        manager.states = {}  # n1 is dead
        await until(lambda: manager.notes.count("agent did not start") >= 2)

    keep(tmp_path, None, watch)


def test_a_node_whose_agent_never_came_is_asked_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slurmd was late, or its srun task failed: without this it is no spare for the whole job."""
    monkeypatch.setattr(agents, "JOIN_TIMEOUT_S", 0.05)

    async def watch(manager: FakeManager, launcher: FakeLauncher, keeper: AgentKeeper) -> None:
        manager.dead, manager.states = set(), {"n2": "unknown"}
        await until(lambda: len(launcher.made) >= 2)

    _, launcher, _ = keep(tmp_path, None, watch)
    assert launcher.made[1].nodes == {"n2"}


def test_what_slurm_says_of_a_node_that_is_asked_is_told(tmp_path: Path) -> None:
    """A node that Slurm had taken is admitted again only because of that."""

    async def watch(manager: FakeManager, launcher: FakeLauncher, keeper: AgentKeeper) -> None:
        await until(lambda: manager.told)

    manager, _, _ = keep(tmp_path, FakeSlurm([NODES]), watch)
    assert manager.told[0] == ("n1", frozenset({"ALLOCATED"}))


def test_a_node_that_comes_gets_its_agent_at_once_and_one_that_goes_is_asked_no_more(tmp_path: Path) -> None:
    async def watch(manager: FakeManager, launcher: FakeLauncher, keeper: AgentKeeper) -> None:
        manager.dead = set()
        await until(lambda: launcher.made)
        manager.config = Config(recovery=Recovery(agent_retry_s=60))
        keeper._config = manager.config
        manager.dead, manager.nodes = {"n9"}, (*NODES, "n9")
        keeper.include("n9")
        await until(lambda: manager.failures)
        keeper.exclude("n9")
        manager.nodes = NODES
        await asyncio.sleep(0.6)  # two rounds of the keeper

    manager, launcher, _ = keep(tmp_path, None, watch)
    assert [sorted(step.nodes) for step in launcher.made] == [["n1", "n2"], ["n9"]]
    assert manager.failures == [("n9", "")]


def test_a_node_that_left_and_comes_again_is_asked_again(tmp_path: Path) -> None:
    async def watch(manager: FakeManager, launcher: FakeLauncher, keeper: AgentKeeper) -> None:
        await until(lambda: "node left the job" in manager.notes)
        tries = len(launcher.made)
        slurm.answers = [NODES]
        keeper.include("n1")
        await until(lambda: len(launcher.made) > tries)

    slurm = FakeSlurm([("n2",)])
    keep(tmp_path, slurm, watch)


def test_a_node_from_a_pool_is_looked_up_in_its_own_job(tmp_path: Path) -> None:
    class TwoJobs(FakeSlurm):
        async def job(self, job_id: int) -> JobPlace:
            self.asked += 1
            return JobPlace(job_id, "RUNNING", NODES if job_id == 7 else ("n9",), "n2")

    async def watch(manager: FakeManager, launcher: FakeLauncher, keeper: AgentKeeper) -> None:
        await until(lambda: launcher.made)
        manager.dead, manager.nodes = {"n9"}, (*NODES, "n9")
        keeper.include("n9")
        await until(lambda: len(launcher.made) >= 2)

    manager, launcher, _ = keep(tmp_path, TwoJobs([]), watch)
    assert "node left the job" not in manager.notes
    assert launcher.made[1].nodes == {"n9"}
