"""`flashrec node-health --slurm`: one run of the health program. Its exit code is 0 whatever happens.

It says what it does on standard error, one line each with syslog's <level> in front; the launcher passes them on. On a
healthy node it asks Slurm nothing. Every question to Slurm is bounded; no answer means that nothing is changed.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from flashrec.admin.health import policy
from flashrec.admin.health.reason import is_ours
from flashrec.admin.health.state import OnlyOne, State, advance, read, write
from flashrec.health import CheckFileError, Plan, Report, load_plan, run_checks
from flashrec.health.catalog import doubt_about
from flashrec.health.checkfile import DEFAULT_PATH, PROGRAM_LIMIT_S, SETTLE_S
from flashrec.slurm.scheduler import NodeInfo, Scheduler, SlurmError, SlurmUnavailable

ERROR, WARNING, NOTICE, DEBUG = 3, 4, 5, 7
Log = Callable[[int, str], None]
T = TypeVar("T")


def say(level: int, text: str) -> None:
    """One line for the launcher, which hands it to syslog."""
    print(f"<{level}>{' '.join(text.split())}", file=sys.stderr, flush=True)


def main(config: Path | None, scheduler: Scheduler, environ: Mapping[str, str] = os.environ) -> int:
    """Always 0: slurmd only logs another code, and a health program must never be what makes a node unhealthy."""
    try:
        _main(config or DEFAULT_PATH, scheduler, environ)
    except CheckFileError as err:
        say(ERROR, f"nothing was checked: {err}")
    except TimeoutError:
        say(ERROR, f"gave up after {PROGRAM_LIMIT_S:g} s")
    except OSError as err:
        say(ERROR, f"nothing was decided: {err}")
    except Exception as err:  # a fault of ours: say where, and leave the node as it is
        say(ERROR, f"failed, {type(err).__name__}: {err}")
        for line in traceback.format_tb(err.__traceback__):
            say(ERROR, line)
    return 0


def _main(config: Path, scheduler: Scheduler, environ: Mapping[str, str]) -> None:
    node = environ.get("SLURMD_NODENAME", "")
    if not node:
        raise CheckFileError("SLURMD_NODENAME is not set: this is what slurmd runs; try `flashrec node-health`")
    if not config.exists():
        raise CheckFileError(f"there is no {config}: a node is never drained on a guess")
    doubt = doubt_about(config) if os.geteuid() == 0 else ""
    if doubt:
        raise CheckFileError(f"{config} is not used: {doubt}")
    plan = load_plan(config)
    only_one = OnlyOne(Path(plan.settings.state_file))
    try:
        if not only_one.is_held:
            say(WARNING, "an earlier run has not ended; this one does nothing")
            return
        asyncio.run(_bounded(Run(node, plan, scheduler, say)))
    finally:
        only_one.close()


async def _bounded(run: Run) -> None:
    async with asyncio.timeout(PROGRAM_LIMIT_S):
        await run.run()


class Run:
    """One run on one node. scheduler, log, settle_s and random_s are where a test takes hold."""

    def __init__(
        self,
        node: str,
        plan: Plan,
        scheduler: Scheduler,
        log: Log,
        *,
        settle_s: float = SETTLE_S,
        random_s: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self.node, self.plan, self.settings, self.scheduler, self.log = node, plan, plan.settings, scheduler, log
        self._settle_s, self._random_s = settle_s, random_s
        self._state_file = Path(self.settings.state_file)

    async def run(self) -> None:
        report = await run_checks(self.plan, self.node, features=await self._features())
        state = advance(read(self._state_file), report, time.time())
        self._keep(state)
        self.log(WARNING if state.fails else DEBUG, state.summary)
        if not policy.needs_slurm(state, self.settings):
            return
        try:
            await self._act(state, report)
        except SlurmUnavailable as err:
            self.log(WARNING, f"Slurm could not be asked, nothing is changed: {err}")
        except SlurmError as err:
            self.log(ERROR, f"Slurm refuses: {err}")

    async def _features(self) -> tuple[str, ...] | None:
        if not self.plan.needs_features:
            return None
        try:
            found = await self._ask(self.scheduler.nodes([self.node]))
        except SlurmError as err:
            self.log(WARNING, f"the features of this node are not known: {err}")
            return None
        return found[self.node].features

    async def _act(self, state: State, report: Report) -> None:
        if state.fails >= self.settings.fail_runs:
            await asyncio.sleep(self._random_s(0, self.settings.spread_s))  # not all nodes of a cluster at once
        nodes, node = await self._look()
        decision = policy.decide(node, nodes, state, report, self.settings)
        match decision:
            case policy.Keep(why, is_drained):
                self.log(NOTICE if why else DEBUG, why or "nothing to do")
                self._keep(_settled(state, is_drained))
            case policy.Undrain(why):
                await self._undrain(state, why)
            case policy.Drain(reason):
                # Written first: should we die in between, the next run asks Slurm.
                state = msgspec.structs.replace(state, may_be_drained=True, must_recount=True)
                self._keep(state)
                await self._ask(self.scheduler.drain(self.node, reason))
                self.log(ERROR, f"drained: {reason}")
                await self._recount(state)

    async def _recount(self, state: State) -> None:
        await asyncio.sleep(self._settle_s)
        nodes, node = await self._look()
        if not is_ours(self.settings.prefix, node.reason):
            self._keep(_settled(state, False))
        elif policy.is_one_too_many(node, nodes, self.settings):
            await self._undrain(state, f"more than max_drained = {self.settings.max_drained} nodes drained at once")
        else:
            self._keep(_settled(state, True))

    async def _undrain(self, state: State, why: str) -> None:
        await self._ask(self.scheduler.undrain(self.node))
        self.log(NOTICE, f"undrained: {why}")
        self._keep(_settled(state, False))

    async def _look(self) -> tuple[dict[str, NodeInfo], NodeInfo]:
        nodes = await self._ask(self.scheduler.nodes())
        if self.node not in nodes:
            raise SlurmError(f"Slurm knows no node {self.node}")
        return nodes, nodes[self.node]

    async def _ask(self, question: Awaitable[T]) -> T:
        """A hanging command is ended; what it was to do may have happened all the same."""
        try:
            async with asyncio.timeout(self.settings.slurm_timeout_s):
                return await question
        except TimeoutError as err:
            raise SlurmUnavailable(f"no answer within {self.settings.slurm_timeout_s:g} s") from err

    def _keep(self, state: State) -> None:
        """Without a state there is no hysteresis, and nothing may be drained: the OSError ends the run."""
        write(self._state_file, state)


def _settled(state: State, is_drained: bool) -> State:
    """Slurm has told us whether this node bears our reason."""
    culprits = state.culprits if is_drained or state.fails else ()
    return msgspec.structs.replace(state, may_be_drained=is_drained, must_recount=False, culprits=culprits)
