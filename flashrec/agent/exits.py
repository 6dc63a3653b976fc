"""What Slurm's plugin tells about tasks that have ended: one datagram each, with the wait status that the agent cannot
see (it is not the parent). Format: docs/reference/plugin-contract.md.

A datagram only ever helps to describe an end. Anything that is not exactly one of ours, or comes from another user, is
left out; nobody waits for one that does not come.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec

from flashrec.transport.paths import MAX_SOCKET_PATH

log = logging.getLogger("flashrec.agent")
MAX_BYTES = 128
_AT_ONCE = 64  # datagrams per turn of the loop
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_TASK_EXIT = re.compile(rb"FLASHREC1 task_exit (\d{1,10}) (\d{1,10}) (\d{1,10}) (\d{1,10}) (\d{1,5})\n")


class TaskExit(msgspec.Struct, frozen=True):
    """status: as waitpid gave it."""

    job_id: int
    step_id: int
    task_id: int
    pid: int
    status: int


class ExitSocket:
    """Listens as long as it is open; `heard` is called for each datagram that is one."""

    def __init__(self, path: Path, heard: Callable[[TaskExit], None]) -> None:
        """Raises OSError: there is none then, and no harm in it."""
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise OSError(f"{path} is too long for a unix socket")
        self._heard = heard
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            path.unlink(missing_ok=True)
            self._socket.bind(str(path))
        except OSError:
            self._socket.close()
            raise
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read)

    def close(self) -> None:
        """The path stays: it may be a successor's by now."""
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()

    def _read(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                data, ancillary, _, _ = self._socket.recvmsg(MAX_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            except OSError:
                return  # nothing more (or it will be said again)
            ended = parse_task_exit(data)
            if ended is not None and _sender(ancillary) in (0, os.geteuid()):
                self._heard(ended)
            else:
                log.warning("a datagram that is no task's exit was left out")


def parse_task_exit(data: bytes) -> TaskExit | None:
    """None for anything that is not exactly a datagram of the contract."""
    found = _TASK_EXIT.fullmatch(data)
    if found is None:
        return None
    ended = TaskExit(*map(int, found.groups()))
    return ended if ended.pid > 1 and ended.status <= 0xFFFF else None


def describe_status(status: int) -> str:
    """The words for people: 'killed by signal 9 (SIGKILL)', 'exit code 3'."""
    if not os.WIFSIGNALED(status):
        return f"exit code {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    name = ""
    with contextlib.suppress(ValueError):
        name = f" ({signal.Signals(number).name})"
    return f"killed by signal {number}{name}" + (", core dumped" if os.WCOREDUMP(status) else "")


def _sender(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(data) >= _CREDENTIALS.size:
            return int(_CREDENTIALS.unpack_from(data)[1])
    return None
