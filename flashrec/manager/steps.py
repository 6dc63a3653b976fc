"""Job steps: how agents and workers are started. Two launchers with one interface: Slurm's srun, or plain processes
on this machine (`flashrec run --local`, for a laptop and for tests).

A step says when it has ended and what it printed; it is never trusted for how a rank ended (agents see that).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from flashrec.config.schema import Hot
from flashrec.core.types import Assignment
from flashrec.transport.paths import NODE_NAME, exit_socket_path, socket_directory

_KEPT_BYTES = 4000


class StepEnd(msgspec.Struct, frozen=True):
    """code: the exit code of srun (local: the worst of the processes); said: the end of what it printed."""

    code: int
    said: str


class Step:
    """A running job step: one process of ours (srun), or several (local). nodes: whose loss makes srun dangerous."""

    def __init__(
        self,
        name: str,
        log: Path,
        nodes: Collection[str],
        argvs: Sequence[Sequence[str]],
        envs: Sequence[Mapping[str, str]],
    ) -> None:
        self.name, self.log, self.nodes = name, log, frozenset(nodes)
        self._argvs, self._envs = argvs, envs
        self._processes: list[asyncio.subprocess.Process] = []
        self._log_start = 0  # what an earlier try has printed into the same file is not ours
        self.is_forced = False  # ended by us: its exit code says nothing about its tasks

    async def start(self) -> None:
        """Start the processes, all or none. Raises OSError if there is no such command or no room for it."""
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            try:
                for argv, env in zip(self._argvs, self._envs, strict=True):
                    self._processes.append(
                        await asyncio.create_subprocess_exec(
                            *argv, env=dict(env), stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                            start_new_session=True,
                        )
                    )  # fmt: skip
            except OSError:
                self.terminate(hard=True)
                raise

    async def wait(self) -> StepEnd:
        """Wait for the end of all processes."""
        codes = [await process.wait() for process in self._processes]
        worst = max((code if code >= 0 else 128 - code for code in codes), default=0)
        return StepEnd(worst, _tail(self.log, self._log_start))

    def abandon(self) -> None:
        """Let the tasks of the step go on without their srun. Must be done when a node of the step is lost.

        Should that node come back before Slurm marks it DOWN, srun would kill the tasks on all nodes, --no-kill or not
        ("io error and missing step on node"). srun has a child that ends the step when srun dies, so it goes first.
        """
        self.is_forced = True
        for process in self._processes:
            if process.returncode is None:
                for pid in [*_children(process.pid), process.pid]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def terminate(self, *, hard: bool = False) -> None:
        """Ask srun to end the step (hard: end it now). Harmless if it has ended."""
        self.is_forced = True
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                if process.returncode is None:
                    process.kill() if hard else process.terminate()


def abandon_steps(steps: Iterable[Step], node: str) -> None:
    """`node` is lost: see `Step.abandon`."""
    for step in steps:
        if node in step.nodes:
            step.abandon()


async def end_steps(steps: Sequence[Step], waits: Collection[asyncio.Future[Any]], timeout_s: float) -> None:
    """Wait for the end of steps: by themselves, then through srun, then by force. timeout_s: for each of the three."""
    for hard in (None, False, True):
        if hard is not None:
            for step in steps:
                step.terminate(hard=hard)
        if not waits or not (await asyncio.wait(list(waits), timeout=timeout_s))[1]:
            return


class Parked(msgspec.Struct, frozen=True):
    """How far tasks that are parked go. num_flags: words of the command that are python's. how: hot.park. cuda: with a
    CUDA context."""

    num_flags: int
    how: str
    settings: Hot
    cuda: bool = False

    def options(self) -> list[str]:
        """For the launcher of a task."""
        return [
            "--park", self.how, "--flags", str(self.num_flags), "--import", ",".join(self.settings.imports),
            "--memory-mb", str(self.settings.memory_mb), *(["--cuda"] if self.cuda else []),
        ]  # fmt: skip


class Launcher(Protocol):
    """Builds steps; whoever asked for one starts it and waits for its end."""

    def agents(self, nodes: Sequence[str], launch: int) -> Step: ...

    def workers(self, launch: int, placement: Mapping[str, Sequence[Assignment]]) -> Step: ...

    def parked(self, launch: int, nodes: Sequence[str], per_node: int, park: Parked) -> Step: ...

    def job_of(self, node: str) -> int:
        """The Slurm job that a node belongs to; the nodes of one step are all of the same."""


class Contact(msgspec.Struct, frozen=True):
    """What an agent or launcher is told on its command line: nothing secret, so it may be seen by `ps`."""

    manager: str
    key: str
    secret: Path
    reconnect_s: float
    tmp: str = ""  # where sockets are to be, if that can be on the node

    def agent_argv(self, launch: int) -> list[str]:
        return [
            sys.executable, "-m", "flashrec.agent", "--manager", self.manager, "--key", self.key,
            "--tmp", self.tmp, "--secret", str(self.secret), "--launch", str(launch),
            "--reconnect", str(self.reconnect_s),
        ]  # fmt: skip

    def worker_argv(self, launch: int, command: Sequence[str], options: Sequence[str] = ()) -> list[str]:
        return [
            sys.executable, "-m", "flashrec.agent.launch", "--exit-socket", str(self._exit_socket()), "--key", self.key,
            "--tmp", self.tmp, "--secret", str(self.secret), "--launch", str(launch), *options, "--", *command,
        ]  # fmt: skip

    def _exit_socket(self) -> Path:
        """For Slurm's plugin, on all nodes at once."""
        return exit_socket_path(socket_directory(self.key, self.tmp) / f"{NODE_NAME}.sock")


