"""The keeper of agents: asks a lost node again and again, one step at a time, and forgets the steps that have ended."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flashrec.config.schema import Config, Recovery
from flashrec.manager.agents import AgentKeeper
from flashrec.manager.steps import Step
from flashrec.slurm.client import JobInfo, SlurmUnavailable

NODES = ("n1", "n2")
DEADLINE_S = 20.0


class FakeLauncher:
    """The first step (all nodes) runs until it is ended; each later one ends at once, without an agent."""

    def __init__(self, logs: Path) -> None:
        self.logs, self.made = logs, []

    def agents(self, nodes: Sequence[str], launch: int) -> Step:
        argv = ["sleep", "60"] if len(nodes) > 1 else ["false"]
        self.made.append(Step(f"agents {launch}", self.logs / f"{launch}.log", nodes, [argv], [os.environ]))
        return self.made[-1]


class FakeManager:
    """Node n1 is dead for as long as the test says so."""

    def __init__(self) -> None:
        self.request = SimpleNamespace(config=Config(recovery=Recovery(agent_retry_s=0.001)))
        self.nodes, self.job_id, self.dead = NODES, 7, {"n1"}
        self.notes: list[str] = []
        self.journal = SimpleNamespace(note=lambda what, **_: self.notes.append(what))
        self.detector = SimpleNamespace(state_of=lambda node: "dead" if node in self.dead else "alive")


class FakeSlurm:
    """answers: what `job` gives, one after another; the last one for ever."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers, self.asked = answers, 0

    async def job(self, job_id: int) -> JobInfo:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return JobInfo(job_id, "RUNNING", answer, "n2")

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
        keeper = AgentKeeper(manager, launcher, slurm)  # type: ignore[arg-type]
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
