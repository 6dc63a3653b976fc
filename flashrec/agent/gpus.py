"""Watches the GPUs of this node through NVML, in a thread: a driver that hangs must not hold up the agent.

The thread waits for Xids and looks at every GPU each `period_s`. It is a daemon: one that hangs in the driver is left
behind when the process ends, and until then the agent says that it could not look.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable

from flashrec.core.health import Found
from flashrec.health.nvml import Gpus, Unusable, load

log = logging.getLogger("flashrec.agent")
WAIT_S = 0.5  # for one Xid; they come at once, this is how fast `close` is noticed


class GpuWatch:
    """tell(found) is called in the event loop. Nothing is told where there is no NVML, but once why not."""

    def __init__(self, period_s: float, tell: Callable[[list[Found]], None]) -> None:
        self._period_s, self._tell = period_s, tell
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._first = asyncio.Event()
        self._heard_at = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin, unless that was done before."""
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._run, name="flashrec-gpus", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._over.set()

    async def wait_first(self, timeout_s: float) -> None:
        """Until the GPUs were looked at for the first time, or `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._first.wait()

    def overdue(self, timeout_s: float) -> list[Found]:
        """A finding if NVML is silent for that much longer than a look may take: it hangs."""
        silent_s = time.monotonic() - self._heard_at
        is_alive = self._thread is not None and self._thread.is_alive()
        if not is_alive or silent_s < self._period_s + timeout_s:
            return []
        return [Found("nvml", "unknown", f"NVML has not answered for {silent_s:.0f} s")]

    def _run(self) -> None:
        try:
            gpus = Gpus(load())
            while not self._over.is_set():
                self._post(gpus.look())
                until = time.monotonic() + self._period_s
                while not self._over.is_set() and time.monotonic() < until:
                    if found := gpus.wait(WAIT_S):
                        self._post(found)
            gpus.close()
        except Unusable as err:
            self._post([Found("nvml", "unknown", str(err))])
        except Exception as err:
            log.exception("GPUs are not watched")
            self._post([Found("nvml", "unknown", f"cannot be asked: {err!r}")])

    def _post(self, found: list[Found]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(self._take, found)

    def _take(self, found: list[Found]) -> None:
        self._heard_at = time.monotonic()
        self._first.set()
        if found:
            self._tell(found)
