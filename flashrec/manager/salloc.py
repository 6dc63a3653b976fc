"""The command that gets a companion job: `salloc --no-shell`, on one node of the pool's reservation.

Slurm's own queue decides between jobs that want the same node, so salloc waits in it, for a bounded time, and is told
to end when the node is not wanted any more. What it prints is read as it comes: the number of the job first of all,
for without it nobody could cancel the job. Once the node is granted, salloc is not waited for: with PrologFlags=Alloc
it looks only every 3 s whether the prolog has ended, while srun starts its step as soon as it has (measured, 22.05).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import signal
from collections.abc import Callable, Mapping, Sequence

import msgspec

from flashrec.slurm.command import plain_environment
from flashrec.slurm.scheduler import JobInfo

END_TIMEOUT_S = 3.0
_JOB = re.compile(r"(?:^|: )(Pending|Granted) job allocation ([0-9]+)\s*$")
_KEPT_LINES = 20
_TIME_LEFT = re.compile(r"[0-9:-]+|UNLIMITED")


class Outcome(msgspec.Struct, frozen=True):
    """job_id: None if Slurm made no job. said: what salloc complained about, in one line."""

    is_granted: bool
    job_id: int | None
    said: str


class Salloc:
    """One try. `job_id` is known from the moment Slurm has it; on_pending is called if the job has to wait. `granted`
    is set when Slurm has given the node; salloc may go on for long, and gives the node back if it is ended then."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], on_pending: Callable[[], None]) -> None:
        self._argv, self._env, self._on_pending = argv, env, on_pending
        self._process: asyncio.subprocess.Process | None = None
        self._is_unwanted = False
        self.job_id: int | None = None
        self.granted = asyncio.Event()
        self.was_pending = self.was_killed = False

    async def run(self, timeout_s: float) -> Outcome:
        """Until salloc has ended; timeout_s: until the grant. Raises OSError if there is no salloc."""
        self._process = await asyncio.create_subprocess_exec(
            *self._argv, env=dict(self._env), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        said: list[str] = []
        try:
            async with asyncio.timeout(timeout_s) as limit:
                if self._is_unwanted:
                    self._signal(signal.SIGTERM)
                await self._listen(self._process, said, limit)
        except TimeoutError:
            said.append(f"salloc did not end within {timeout_s:g} s")
        finally:
            await self._end()
        is_granted = self.granted.is_set() and self._process.returncode == 0
        return Outcome(is_granted, self.job_id, "; ".join(said) or f"salloc ended with code {self._process.returncode}")

    def withdraw(self) -> None:
        """The node is not wanted any more; salloc takes its job out of the queue, or gives it back."""
        self._is_unwanted = True
        self._signal(signal.SIGTERM)

    async def _listen(self, process: asyncio.subprocess.Process, said: list[str], limit: asyncio.Timeout) -> None:
        assert process.stderr is not None
        async for raw in process.stderr:
            line = raw.decode(errors="replace").strip()
            found = _JOB.search(line)
            if found:
                self.job_id = int(found[2])
                if found[1] == "Granted":
                    limit.reschedule(None)
                    self.granted.set()
                else:
                    self.was_pending = True
                    self._on_pending()
            elif "error:" in line or "revoked" in line:
                said.append(line.removeprefix("salloc: ").removeprefix("error: "))
                del said[:-_KEPT_LINES]
        await process.wait()

    async def _end(self) -> None:
        """Whatever happened: salloc and what it started are gone, first in an orderly way."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process is None or self._process.returncode is not None:
                return
            self.was_killed = number is signal.SIGKILL
            self._signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_TIMEOUT_S):
                    await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


def salloc_argv(
    job: JobInfo, takes_all_memory: bool, pool: str, time_left: str, avoid: Sequence[str], wait_s: float
) -> list[str]:
    """One node like those of `job`, for the rest of its time. time_left: as squeue's %L prints it. takes_all_memory: it
    asked for none, or for all (0), and a node from the pool may have a little less."""
    asked = {
        "nodes": "1", "ntasks": "1", "reservation": pool, "job-name": job_name(job.job_id),
        "comment": f"flashrec:spare-for={job.job_id}", "partition": job.partition, "account": job.account,
        "qos": job.qos, "time": time_left if _TIME_LEFT.fullmatch(time_left) else "", "exclude": ",".join(avoid),
        "immediate": str(max(1, math.ceil(wait_s))), **_size_of_a_node(job, takes_all_memory),
    }  # fmt: skip
    return ["salloc", "--no-shell", "--no-kill", *(f"--{key}={value}" for key, value in asked.items() if value)]


def job_name(job_id: int) -> str:
    """Name of every companion job of this job."""
    return f"flashrec-spare-{job_id}"


def salloc_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Without what describes our own job, or would add to our options; SLURM_CONF says where Slurm is."""
    ours = ("SLURM_", "SALLOC_", "SBATCH_")
    kept = {k: v for k, v in environ.items() if k == "SLURM_CONF" or not k.startswith(ours)}
    return {**plain_environment(kept), "FLASHREC_HANDED_OVER": "1"}


def _size_of_a_node(job: JobInfo, takes_all_memory: bool) -> dict[str, str]:
    """What the job has on each node: CPUs, memory, GRES. Nothing is asked for that Slurm does not count."""
    if not job.num_nodes:
        return {}
    size: dict[str, str] = {}
    if job.num_cpus:
        size["cpus-per-task"] = str(max(1, job.num_cpus // job.num_nodes))
    tres = dict(entry.partition("=")[::2] for entry in job.tres_requested.split(",") if "=" in entry)
    memory = re.fullmatch(r"([0-9.]+)([KMGT]?)", tres.get("mem", ""))
    if memory and takes_all_memory:
        size["mem"] = "0"
    elif memory:
        amount = float(memory[1]) - (0.01 if "." in memory[1] else 0)  # rounded: no more than the node has
        kib = amount * 1024 ** "KMGT".index(memory[2] or "M")
        size["mem"] = f"{max(1, int(kib / 1024 / job.num_nodes))}M"
    gres = _gres(job.tres_per_node) or _gres_of_all(tres, job.num_nodes)
    if gres:
        size["gres"] = gres
    return size


def _gres(tres_per_node: str) -> str:
    """'gres/gpu:a100:4' or 'gres:gpu:4' → 'gpu:a100:4'."""
    found = [re.sub(r"^gres[/:]", "", entry).replace("=", ":") for entry in tres_per_node.split(",")]
    return ",".join(entry for entry in found if re.fullmatch(r"[A-Za-z0-9_.:/-]+", entry))


def _gres_of_all(tres: Mapping[str, str], num_nodes: int) -> str:
    """From what the whole job has, when it asked per task or per job. A count with a type says all about that name."""
    counts = {key.removeprefix("gres/"): int(n) for key, n in tres.items() if key.startswith("gres/") and n.isdigit()}
    typed = {name.partition(":")[0] for name in counts if ":" in name}
    return ",".join(
        f"{name}:{count // num_nodes}"
        for name, count in counts.items()
        if count >= num_nodes and (":" in name or name not in typed)
    )
