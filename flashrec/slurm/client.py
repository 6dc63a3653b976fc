"""What we ask Slurm, through the site's own commands: argument lists, LC_ALL=C, every call bounded in time.

Only fields that hold no user text are requested (job names and comments may contain anything), so a line can be split
safely. "Could not look" raises `SlurmUnavailable`; it is never an empty answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping

from flashrec.slurm.hostlist import expand
from flashrec.slurm.scheduler import JobPlace, SlurmError, SlurmUnavailable

CALL_TIMEOUT_S = 15.0
_END_TIMEOUT_S = 1.0
_EACH_NODE = ("--all", "--noheader", "--Node")  # all: the node may be in a hidden partition


class SlurmClient:
    """Asynchronous, stateless; safe to use from several tasks."""

    def __init__(self, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s

    async def job(self, job_id: int) -> JobPlace:
        """The job's state and its nodes now (a job shrinks when Slurm takes a lost node from it)."""
        text = await self._call("squeue", "--noheader", "--jobs", str(job_id), "--format", "%A|%T|%N|%B")
        lines = [line.strip().split("|") for line in text.splitlines()]
        found = [line for line in lines if line[0] == str(job_id)]  # an array's id brings all of its tasks
        if len(found) != 1 or len(found[0]) != 4:
            raise SlurmError(f"squeue knows no single job {job_id} (it printed {len(lines)} lines)")
        _, state, nodes, batch_host = found[0]
        try:
            names = expand(nodes)
        except ValueError as err:
            raise SlurmError(f"squeue says of job {job_id}: {err}") from err
        return JobPlace(job_id, state, names, "" if batch_host in ("n/a", "(null)") else batch_host)

    async def node_states(self, nodes: tuple[str, ...]) -> dict[str, frozenset[str]]:
        """State words of each node, upper case, without Slurm's suffix marks ('*' becomes NOT_RESPONDING)."""
        text = await self._call("sinfo", *_EACH_NODE, "--nodes", ",".join(nodes), "--format", "%N|%T")
        states: dict[str, frozenset[str]] = {}
        for line in text.splitlines():
            name, _, state = line.strip().partition("|")
            states[name] = states.get(name, frozenset()) | _state_words(state)
        missing = set(nodes) - set(states)
        if missing:
            raise SlurmError(f"sinfo did not show node {', '.join(sorted(missing))}")
        return states

    async def node_address(self, node: str) -> str:
        """The address at which Slurm reaches a node (NodeAddr)."""
        text = await self._call("sinfo", *_EACH_NODE, "--nodes", node, "--format", "%o")
        if not text.strip():
            raise SlurmError(f"sinfo did not show node {node}")
        return text.split()[0]

    async def batch_script(self, job_id: int) -> str | None:
        """Text of the job's batch script; None if it has none (salloc) or we may not see it."""
        try:
            return await self._call("scontrol", "write", "batch_script", str(job_id), "-")
        except SlurmUnavailable:
            raise
        except SlurmError:
            return None

    async def version(self) -> str:
        """Version of the installed commands, for example '22.05.8'."""
        return (await self._call("sinfo", "--version")).split()[-1]

    async def _call(self, *argv: str) -> str:
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=_environment(os.environ),
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
        if process.returncode != 0 or (not out and is_outage(said)):  # scontrol write ends with 0 in an outage
            raise (SlurmUnavailable if is_outage(said) else SlurmError)(f"{' '.join(argv)}: {said or 'failed'}")
        return out.decode(errors="replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill a command and what it started (site wrappers are scripts); bounded, it may be stuck in the kernel."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_TIMEOUT_S):
            await process.communicate()


def is_outage(said: str) -> bool:
    """True if what a Slurm command printed means that the controller could not be reached (so: try again)."""
    lower = said.lower()
    signs = (
        "unable to contact slurm controller",
        "connection refused",
        "socket timed out",
        "zero bytes were transmitted",
        "connection timed out",
        "communication connection failure",
        "slurm_persist_conn",
        "transport endpoint is not connected",
    )
    return any(sign in lower for sign in signs)


def is_settling(said: str) -> bool:
    """True if a controller that has just come back may have said it: until its nodes have registered (1 to 3 s on 22.05
    and 24.11) it has no memory to give, not even to a step that wants none."""
    return "memory required by task is not available" in said.lower()


def _state_words(state: str) -> frozenset[str]:
    words = set()
    for word in state.upper().split("+"):
        if word.endswith("*"):
            words.add("NOT_RESPONDING")
        words.add(word.rstrip("*~#!%$@^-"))
    if any(word.startswith(("DRAIN", "DRAINED", "DRAINING")) for word in words):
        words.add("DRAIN")
    return frozenset(words)


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without what would change the output of Slurm's commands."""
    formats = ("SQUEUE_", "SINFO_", "SACCT_", "SLURM_TIME_FORMAT", "SLURM_CLUSTERS")
    return {**{k: v for k, v in environ.items() if not k.startswith(formats)}, "LC_ALL": "C"}
