"""What the manager asks Slurm while a job runs: short questions, answered by one line a node, cheap enough to poll.

Only fields that hold no user text are requested (job names and comments may contain anything), so a line can be split
safely. Everything else that one can ask Slurm is in `scheduler`.
"""

from __future__ import annotations

from flashrec.slurm.command import CALL_TIMEOUT_S, Commands
from flashrec.slurm.hostlist import expand
from flashrec.slurm.scheduler import JobPlace, SlurmError, SlurmUnavailable

_EACH_NODE = ("--all", "--noheader", "--Node")  # all: the node may be in a hidden partition


class SlurmClient:
    """Asynchronous, stateless; safe to use from several tasks."""

    def __init__(self, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._commands = Commands(timeout_s)

    async def job(self, job_id: int) -> JobPlace:
        """The job's state and its nodes now (a job shrinks when Slurm takes a lost node from it)."""
        text = await self._commands.call("squeue", "--noheader", "--jobs", str(job_id), "--format", "%A|%T|%N|%B")
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

    async def time_left(self, job_id: int) -> str:
        """How long the job may still run, as salloc's --time takes it ('1-02:03:04', '9:59', 'UNLIMITED')."""
        return await self._field(job_id, "%L")

    async def memory_asked(self, job_id: int) -> str:
        """Memory that the job asked for, as squeue prints it: '0' if it takes all that its nodes have."""
        return await self._field(job_id, "%m")

    async def touch(self, job_id: int) -> None:
        """Change nothing in a job of ours, but make Slurm show it to job_submit as it is now (plugin-contract.md)."""
        name = await self._field(job_id, "%i")  # 7_2 of an array: by its number scontrol refuses to change an array
        await self._commands.call("scontrol", "update", f"jobid={name}", "timelimit=+0")

    async def _field(self, job_id: int, field: str) -> str:
        """One field of one job: the number of an array's last task brings all of its tasks."""
        text = await self._commands.call("squeue", "--noheader", "--jobs", str(job_id), "--format", f"%A|{field}")
        for line in text.splitlines():
            number, _, value = line.strip().partition("|")
            if number == str(job_id):
                return value.strip()
        raise SlurmError(f"squeue does not show job {job_id}")

    async def node_states(self, nodes: tuple[str, ...]) -> dict[str, frozenset[str]]:
        """State words of each node, upper case, without Slurm's suffix marks ('*' becomes NOT_RESPONDING)."""
        text = await self._commands.call("sinfo", *_EACH_NODE, "--nodes", ",".join(nodes), "--format", "%N|%T")
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
        text = await self._commands.call("sinfo", *_EACH_NODE, "--nodes", node, "--format", "%o")
        if not text.strip():
            raise SlurmError(f"sinfo did not show node {node}")
        return text.split()[0]

    async def batch_script(self, job_id: int) -> str | None:
        """Text of the job's batch script; None if it has none (salloc) or we may not see it."""
        try:
            return await self._commands.call("scontrol", "write", "batch_script", str(job_id), "-")
        except SlurmUnavailable:
            raise
        except SlurmError:
            return None

    async def version(self) -> str:
        """Version of the installed commands, for example '22.05.8'."""
        return (await self._commands.call("sinfo", "--version")).split()[-1]


def _state_words(state: str) -> frozenset[str]:
    words = set()
    for word in state.upper().split("+"):
        if word.endswith("*"):
            words.add("NOT_RESPONDING")
        words.add(word.rstrip("*~#!%$@^-"))
    if any(word.startswith(("DRAIN", "DRAINED", "DRAINING")) for word in words):
        words.add("DRAIN")
    return frozenset(words)
