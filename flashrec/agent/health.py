"""Looks at this node while a job runs on it, and says when it is sick and when it is well again.

The checks are programs (`agent.checks`), GPUs are watched through NVML (`agent.gpus`); both in threads, so that nothing
holds up the agent. What was found outlives a connection to the manager: a node that comes back as a new life is not
well because nobody remembers.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from flashrec.agent.checks import Checks
from flashrec.agent.gpus import GpuWatch
from flashrec.core.health import Found, HealthRules, NodeState

log = logging.getLogger("flashrec.agent")
Tell = Callable[[str, tuple[str, ...]], None]  # state and reasons


class HealthWatch:
    """One for the life of the process; `begin` and `end` for each life of the agent."""

    def __init__(self, node: str, rules: HealthRules) -> None:
        self._node, self._rules = node, rules
        self._state = NodeState(rules)
        self._checks = Checks(node, rules)
        self._gpus = GpuWatch(rules.gpu_period_s, self._take)
        self._tell: Tell | None = None
        self._told = ""
        self._is_first = False
        self._task: asyncio.Task[None] | None = None
        self._warned: tuple[str, ...] = ()

    def begin(self, tell: Tell) -> None:
        """Look now, tell the result, and from then on every change of it."""
        self._tell, self._told, self._is_first, self._state.is_admitted = tell, "", True, False
        self._gpus.start()
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)

    def end(self) -> None:
        """Tell nobody any more, and end the checks that run."""
        self._tell = None
        if self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        """The process ends."""
        self.end()
        self._gpus.close()

    async def _run(self) -> None:
        gpus = asyncio.create_task(self._gpus.wait_first(self._rules.timeout_s))
        found = await self._checks.look(self._rules.admit)
        await gpus
        self._is_first = False
        self._take(found)
        self._state.is_admitted = True
        delay_s = self._rules.period_s * random.uniform(0.25, 1.0)  # so that not all nodes look in the same second
        while True:
            if self._state.is_in_doubt:
                delay_s = min(delay_s, self._rules.again_s)
            await asyncio.sleep(delay_s)
            self._take([*await self._checks.look(self._rules.only), *self._gpus.overdue(self._rules.timeout_s)])
            delay_s = self._rules.period_s

    def _take(self, found: list[Found]) -> None:
        """A look has been taken, by the checks or at the GPUs."""
        self._state.look(found)
        self._warn(found)
        state, reasons = self._state.state, self._state.reasons
        if self._tell is None or self._is_first:
            return
        if state != self._told:
            log.log(logging.WARNING if state == "sick" else logging.INFO, "node health: %s %s", state, list(reasons))
            self._told = state
            self._tell(state, reasons)

    def _warn(self, found: list[Found]) -> None:
        """What does not make the node sick is in this log, once."""
        warnings = tuple(f"{one.check}: {one.reason}" for one in found if one.status in ("warn", "fail"))
        if warnings and warnings != self._warned:
            log.warning("node health: %s", "; ".join(warnings))
        self._warned = warnings or self._warned

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("node health is not watched any more", exc_info=error)
            if self._tell is not None and not self._told:
                self._tell("unknown", (f"the agent cannot look: {error!r}",))