class LocalLauncher:
    """Nodes are names; their processes all run here. For trying recovery without Slurm."""

    def __init__(self, contact: Contact, command: Sequence[str], logs: Path) -> None:
        self._contact, self._command, self._logs = contact, command, logs

    def agents(self, nodes: Sequence[str], launch: int) -> Step:
        argv = [*self._contact.agent_argv(launch), "--die-with-parent"]
        envs = [{**os.environ, "FLASHREC_NODE": node} for node in nodes]
        return Step(f"agents {launch}", self._logs / f"agents-{launch}.log", (), [argv] * len(nodes), envs)

    def workers(self, launch: int, placement: Mapping[str, Sequence[Assignment]]) -> Step:
        counts = {node: len(tasks) for node, tasks in placement.items()}
        return self._tasks(f"workers {launch}", f"step-{launch}.log", launch, counts, ())

    def parked(self, launch: int, nodes: Sequence[str], per_node: int, park: Parked) -> Step:
        counts = dict.fromkeys(nodes, per_node)
        return self._tasks(f"parked {launch}", f"parked-{launch}.log", launch, counts, park.options())

    def _tasks(self, name: str, log: str, launch: int, counts: Mapping[str, int], options: Sequence[str]) -> Step:
        argv = self._contact.worker_argv(launch, self._command, options)
        envs = [
            {**os.environ, "FLASHREC_NODE": node, "SLURM_LOCALID": str(local_id)}
            for node, count in counts.items()
            for local_id in range(count)
        ]
        return Step(name, self._logs / log, (), [argv] * len(envs), envs)

    def job_of(self, node: str) -> int:
        return 0


