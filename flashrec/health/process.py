"""Running one program that may do anything: hang, flood, fork, ignore signals, or sleep where no signal reaches it.

The program gets a session of its own. When it has ended, overrun its time or printed too much, its whole process group
is killed. A process that SIGKILL does not end (uninterruptible sleep on a dead file system or driver) is left behind
and reported as stuck: nothing here ever waits for it. A shell execs the program, because Popen itself waits for an exec
to return, and an exec from a dead file system does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

KILL_GRACE_S = 1.0
_CHUNK = 65536


class Ended(msgspec.Struct, frozen=True):
    """How it went. exit_code: None if it had to be killed. stuck: state letter of what outlived SIGKILL, else ''."""

    exit_code: int | None
    out: bytes
    err: bytes
    is_flood: bool = False
    stuck: str = ""


async def run_bounded(argv: Sequence[str], env: Mapping[str, str], timeout_s: float, max_bytes: int = _CHUNK) -> Ended:
    """Run `argv` for at most `timeout_s` (+ KILL_GRACE_S). Raises OSError only if no process can be made at all."""
    process = subprocess.Popen(
        ["/bin/sh", "-c", 'exec "$@"', "sh", *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(env),
        cwd="/",
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    watch = _Watch(process.pid)
    pipes = [_Pipe(stream.fileno(), max_bytes, watch.stop) for stream in (process.stdout, process.stderr)]
    try:
        await watch.wait(timeout_s)
        has_ended = watch.has_ended
        _kill_group(process.pid)
        stuck = "" if await watch.wait_end(KILL_GRACE_S) else _state_of(process.pid)
        for pipe in pipes:
            pipe.read_rest()
        exit_code = process.wait() if watch.has_ended else None
        return Ended(
            exit_code=exit_code if has_ended else None,
            out=bytes(pipes[0].data),
            err=bytes(pipes[1].data),
            is_flood=any(pipe.is_flood for pipe in pipes),
            stuck=stuck,
        )
    finally:
        if process.returncode is None:  # also when our caller was cancelled
            _kill_group(process.pid)
        for pipe in pipes:
            pipe.close()
        watch.close()
        process.stdout.close()
        process.stderr.close()


class _Watch:
    """Becomes done when the process ends or somebody says stop."""

    def __init__(self, pid: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        self._stop = asyncio.Event()
        self._loop.add_reader(self._fd, self._on_end)

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def stop(self) -> None:
        self._stop.set()

    def _on_end(self) -> None:
        self._loop.remove_reader(self._fd)
        self._ended.set()
        self._stop.set()

    async def wait(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._stop.wait()

    async def wait_end(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        return self.has_ended

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)


class _Pipe:
    """Reads one output as it comes; keeps `max_bytes`, and says stop if there is more."""

    def __init__(self, fd: int, max_bytes: int, stop: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd, self._max_bytes, self._stop = fd, max_bytes, stop
        self.data = bytearray()
        self.is_flood = False
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read)

    def _read(self) -> bool:
        """True if there may be more."""
        try:
            chunk = os.read(self._fd, _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self.close()
            return False
        self.data += chunk
        if len(self.data) > self._max_bytes:
            del self.data[self._max_bytes :]
            self.is_flood = True
            self.close()
            self._stop()
            return False
        return True

    def read_rest(self) -> None:
        """What the process wrote just before it ended; never waits for descendants that hold the pipe."""
        while not self.is_flood and self._read():
            pass

    def close(self) -> None:
        self._loop.remove_reader(self._fd)


def _kill_group(pid: int) -> None:
    """Only before the leader has been waited for: until then its number cannot mean anything else."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "?"
