"""A peer, and a job of it on a dev cluster: processes on nodes, or a Slurm job. Adapters build these."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from benchmarks.peers.job_size import EVERY, FAULT_AFTER, STEPS
from flashrec.devcluster.cluster import DevCluster
from flashrec.testing.jobs import FINAL_STATES, SubmittedJob, path_with

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / "build/venv-peers"  # of all peers but flashrec
FaultKind = Literal["process", "node"]


class JobTrouble(RuntimeError):
    """A job is not what it should be; the message has the end of its output."""


@dataclass(frozen=True)
class Cell:
    """One job to start. turns: as in training.py, for paired blocks; fault: what will be done to it."""

    cluster: DevCluster
    folder: Path
    steps: int = STEPS
    fault: FaultKind | None = None
    fault_after: int = FAULT_AFTER
    turns: str = ""
    block: int = 0

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def script(self, name: str, checkpoints: bool = False) -> list[str]:
        """`-m module options` for an interpreter."""
        words = ["-m", f"benchmarks.peers.scripts.{name}", "--out", str(self.out), "--steps", str(self.steps)]
        if self.turns:
            words += ["--turns", self.turns, "--block", str(self.block)]
        if checkpoints:
            folder = self.folder / "checkpoints"
            folder.mkdir(parents=True, exist_ok=True)
            words += ["--checkpoints", str(folder), "--every", str(EVERY)]
        return words


class Job:
    """Nothing yet; `close` ends whatever was started."""

    def settle(self) -> None:
        """Called once, when the first step has been done by all ranks."""

    def replace(self, node: str) -> None:
        """Called at once after the power of a node was cut: what an orchestrator of the site would do."""

    def trouble(self) -> str:
        """Why this job will not finish; empty as long as it may."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Processes(Job):
    """Started on nodes directly, no scheduler in between. `spares` are started by `settle`, `later` by `replace`."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._running: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}
        self._files: list[IO[bytes]] = []
        self.spares: Callable[[], None] = lambda: None
        self.later: Callable[[str], None] = lambda node: None
        cell.folder.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, argv: Sequence[str], node: str, env: Mapping[str, str] | None = None) -> None:
        path = self._cell.folder / f"{name}.log"
        log = path.open("ab")
        self._files.append(log)
        wanted = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **(env or {})}
        # A session of its own, as a Slurm task has: the kernel may share out the cores by session.
        popen = self._cell.cluster.popen(
            list(argv),
            node=node,
            cwd=self._cell.folder,
            env=wanted,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._running[name] = (popen, path)

    def settle(self) -> None:
        self.spares()

    def replace(self, node: str) -> None:
        self.later(node)

    def trouble(self) -> str:
        if any(process.poll() is None for process, _ in self._running.values()):
            return ""
        return "\n".join(f"{name} ended with {p.poll()}\n{tail(log)}" for name, (p, log) in self._running.items())

    def logs(self) -> str:
        return "\n".join(f"{name}:\n{tail(log)}" for name, (_, log) in self._running.items())

    def close(self) -> None:
        for process, _ in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        for file in self._files:
            file.close()


class Batch(Job):
    """A script for sbatch. `python`: whose bin comes first in PATH."""

    def __init__(self, cell: Cell, text: str, python: Path) -> None:
        cell.folder.mkdir(parents=True, exist_ok=True)
        script = cell.folder / "job.sh"
        script.write_text(text)
        wanted = {
            "PATH": path_with(python.parent), "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self._cluster = cell.cluster
        self.submitted = SubmittedJob(cell.cluster.run, cell.folder, [str(script)], wanted)

    def trouble(self) -> str:
        state = self.submitted.state()
        return f"job is {state}\n{tail(self.submitted.output)}" if state in FINAL_STATES else ""

    def logs(self) -> str:
        return f"job is {self.submitted.state()}\n{tail(self.submitted.output)}"

    def close(self) -> None:
        self._cluster.run(["scancel", str(self.submitted.id)], check=False)


def tail(path: Path) -> str:
    return path.read_text(errors="replace")[-2000:] if path.exists() else f"{path}: nothing"


@dataclass(frozen=True)
class Peer:
    """One row. package: whose version is stated; keeps: where the state is that comes back.
    conf: lines of slurm.conf, with {socket} for munge's. steps: of a run, where the peer needs more to show that it is
    whole again; fault_after: the step after which it is hit, where it needs longer to be ready."""

    name: str
    package: str
    keeps: Literal["memory", "checkpoint"]
    settings: str
    start: Callable[[Cell], Job]
    faults: tuple[FaultKind, ...] = ("process", "node")
    conf: tuple[str, ...] = ()
    slurmd_timeout_s: int = 3600
    steps: int = STEPS
    fault_after: int = FAULT_AFTER
    python: Path = VENV / "bin/python"


def own_python() -> Path:
    """The interpreter with flashrec: the one that runs this."""
    return Path(sys.executable)
