"""Keeps an agent on every node: the first job step over all of them, and a new one wherever an agent was lost.

A lost node may come back (a reboot, a healed link, a crashed agent): as long as Slurm leaves it in the job it is asked
again, one try at a time. An agent that comes back becomes a spare. Slurm's own node states are polled here too; being
unable to ask is never taken for an answer.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from flashrec.config.schema import Config
from flashrec.core.detection import Detector
from flashrec.manager.journal import Journal
from flashrec.manager.steps import Launcher, Step, StepEnd, abandon_steps, end_steps
from flashrec.manager.voice import say
from flashrec.slurm.client import SlurmClient
from flashrec.slurm.scheduler import SlurmError

JOIN_TIMEOUT_S = 20.0


class Job(Protocol):
    """What the keeper needs to know of the job (the manager is one)."""

    nodes: tuple[str, ...]
    job_id: int | None
    detector: Detector
    journal: Journal

    def slurm_said(self, node: str, states: frozenset[str]) -> None: ...

    def agent_failed(self, node: str, said: str) -> None: ...


class AgentKeeper:
    """client None: no Slurm (local nodes), so nodes never leave the job."""

    def __init__(self, job: Job, config: Config, launcher: Launcher, client: SlurmClient | None) -> None:
        self._job, self._config, self._launcher, self._client = job, config, launcher, client
        self._launch = 0
        self.steps: dict[Step, asyncio.Task[StepEnd]] = {}  # those that run, and the wait for their end
        self._retries: dict[str, asyncio.Task[None]] = {}
        self._left: set[str] = set()

    async def run(self) -> None:
        """Start the first agents, then look after them until cancelled."""
        await self._first_start()
        polled_at = time.monotonic()
        try:
            while True:
                await asyncio.sleep(0.25)
                for node in self._job.nodes:
                    lost = not self._is_back(node)  # or was never there
                    if lost and node not in self._left and node not in self._retries:
                        self._retries[node] = asyncio.create_task(self._bring_back(node))
                if self._client is not None:
                    interval_s = self._config.detection.slurm_poll_interval_s
                    if time.monotonic() - polled_at >= interval_s:
                        polled_at = time.monotonic()
                        await self._poll_slurm(self._client)
        finally:
            for task in self._retries.values():
                task.cancel()

    async def _first_start(self) -> None:
        """All agents in one step, again until somebody has joined (Slurm's controller may be away just now)."""
        nodes = self._job.nodes
        while True:
            try:
                _, ended = await self._start(nodes)
            except OSError as err:
                said = str(err)
            else:
                deadline = time.monotonic() + JOIN_TIMEOUT_S
                while not ended.done() and (absent := self._never_seen(nodes)):
                    if time.monotonic() >= deadline and len(absent) < len(nodes):
                        return  # who is missing is asked alone
                    await asyncio.wait([ended], timeout=0.2)
                if len(self._never_seen(nodes)) < len(nodes):
                    return
                said = ended.result().said[-300:]
            self._job.journal.note("agents did not start", said=said)
            say(f"agents did not start, trying again: {said}")
            await asyncio.sleep(self._config.recovery.agent_retry_s)

    def include(self, node: str) -> None:
        """A node has come into the job: start an agent there now."""
        self._left.discard(node)
        self.exclude(node)
        self._retries[node] = asyncio.create_task(self._bring_back(node, at_once=True))

    def dismiss(self, node: str) -> None:
        """The user wants no ranks there any more: start no agent on it again."""
        self._left.add(node)
        self.exclude(node)

    def recall(self, node: str) -> None:
        """The opposite of `dismiss`: an agent is started there again, as on any node without one."""
        self._left.discard(node)

    def exclude(self, node: str) -> None:
        """A node is not the job's any more: ask it no more."""
        retry = self._retries.pop(node, None)
        if retry is not None:
            retry.cancel()

    async def _start(self, nodes: tuple[str, ...]) -> tuple[Step, asyncio.Task[StepEnd]]:
        self._launch += 1
        step = self._launcher.agents(nodes, self._launch)
        self._job.journal.note("agents launched", nodes=nodes, launch=self._launch)
        await step.start()
        self.steps[step] = ended = asyncio.create_task(step.wait())
        ended.add_done_callback(lambda _: self.steps.pop(step, None))
        return step, ended

    async def _bring_back(self, node: str, at_once: bool = False) -> None:
        """Try until an agent on this node has joined, or Slurm has taken the node from the job."""
        try:
            while True:
                if not at_once:
                    await asyncio.sleep(self._config.recovery.agent_retry_s)
                at_once = False
                if self._is_back(node):
                    return
                if self._client is not None and not await self._may_use(self._client, node):
                    continue
                if node in self._left:
                    return
                try:
                    step, ended = await self._start((node,))
                except OSError as err:
                    self._job.journal.note("agent did not start", node=node, code=127, said=str(err))
                    continue
                deadline = time.monotonic() + JOIN_TIMEOUT_S
                while not ended.done() and not self._is_back(node) and time.monotonic() < deadline:
                    await asyncio.wait([ended], timeout=0.2)
                if self._is_back(node):
                    return
                step.terminate(hard=True)
                await asyncio.wait([ended])
                end = ended.result()
                self._job.journal.note("agent did not start", node=node, code=end.code, said=end.said[-300:])
                self._job.agent_failed(node, end.said)
        finally:
            if self._retries.get(node) is asyncio.current_task():
                del self._retries[node]

    def _never_seen(self, nodes: tuple[str, ...]) -> list[str]:
        return [node for node in nodes if self._job.detector.state_of(node) == "unknown"]

    def _is_back(self, node: str) -> bool:
        return self._job.detector.state_of(node) in ("alive", "suspect")

    async def _may_use(self, client: SlurmClient, node: str) -> bool:
        """False while Slurm thinks the node unusable or cannot be asked; a node that left the job is forgotten."""
        try:
            job = await client.job(self._launcher.job_of(node))
            if node not in job.nodes:
                self._left.add(node)
                self._job.journal.note("node left the job", node=node)
                return True
            states = (await client.node_states((node,)))[node]
        except SlurmError:
            return False
        self._job.slurm_said(node, states)
        return not states & {"DOWN", "NOT_RESPONDING", "FAIL", "UNKNOWN"}

    async def _poll_slurm(self, client: SlurmClient) -> None:
        try:
            states = await client.node_states(self._job.nodes)
        except SlurmError as err:
            self._job.journal.note("Slurm could not be asked", error=str(err))
            return
        for node, words in states.items():
            self._job.slurm_said(node, words)

    def abandon(self, node: str) -> None:
        """A node is lost: the steps that include it go on without their srun (see `Step.abandon`)."""
        abandon_steps(self.steps, node)

    async def stop(self, timeout_s: float) -> None:
        """Agents end on our Stop; those on lost nodes cannot, and srun waits for them."""
        await end_steps(tuple(self.steps), tuple(self.steps.values()), timeout_s)
