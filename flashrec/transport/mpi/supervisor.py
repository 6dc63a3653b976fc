"""Starts an MPI child, watches it, kills it when it is stuck, and starts the next one; says each time why.

A child that says nothing for `stall_s` is stuck, wherever that is in libmpi. The wait between two starts is doubled as
long as children die young. A child that cannot even load its library a few times in a row is not started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from flashrec.transport.mpi.words import Beats, Begin, FromChild, Loaded, Settings, Unusable, Word, from_child, pack
from flashrec.wire.frames import FrameReader, ProtocolError

STALL_S = 5.0  # more than a Connect and an Accept may take
START_S = 30.0  # loading libmpi from a shared filesystem
MAX_STARTS = 3  # in a row, without one that worked
MIN_PAUSE_S, MAX_PAUSE_S = 0.2, 30.0
YOUNG_S = 30.0
LAST_WORDS_S = 1.0
_LOOK_S = 0.25
_KEPT_BYTES = 2000
_READ_BYTES = 256 * 1024


class Supervisor:
    """role: 'hub' or 'beater'. hear(word) for what the child says (never an empty Beats); gone(reason) when a child
    that had loaded its library has ended."""

    module = "flashrec.transport.mpi"

    def __init__(
        self, role: str, settings: Settings, hear: Callable[[FromChild], None], gone: Callable[[str], None],
        stall_s: float = STALL_S,
    ) -> None:  # fmt: skip
        self._role, self._settings, self._hear, self._gone, self._stall_s = role, settings, hear, gone, stall_s
        self._process: asyncio.subprocess.Process | None = None
        self._is_loaded = False
        self._wish = ""  # why the child is to be replaced by a fresh one
        self.silent_s = 0.0
        self.life = 0  # number of the child

    @property
    def pid(self) -> int:
        """Of the child; 0 if there is none now."""
        return self._process.pid if self._process is not None else 0

    def say(self, word: Word) -> None:
        """Nothing happens if there is no child now."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, RuntimeError):
                self._process.stdin.write(pack(word))

    def renew(self, reason: str) -> None:
        """Kill the child; the next one follows at once."""
        self._wish = reason
        self._kill()

    async def run(self) -> None:
        """Until cancelled, or until it is clear that no child can work here (`Unusable`)."""
        failures, pause_s = 0, MIN_PAUSE_S
        while True:
            began_at = time.monotonic()
            self._wish = ""
            reason = await self._one_life()
            if not self._is_loaded:
                failures += 1
                if reason == "" or failures == MAX_STARTS:
                    if reason:
                        self._hear(Unusable(f"the MPI {self._role} does not start: {reason}"))
                    return
            else:
                failures = 0
                self._gone(self._wish or reason)
            young = time.monotonic() - began_at < YOUNG_S and not self._wish
            pause_s = min(2 * pause_s, MAX_PAUSE_S) if young else MIN_PAUSE_S
            await asyncio.sleep(0 if self._wish else pause_s)

    async def _one_life(self) -> str:
        """Why it ended; '' if it said itself that it is of no use."""
        self._is_loaded, self.silent_s = False, 0.0
        self.life += 1
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", self.module, self._role, start_new_session=True,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
        except OSError as err:
            return str(err)
        self._process = process
        said = _Tail(process.stderr)
        last_words = asyncio.create_task(said.read())
        watch = asyncio.create_task(self._watch())
        try:
            self.say(Begin(self._settings))
            end = await self._listen(process)
            if end is None:
                return ""
            await asyncio.wait([asyncio.create_task(process.wait()), last_words], timeout=0.0 if end else LAST_WORDS_S)
            self._kill()
            code = await process.wait()
            stuck = watch.result() if watch.done() else ""
            return stuck or end or f"{_ending(code)}{said}"
        finally:
            self._kill()
            self._process = None
            burial = asyncio.create_task(_bury(process, watch, last_words))
            try:
                await asyncio.shield(burial)
            except asyncio.CancelledError:
                await burial
                raise

    async def _listen(self, process: asyncio.subprocess.Process) -> str | None:
        """To the end of its words. '': nothing wrong with them; None: it is of no use."""
        assert process.stdout is not None
        frames = FrameReader()
        try:
            while data := await process.stdout.read(_READ_BYTES):
                self.silent_s = 0.0
                for payload in frames.feed(data):
                    word = from_child.decode(payload)
                    if isinstance(word, Loaded):
                        self._is_loaded = True
                    if isinstance(word, Unusable):
                        self._hear(word)
                        return None
                    if not (isinstance(word, Beats) and not word.newest):
                        self._hear(word)
        except ProtocolError as err:
            return str(err)
        return ""

    async def _watch(self) -> str:
        """Kill the child when it is silent for too long. If we are late ourselves, that is not its silence."""
        looked_at = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            self.silent_s += min(now - looked_at, 2 * _LOOK_S)
            looked_at = now
            limit_s = self._stall_s if self._is_loaded else START_S
            if self.silent_s >= limit_s:
                self._kill()
                return f"silent for {limit_s:g} s, killed"

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


async def _bury(process: asyncio.subprocess.Process, *tasks: asyncio.Task[Any]) -> None:
    """Wait for the end of a killed child and of all its pipes, or they outlive the loop."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await process.communicate()


class _Tail:
    """The end of what a child printed: libmpi says there why it aborts."""

    def __init__(self, stream: asyncio.StreamReader | None) -> None:
        self._stream, self._kept = stream, b""

    async def read(self) -> None:
        assert self._stream is not None
        while data := await self._stream.read(_READ_BYTES):
            self._kept = (self._kept + data)[-_KEPT_BYTES:]

    def __str__(self) -> str:
        lines = [line for line in self._kept.decode(errors="replace").splitlines() if line.strip()]
        return f": {lines[-1].strip()}" if lines else ""


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
