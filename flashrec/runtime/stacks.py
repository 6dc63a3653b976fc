"""Lets the agent see where this process hangs, before it kills it.

Two ways. py-spy, run by the agent, reads our memory: the kernel wants a word of ours where Yama restricts ptrace
(`let_agent_look`). Where that is not to be had, faulthandler writes the stacks of all threads into a file upon a
signal, also while the interpreter's lock is held: a real-time signal that neither Slurm nor any library we know of
uses, and only if nobody has a handler for it. SIGUSR1 and SIGUSR2 stay the script's.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import struct
from pathlib import Path
from typing import Any

from flashrec.runtime.timeline import logger

STACKS_SIGNAL = signal.SIGRTMAX - 3
_PR_SET_PTRACER = 0x59616D61
_kept: list[Any] = []  # faulthandler wants its file open for as long as the process lives


def register(path: Path) -> int:
    """Write the stacks into `path` at each STACKS_SIGNAL. Returns the signal, or 0 if that could not be arranged."""
    if signal.getsignal(STACKS_SIGNAL) is not signal.SIG_DFL:
        logger.warning("signal %d has a handler already: stacks are taken by py-spy or not at all", STACKS_SIGNAL)
        return 0
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as err:
        logger.warning("cannot write %s: %s; stacks are taken by py-spy or not at all", path, err.strerror)
        return 0
    _kept.append(os.fdopen(fd, "wb", buffering=0))
    faulthandler.register(STACKS_SIGNAL, file=_kept[-1], all_threads=True, chain=False)
    return int(STACKS_SIGNAL)


def let_agent_look(connection: socket.socket) -> None:
    """Allow the process at the other end, and its children, to read our memory (no more than root may anyway)."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid = struct.unpack("3i", credentials)[0]
    if pid > 0:  # 0: not visible from this container
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)  # EINVAL without Yama: nothing to allow
