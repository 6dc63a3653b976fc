"""Running one of Slurm's commands: an argument list, LC_ALL=C, bounded in time, nothing left behind.

"Could not look" raises `SlurmUnavailable`; it is never an empty answer. A command gets a session of its own, and all
that it started (site wrappers are scripts) is killed with it when it does not answer or its caller is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence

import msgspec

from flashrec.slurm.scheduler import SlurmError, SlurmUnavailable

CALL_TIMEOUT_S = 15.0
_END_TIMEOUT_S = 1.0
_OUTAGES = (
    "unable to contact slurm controller",
    "connection refused",
    "socket timed out",
    "zero bytes were transmitted",
    "connection timed out",
    "communication connection failure",
    "slurm_persist_conn",
    "transport endpoint is not connected",
    "could not establish a configuration source",  # no slurm.conf, and nobody who would send one
    "unexpected message received",  # scontrol about jobs and new reservations, with no controller there
)

Wrap = Callable[[Sequence[str]], list[str]]


class Answer(msgspec.Struct, frozen=True):
    """What a command left: its exit code and both outputs."""

    exit_code: int
    out: str
    said: str


class Commands:
    """Stateless; safe to use from several tasks. wrap: makes the command line that runs another one elsewhere (in a
    container, on a dev cluster's login node)."""

    def __init__(self, timeout_s: float = CALL_TIMEOUT_S, wrap: Wrap = list) -> None:
        self._timeout_s = timeout_s
        self._wrap = wrap

    async def call(self, *argv: str) -> str:
        """Standard output of a command that ended well; else SlurmError or SlurmUnavailable with what it said."""
        answer = await self.run(*argv)
        if answer.exit_code != 0:
            raise SlurmError(f"{' '.join(argv)}: {answer.said or 'failed'}")
        return answer.out

    async def run(self, *argv: str) -> Answer:
        """As `call`, with a refusal as an answer. An outage raises, also where the exit code says that all is well."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._wrap(argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=plain_environment(os.environ),
                start_new_session=True,
            )
        except FileNotFoundError as err:
            raise SlurmUnavailable(
                f"{argv[0]} not found: install Slurm's client commands or load their module"
            ) from err
        except OSError as err:  # too many processes or open files, no memory: could not look
            raise SlurmUnavailable(f"{argv[0]} cannot be run: {err.strerror}") from err
        try:
            async with asyncio.timeout(self._timeout_s):
                out, err_text = await process.communicate()
        except TimeoutError as err:
            await _end(process)
            raise SlurmUnavailable(f"{argv[0]} did not answer within {self._timeout_s:g} s") from err
        except asyncio.CancelledError:
            await _end(process)
            raise
        said = err_text.decode(errors="replace").strip()
        exit_code = process.returncode if process.returncode is not None else -1
        if (exit_code != 0 or not out) and is_outage(said):  # scontrol write ends with 0 in an outage
            raise SlurmUnavailable(f"{' '.join(argv)}: {said}")
        return Answer(exit_code, out.decode(errors="replace"), said)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill a command and what it started; bounded, it may be stuck in the kernel."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_TIMEOUT_S):
            await process.communicate()


def is_outage(said: str) -> bool:
    """True if what a Slurm command printed means that the controller could not be reached (so: try again)."""
    lower = said.lower()
    return any(sign in lower for sign in _OUTAGES)


def is_settling(said: str) -> bool:
    """True if a controller that has just come back may have said it: until its nodes have registered (1 to 3 s on 22.05
    and 24.11) it has no memory to give, not even to a step that wants none."""
    return "memory required by task is not available" in said.lower()


def plain_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without what would change the output of Slurm's commands; times are in UTC."""
    formats = ("SQUEUE_", "SINFO_", "SCONTROL_", "SACCT_", "SLURM_TIME_FORMAT", "SLURM_CLUSTERS")
    return {**{k: v for k, v in environ.items() if not k.startswith(formats)}, "LC_ALL": "C", "TZ": "UTC0"}
