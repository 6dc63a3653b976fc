"""Companion jobs: how nodes of a pool come into this job and go back. See docs/reference/plugin-contract.md.

The machine asks by number and is answered by that number; once it has withdrawn a request, or given its node back,
nothing is said about it any more. A companion job is cancelled on every way out: not wanted any more, not usable, the
end of the job, an error of ours. Its own end (time limit, preemption, an administrator) is the loss of its node. Being
unable to ask Slurm is no answer: neither has the pool refused, nor has a companion job ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec

from flashrec.core import events as e
from flashrec.core.effects import ReleaseNode, RequestNode
from flashrec.manager.salloc import Outcome, Salloc, job_name, salloc_argv, salloc_environment
from flashrec.slurm.client import SlurmClient
from flashrec.slurm.command import is_outage
from flashrec.slurm.scheduler import JobInfo, Scheduler, SlurmError, SlurmUnavailable

SALLOC_GRACE_S = 10.0  # beyond `pool.wait_s`, after which the machine has withdrawn the request anyway
OUTAGE_RETRY_S = 1.0
VIEW_TIMEOUT_S = 4.0  # job_submit may see our job a second late, see plugin-contract.md
CANCEL_TRIES = 5
WITHDRAW_TIMEOUT_S = 2.0
MAX_AGENT_FAILURES = 2
_GONE = ("invalid job id", "knows no single job", "knows no job")
_LIVE = frozenset({"RUNNING", "CONFIGURING", "SUSPENDED", "RESIZING", "SIGNALING", "STOPPED"})


class Job(Protocol):
    """What companion jobs need of the job they belong to (the manager is one)."""

    def emit(self, event: e.AnyEvent) -> None: ...

    def node_came(self, request: int, node: str) -> None: ...

    def is_member(self, node: str) -> bool: ...

    def say(self, text: str) -> None: ...


class Companion(msgspec.Struct, eq=False):
    """One request. getting: until its answer; running: salloc, which may end later. node: '' until it was granted.
    is_over: nothing is said about it any more."""

    request: int
    asked_at: float
    getting: asyncio.Task[None] | None = None
    running: asyncio.Task[Outcome] | None = None
    salloc: Salloc | None = None
    job_id: int | None = None
    node: str = ""
    said: str = ""
    agent_failures: int = 0
    is_over: bool = False


class Companions:
    """pool: the reservation. note: the journal's. All answers go through `job`."""

    def __init__(
        self, job: Job, job_id: int, pool: str, wait_s: float, poll_interval_s: float, client: SlurmClient,
        scheduler: Scheduler, note: Callable[..., None],
    ) -> None:  # fmt: skip
        self._job, self._job_id, self._pool, self._wait_s = job, job_id, pool, wait_s
        self._poll_interval_s, self._client, self._scheduler, self._note = poll_interval_s, client, scheduler, note
        self._companions: dict[int, Companion] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._like: JobInfo | None = None
        self._takes_all_memory = False

    # ---- what the machine asks --------------------------------------------------------------------------------

    def request(self, effect: RequestNode) -> None:
        self._job.say(f"no spare is left: asking pool {self._pool} for a node")
        self._companions[effect.request] = companion = Companion(effect.request, time.monotonic())
        companion.getting = self._start(self._get(companion, effect.avoid))

    def release(self, effect: ReleaseNode) -> None:
        """Harmless if that has been done."""
        companion = self._companions.get(effect.request)
        if companion is not None and not companion.is_over:
            companion.is_over = True
            self._start(self._end(companion, effect.reason))

    # ---- what others ask --------------------------------------------------------------------------------------

    def job_of(self, node: str) -> int | None:
        """The companion job that a node came with; None: it is not from the pool."""
        return next((c.job_id for c in self._companions.values() if c.node == node and not c.is_over), None)

    def agent_failed(self, node: str, said: str) -> None:
        """An agent could not be started there, though Slurm can be reached. After two tries the node is no use."""
        companion = next((c for c in self._companions.values() if c.node == node and not c.is_over), None)
        if companion is not None and not is_outage(said):
            companion.agent_failures += 1
            if companion.agent_failures >= MAX_AGENT_FAILURES:
                why = said.splitlines()[-1] if said else "it printed nothing"
                self._job.emit(e.NodeLeft(companion.request, node, f"no agent can be started: {why}"))

    async def run(self) -> None:
        """Learn in time what to ask for, and look after companion jobs until cancelled."""
        while self._like is None:
            try:
                await self._learn()
            except SlurmError as err:
                self._note("Slurm could not be asked", error=str(err))
                await asyncio.sleep(self._poll_interval_s)
        await self._look_for_pool()
        while True:
            await asyncio.sleep(self._poll_interval_s)
            for companion in [c for c in self._companions.values() if not c.is_over]:
                if companion.node:
                    await self._check(companion)
                elif companion.said:
                    await self._explain(companion)

    async def stop(self) -> None:
        """The job is over: every companion job ends. May be called again."""
        for companion in self._companions.values():
            if not companion.is_over:
                companion.is_over = True
                self._start(self._end(companion, "the job is over"))
        while self._tasks:
            await asyncio.wait(self._tasks)

    # ---- one companion job ------------------------------------------------------------------------------------

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _learn(self) -> JobInfo:
        """What the job has on each of its nodes; asked while it still has all of them."""
        if self._like is None:
            self._takes_all_memory = await self._client.memory_asked(self._job_id) == "0"
            self._like = await self._scheduler.job(self._job_id)
        return self._like

    async def _look_for_pool(self) -> None:
        """Say at the start what would be a surprise after the first loss."""
        with contextlib.suppress(SlurmError):
            if await self._scheduler.reservation(self._pool) is None:
                self._job.say(
                    f"warning: there is no reservation {self._pool} (or you may not see it): until there is one, no "
                    "lost node is replaced from it (flashrec pool status)"
                )

    async def _get(self, companion: Companion, avoid: tuple[str, ...]) -> None:
        while not companion.is_over:
            try:
                outcome = await self._ask(companion, avoid)
                if outcome.is_granted:
                    await self._take(companion, outcome)
                    return
            except SlurmUnavailable as err:
                outcome = Outcome(False, None, str(err))
            except (SlurmError, OSError) as err:
                self._refused(companion, str(err), False)
                return
            was_queued = companion.salloc is not None and companion.salloc.was_pending
            is_early = "is not running" in outcome.said and time.monotonic() - companion.asked_at < VIEW_TIMEOUT_S
            if was_queued or not (is_outage(outcome.said) or is_early):
                self._refused(companion, outcome.said, False)
                return
            self._refused(companion, outcome.said, True)
            await asyncio.sleep(OUTAGE_RETRY_S)

    async def _ask(self, companion: Companion, avoid: tuple[str, ...]) -> Outcome:
        with contextlib.suppress(SlurmError):  # only where the site's job_submit asks for it
            await self._client.touch(self._job_id)
        like, time_left = await asyncio.gather(self._learn(), self._client.time_left(self._job_id))
        argv = salloc_argv(like, self._takes_all_memory, self._pool, time_left, avoid, self._wait_s + 1)
        self._note("companion asked for", request=companion.request, argv=argv)
        companion.salloc = Salloc(argv, salloc_environment(os.environ), lambda: self._has_to_wait(companion))
        if companion.is_over:
            return Outcome(False, None, "not wanted any more")
        salloc = companion.salloc
        companion.running = ending = asyncio.create_task(salloc.run(self._wait_s + SALLOC_GRACE_S))
        granted = asyncio.create_task(salloc.granted.wait())
        try:
            await asyncio.wait([ending, granted], return_when=asyncio.FIRST_COMPLETED)
        finally:
            granted.cancel()
        outcome = ending.result() if ending.done() else Outcome(True, salloc.job_id, "")
        companion.job_id = outcome.job_id
        return outcome

    async def _take(self, companion: Companion, outcome: Outcome) -> None:
        """Slurm has granted a node; find out which."""
        assert outcome.job_id is not None
        while not companion.is_over:
            try:
                place = await self._client.job(outcome.job_id)
                break
            except SlurmUnavailable:
                await asyncio.sleep(OUTAGE_RETRY_S)
        if companion.is_over:
            return  # whoever said so cancels the job
        if place.state not in _LIVE or len(place.nodes) != 1 or self._job.is_member(place.nodes[0]):
            said = f"companion job {outcome.job_id} is {place.state} on {', '.join(place.nodes) or 'no node'}"
            self._refused(companion, f"{said}, which is of no use", False)
            return
        for former in [c for c in self._companions.values() if c.node == place.nodes[0] and not c.is_over]:
            former.is_over = True  # its job has ended, or Slurm would not have given the node again
            self._start(self._end(former, f"node {former.node} came again"))
        companion.node = place.nodes[0]
        seconds = time.monotonic() - companion.asked_at
        self._note(
            "companion granted", request=companion.request, node=companion.node, companion=companion.job_id,
            seconds=seconds,
        )  # fmt: skip
        how = f"(companion job {companion.job_id}) after {seconds:.2f} s"
        self._job.say(f"node {companion.node} came from pool {self._pool} {how}")
        self._job.node_came(companion.request, companion.node)

    def _refused(self, companion: Companion, reason: str, may_retry: bool) -> None:
        if companion.is_over:
            return
        said = f"pool {self._pool}: {_in_short(reason, self._pool)}"
        if said != companion.said:
            self._job.say(f"{said}; waiting up to {self._wait_s:g} s" if may_retry else said)
        companion.said = said
        if not may_retry:
            companion.is_over = True
            self._start(self._end(companion, reason))
        self._job.emit(e.NodeRefused(companion.request, said, may_retry))

    # ---- waiting ----------------------------------------------------------------------------------------------

    def _has_to_wait(self, companion: Companion) -> None:
        self._start(self._explain(companion))

    async def _explain(self, companion: Companion) -> None:
        """Say who has the nodes, when that has changed."""
        try:
            reason = await self._who_has_them()
        except SlurmError:
            reason = "no node free"
        is_waiting = companion.salloc is not None and not companion.salloc.granted.is_set() and not companion.is_over
        if is_waiting and f"pool {self._pool}: {reason}" != companion.said:
            self._refused(companion, reason, True)

    async def _who_has_them(self) -> str:
        reservation = await self._scheduler.reservation(self._pool)
        if reservation is None or not reservation.nodes:
            return "no node free"
        states = await self._client.node_states(reservation.nodes)
        busy = {node for node, words in states.items() if words & {"ALLOCATED", "MIXED", "COMPLETING"}}
        bad = {node for node, words in states.items() if words & {"DOWN", "DRAIN", "FAIL", "NOT_RESPONDING", "UNKNOWN"}}
        count = len(reservation.nodes)
        text = f"{len(busy - bad)} of {count} in use" + (f", {len(bad)} not usable" if bad else "")
        return f"{'no node free' if len(busy | bad) >= count else 'Slurm has given no node yet'}: {text}"

    async def _check(self, companion: Companion) -> None:
        """Has its job ended, whatever ended it?"""
        assert companion.job_id is not None
        try:
            place = await self._client.job(companion.job_id)
        except SlurmError as err:
            if not any(sign in str(err).lower() for sign in _GONE):
                return
            state = "over"
        else:
            if place.state in _LIVE and companion.node in place.nodes:
                return
            state = place.state
        if not companion.is_over:
            self._job.emit(
                e.NodeLeft(companion.request, companion.node, f"companion job {companion.job_id} is {state}")
            )

    # ---- the end ----------------------------------------------------------------------------------------------

    async def _end(self, companion: Companion, reason: str) -> None:
        """Take the request out of Slurm's queue, or cancel the job. Bounded; what may be left is said."""
        salloc = companion.salloc
        if salloc is not None:
            salloc.withdraw()
        tasks = [task for task in (companion.getting, companion.running) if task is not None and not task.done()]
        if tasks:
            await asyncio.wait(tasks, timeout=WITHDRAW_TIMEOUT_S if salloc is not None else 0)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if salloc is None:
            return
        jobs = [salloc.job_id] if salloc.job_id is not None else await self._nameless() if salloc.was_killed else []
        for job_id in jobs:
            await self._cancel(job_id)
        what = "companion given back" if companion.node else "companion not taken"
        self._note(what, request=companion.request, node=companion.node, companion=salloc.job_id, reason=reason)

    async def _cancel(self, job_id: int) -> None:
        said = ""
        for _ in range(CANCEL_TRIES):
            try:
                await self._scheduler.cancel(job_id)
                return
            except SlurmError as err:
                said = str(err)
            await asyncio.sleep(OUTAGE_RETRY_S)
        self._note("companion may be left", companion=job_id, said=said)
        self._job.say(f"companion job {job_id} could not be cancelled ({said}); end it with: scancel {job_id}")

    async def _nameless(self) -> list[int]:
        """salloc had to be killed before it said which job it had made."""
        known = {c.salloc.job_id for c in self._companions.values() if c.salloc is not None}
        try:
            jobs = await self._scheduler.jobs(user=str(os.getuid()), name=job_name(self._job_id))
        except SlurmError as err:
            self._note("companion may be left", said=str(err))
            return []
        return [job.job_id for job in jobs if job.job_id not in known]


def _in_short(reason: str, pool: str) -> str:
    """What our own job_submit said is better than what salloc makes of it; neither is said twice."""
    ours = [part for part in reason.split("; ") if part.startswith("flashrec: ")]
    return (ours or [reason])[0].removeprefix("flashrec: ").removeprefix(f"pool {pool}: ")
