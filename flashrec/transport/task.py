"""A task of a job step on its way to being a worker: what it says to its agent before it has a rank.

    task                           agent
    TaskStarting           ───►                      an ordinary one: it becomes the user's command by exec
                           ◄───    TaskAssigned      (or TaskRefused)

    TaskParking            ───►                      one that is parked: the user's interpreter, by exec, with the
                           ◄───    ParkingAllowed    connection left open in it
    TaskReady              ───►                      its imports are done; from here on it sleeps
                           ◄───    TaskAssigned      any time later (or TaskRefused, or the end of the connection)
    TaskTaken              ───►                      it goes on as that rank

While a script is run before its rank is known (`hot.park: script`) the variables of a rank cannot be read: a
`RankNotKnown` is raised, which ends the script, instead of a wrong number being taken for one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from flashrec.wire import frames, messages

PARKED = "FLASHREC_PARKED"  # in a parked process, until it has its rank: its end of the connection, and oom_score_adj
_OOM_SCORE = Path("/proc/self/oom_score_adj")
OF_A_RANK = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID",
    "FLASHREC_SOCKET", "FLASHREC_INCARNATION", "FLASHREC_GENERATION", "FLASHREC_JOINS",
)  # fmt: skip


class RankNotKnown(RuntimeError):
    """The script has asked for its rank before flashrec.init(), in a process that was parked (`hot.park: script`)."""


class Refused(Exception):
    """The agent does not want this task (any more)."""


class Line:
    """The task's end of the connection: frames over a blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._reader = sock, frames.FrameReader()

    def say(self, message: messages.ToAgentFromWorker) -> None:
        self._socket.sendall(frames.frame(frames.encode(message)))

    def hear(self) -> messages.ToWorker:
        """The next message. Raises Refused (also when the agent has closed the connection), OSError, ProtocolError."""
        while True:
            data = self._socket.recv(65536)
            if not data:
                raise Refused("the agent closed the connection")
            for payload in self._reader.feed(data):  # the agent says one thing at a time
                answer = frames.to_worker.decode(payload)
                if isinstance(answer, messages.TaskRefused):
                    raise Refused(answer.reason)
                return answer


def redirect(output: str) -> None:
    """Whatever this process prints goes to the end of that file. Raises OSError."""
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def await_assignment() -> None:
    """In a parked process: say that it is ready, sleep until it gets a rank, and take over that rank's environment and
    output. Ends the process (exit code 0) if it is not wanted. Raises OSError."""
    fd, oom_score = os.environ[PARKED].split(",")
    sock = socket.socket(fileno=int(fd))
    line = Line(sock)
    try:
        line.say(messages.TaskReady(_age_s()))
        answer = line.hear()
        while not isinstance(answer, messages.TaskAssigned):
            answer = line.hear()
    except (Refused, OSError) as err:
        os.write(2, f"flashrec: parked, and not needed: {err}\n".encode())
        os._exit(0)
    lift()
    with contextlib.suppress(OSError):
        _OOM_SCORE.write_text(oom_score)
    del os.environ[PARKED]
    os.environ.update(answer.env)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    redirect(answer.output)
    line.say(messages.TaskTaken())
    sock.close()


def park(sock: socket.socket) -> None:
    """Make this process a parked one from its next exec on: the connection stays open, and should the node run out of
    memory the kernel ends it before any worker."""
    sock.settimeout(None)
    sock.set_inheritable(True)
    before = "0"
    with contextlib.suppress(OSError):
        before = _OOM_SCORE.read_text().strip()
        _OOM_SCORE.write_text("1000")
    os.environ[PARKED] = f"{sock.detach()},{before}"


def _age_s() -> float:
    """Seconds since this process was started (its exec is later by the launcher's part)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


class _Guard:
    """Stands where os.environ encodes a name, which every look-up does: []; get, in, os.getenv."""

    def __init__(self, inner: Callable[[str], str], kept: dict[str, str]) -> None:
        self.inner, self.kept = inner, kept

    def __call__(self, name: str) -> str:
        if name in OF_A_RANK:
            raise RankNotKnown(
                f"{name} was looked up before flashrec.init(): this process is parked and has no rank yet. Call "
                "flashrec.init() before, or leave hot.park at imports"
            )
        return self.inner(name)


def hide() -> None:
    """From now on, until `lift`, nobody learns of a rank from the environment. Raises AttributeError where Python has
    no such seam (it is not documented; CPython 3.11 to 3.14 have it)."""
    kept = {name: os.environ.pop(name) for name in OF_A_RANK if name in os.environ}
    os.environ.encodekey = _Guard(os.environ.encodekey, kept)


def lift() -> None:
    """The opposite of `hide`; harmless without it."""
    guard = getattr(os.environ, "encodekey", None)
    if isinstance(guard, _Guard):
        os.environ.encodekey = guard.inner
        os.environ.update(guard.kept)