class SlurmLauncher:
    """Every step is an srun in our allocation, or in the companion job of its node (`companion_of`; None: it has
    none). `--no-kill` is not inherited from the job, so each step says it."""

    def __init__(
        self, job_id: int, contact: Contact, command: Sequence[str], options: Sequence[str], logs: Path,
        companion_of: Callable[[str], int | None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._job_id, self._contact, self._command = job_id, contact, command
        self._options, self._logs, self._companion_of = options, logs, companion_of

    def job_of(self, node: str) -> int:
        return self._companion_of(node) or self._job_id

    def agents(self, nodes: Sequence[str], launch: int) -> Step:
        argv = [
            *self._srun(nodes, 1), "--job-name=flashrec-agent", "--cpus-per-task=1", "--cpu-bind=none", "--gres=none",
            "--export=ALL", f"--output={self._logs}/agent-%N.log", "--open-mode=append",
            *self._contact.agent_argv(launch),
        ]  # fmt: skip
        log = self._logs / f"agents-{launch}.log"
        return Step(f"agents {launch}", log, nodes, [argv], [agent_environment(os.environ)])

    def workers(self, launch: int, placement: Mapping[str, Sequence[Assignment]]) -> Step:
        per_node = {len(tasks) for tasks in placement.values()}
        if len(per_node) != 1:
            raise ValueError("one job step has the same number of tasks on each node")
        return self._tasks(f"workers {launch}", f"step-{launch}.log", launch, list(placement), per_node.pop(), ())

    def parked(self, launch: int, nodes: Sequence[str], per_node: int, park: Parked) -> Step:
        return self._tasks(f"parked {launch}", f"parked-{launch}.log", launch, nodes, per_node, park.options())

    def _tasks(
        self, name: str, log: str, launch: int, nodes: Sequence[str], per_node: int, options: Sequence[str]
    ) -> Step:
        argv = [
            *self._srun(nodes, per_node), *self._options,
            *self._contact.worker_argv(launch, self._command, options),
        ]  # fmt: skip
        return Step(name, self._logs / log, nodes, [argv], [worker_environment(os.environ)])

    def _srun(self, nodes: Sequence[str], per_node: int) -> list[str]:
        count = len(nodes)
        jobs = {self.job_of(node) for node in nodes}
        if len(jobs) != 1:
            raise ValueError("one job step is in one job")
        return [
            "srun", f"--jobid={jobs.pop()}", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--overlap",
            f"--nodes={count}-{count}", f"--ntasks={count * per_node}", f"--ntasks-per-node={per_node}",
            f"--nodelist={','.join(nodes)}", "--distribution=block", "--mem=0", "--mpi=none", "--input=none",
            "--unbuffered",
        ]  # fmt: skip


HANDED_OVER = {"FLASHREC_HANDED_OVER": "1"}  # no srun or salloc of ours is to be handed over to us again
_STALE = (
    "SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_NPROCS",
    "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_DISTRIBUTION", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_NODE",
    "SLURM_MEM_PER_GPU", "SLURM_EXACT", "SLURM_EXCLUSIVE", "SLURM_OVERLAP", "SLURM_KILL_BAD_EXIT", "SLURM_WAIT",
    "SLURM_NO_KILL", "SLURM_ARBITRARY_NODELIST", "SLURM_HOSTFILE", "SLURM_JOB_NAME", "SLURM_STEP_ID", "SLURM_STEPID",
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_MPI_TYPE", "SLURM_IMMEDIATE", "SLURM_BCAST",
    "SLURM_STDINMODE", "SLURM_STDOUTMODE", "SLURM_STDERRMODE", "SLURM_LABELIO",
)  # fmt: skip
_AGENT_ONLY = ("SLURM_CPUS_PER_TASK", "SLURM_CPU_BIND", "SLURM_GPUS", "SLURM_GRES", "SLURM_THREADS", "SLURM_HINT",
               "SLURM_TRES", "SLURM_NTASKS_PER", "SLURM_CORE", "SLURM_OPEN_MODE", "SLURM_EXPORT_ENV")  # fmt: skip


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The batch script's environment without what describes the allocation as it once was, or fights our options."""
    return {**{k: v for k, v in environ.items() if k not in _STALE}, **HANDED_OVER}


def agent_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """As for workers, and without what the user set for them: an agent needs one CPU and no GPU."""
    return {k: v for k, v in worker_environment(environ).items() if not k.startswith(_AGENT_ONLY)}


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _tail(path: Path, start: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(start, file.tell() - _KEPT_BYTES))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""
