"""One look at the node by the programs of `flashrec.health`, in a thread of its own.

The programs have time limits, but already to find them (the check file, their folder, perhaps on a file server that
has just died) may hang for good, and the agent must not. A thread that does not come back is left behind, and until it
does every further look says that it could not.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path

import msgspec

from flashrec.core.health import Found, HealthRules
from flashrec.health import CheckFileError, load_plan, run_checks

GRACE_S = 3.0  # beyond the checks' own time limit: killing them, reading the file


class Checks:
    """The checks of one node. One look at a time."""

    def __init__(self, node: str, rules: HealthRules) -> None:
        self._node, self._rules = node, rules
        self._thread: threading.Thread | None = None

    async def look(self, only: tuple[str, ...]) -> list[Found]:
        """What the checks of these names say. When cancelled, the checks that run are ended."""
        if self._thread is not None and self._thread.is_alive():
            return [Found("checks", "unknown", "the look before has not come back: does a file system hang?")]
        loop, over = asyncio.get_running_loop(), threading.Event()
        done: asyncio.Future[list[Found]] = loop.create_future()

        def run() -> None:
            found = asyncio.run(self._look(only, over))
            with contextlib.suppress(RuntimeError):  # our loop is closed: the process ends
                loop.call_soon_threadsafe(lambda: None if done.done() else done.set_result(found))

        self._thread = threading.Thread(target=run, name="flashrec-checks", daemon=True)
        self._thread.start()
        limit_s = self._rules.timeout_s + GRACE_S
        try:
            async with asyncio.timeout(limit_s):
                return await done
        except TimeoutError:
            return [Found("checks", "unknown", f"no result within {limit_s:g} s: does a file system hang?")]
        finally:
            over.set()

    async def _look(self, only: tuple[str, ...], over: threading.Event) -> list[Found]:
        """In the thread, with a loop of its own."""
        look = asyncio.create_task(self._run(only))
        while not look.done() and not over.is_set():
            await asyncio.wait([look], timeout=0.1)
        if not look.done():
            look.cancel()
        try:
            return await look
        except asyncio.CancelledError:
            return []
        except Exception as err:
            return [Found("checks", "unknown", f"the agent cannot run them: {err!r}")]

    async def _run(self, only: tuple[str, ...]) -> list[Found]:
        """A check file that cannot be used, or has nothing for this node, saw nothing."""
        try:
            plan = load_plan(Path(self._rules.file) if self._rules.file else None)
            settings = msgspec.structs.replace(plan.settings, run_timeout_s=self._rules.timeout_s)
            report = await run_checks(msgspec.structs.replace(plan, settings=settings), self._node, only=only)
        except (CheckFileError, OSError) as err:
            return [Found("checks", "unknown", str(err))]
        if not report.findings:
            return [Found("checks", "unknown", f"{plan.source} has none of {', '.join(only)} for this node")]
        return [Found(one.label, str(one.verdict.status), one.verdict.reason) for one in report.findings]
