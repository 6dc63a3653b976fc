"""One training job on a dev cluster, to be hit again and again: it recovers, its lost node is healed, it is hit again.

The job is an ordinary one: `flashrec run` from a batch script, `examples/gpt/train.py` over gloo on the fabric. What is
known about it comes from its journal, its status file and Slurm.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.detection.orders import Orders
from benchmarks.detection.reading import JournalTail, event_of
from flashrec.devcluster.cluster import DevCluster
from flashrec.testing import FaultDirectory
from flashrec.testing.jobs import FINAL_STATES, SubmittedJob, path_with

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "examples/gpt/train.py"
SMALL = "--dim 32 --context 32 --batch 2 --bucket-mb 0.02"
NUM_NODES, NUM_RANKS = 5, 2  # the batch host is the last spare, so two of the three idle nodes come before it
FOR_EVER = 10**7  # steps
SETTLED_STEPS = 10  # after a recovery, before the next fault
POLL_S = 0.02
# A benchmark's node fails more often than a real one, and is asked sooner to come back.
SETTINGS = (
    "recovery.agent_retry_s=1", "recovery.max_in_place=1000000", "output.follow=none", "fabric.interface=fab0",
    "hot.park=none",
)  # fmt: skip


class JobTrouble(RuntimeError):
    """The job is not what it should be; the message says what, and where its output is."""


class BenchJob:
    """A context manager: submitted on entry, cancelled and gone from Slurm on exit."""

    def __init__(
        self, cluster: DevCluster, folder: Path, *, settings: tuple[str, ...] = (), env: Mapping[str, str] | None = None
    ) -> None:
        self.cluster, self.folder = cluster, folder
        folder.mkdir(parents=True)
        self.faults = FaultDirectory(folder / "faults")
        self.orders = Orders(self.faults)
        options = " ".join(f"--set {setting}" for setting in (*SETTINGS, *settings))
        script = folder / "job.sh"
        script.write_text(
            f"#!/bin/bash\n#SBATCH --nodes={NUM_NODES}\n#SBATCH --ntasks-per-node=1\n#SBATCH --no-kill\n"
            f"#SBATCH --no-requeue\nflashrec run --spares {NUM_NODES - NUM_RANKS} {options} -- "
            f"python -m benchmarks.detection.orders {self.faults.path} -- {TRAIN} --steps {FOR_EVER} {SMALL}\n"
        )
        wanted = {
            "PATH": path_with(Path(sys.executable).parent),
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": "fab0",
            **(env or {}),
        }
        self._submitted = SubmittedJob(cluster.run, folder, [str(script)], wanted)
        self.journal_path = self._submitted.job_dir / "journal.jsonl"
        self.tail = JournalTail(self.journal_path)
        self.step_s = 0.0
        self._checked_at = 0.0

    def __enter__(self) -> BenchJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.run(["scancel", str(self._submitted.id)], check=False)
        deadline = time.monotonic() + 180
        while self.cluster.run(["squeue", "--noheader"], check=False).stdout.strip() and time.monotonic() < deadline:
            time.sleep(0.2)

    # ---- looking

    def status(self) -> dict[str, Any]:
        """The job's own view, a second old at most; empty before there is one."""
        try:
            return json.loads((self._submitted.job_dir / "status.json").read_text())
        except FileNotFoundError:
            return {}

    def wait_for(self, condition: Callable[[], object], what: str, timeout_s: float) -> None:
        """Poll; raises JobTrouble when the time is over or the job is."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise JobTrouble(f"{what}: not within {timeout_s:g} s\n{self.output()}")
            self.assert_running()
            time.sleep(POLL_S)

    def assert_running(self) -> None:
        """Asks Slurm, every few seconds."""
        if time.monotonic() - self._checked_at < 5:
            return
        self._checked_at = time.monotonic()
        if (state := self._submitted.state()) in FINAL_STATES:
            raise JobTrouble(f"job {self._submitted.id} is {state}\n{self.output()}")

    def output(self) -> str:
        """The last lines that the job wrote."""
        path = self._submitted.output
        return f"{path}:\n" + path.read_text(errors="replace")[-1500:] if path.exists() else f"{path}: nothing yet"

    def await_settled(self, timeout_s: float = 180.0) -> None:
        """Until every node is in the job and alive, and every rank has done some steps since the last recovery."""
        began: dict[str, tuple[int, float]] = {}

        def is_settled() -> bool:
            time.sleep(0.1)
            status = self.status()
            phases = [line["to"] for line in self.tail.read() if line["kind"] == "phase"]
            nodes = [node for node in status.get("nodes", []) if node["state"] == "alive"]
            is_whole = len(nodes) == NUM_NODES and phases and phases[-1] == "RUNNING"
            steps = [rank["step"] for rank in status.get("ranks", [])]
            if not is_whole or None in steps or not steps or status["generation"] != self._generation():
                began.clear()
                return False
            first, at = began.setdefault("steps", (min(steps), time.monotonic()))
            done = min(steps) - first
            if done >= SETTLED_STEPS:
                self.step_s = (time.monotonic() - at) / done
            return done >= SETTLED_STEPS

        self.wait_for(is_settled, "the job to train on all its nodes, with every spare in place", timeout_s)

    def _generation(self) -> int:
        return max((line["generation"] for line in self.tail.lines if line["kind"] == "phase"), default=0)

    def assert_trains_over_fabric(self, node: str) -> None:
        """Raises JobTrouble if hardly a packet comes over fab0: heartbeats alone are a few a second."""
        before, at = self._received(node), time.monotonic()
        self.wait_for(
            lambda: self._received(node) - before > 50 + 20 * (time.monotonic() - at),
            f"training to use the fabric of {node}",
            30,
        )

    def _received(self, node: str) -> int:
        said = self.cluster.run(["ip", "-s", "-j", "link", "show", "fab0"], node=node).stdout
        return int(json.loads(said)[0]["stats64"]["rx"]["packets"])

    def node_of(self, rank: int) -> str:
        return next(each["node"] for each in self.status()["ranks"] if each["rank"] == rank)

    def batch_host(self) -> str:
        """Where the manager runs: the last in order of preference."""
        (note,) = [line for line in self.tail.read() if line.get("what") == "job started"]
        return str(note["nodes"][-1])

    def a_rank(self, number: int) -> int:
        """The `number`-th victim: ranks take turns, and the manager's node is spared."""
        ranks = [rank for rank in range(NUM_RANKS) if self.node_of(rank) != self.batch_host()]
        if not ranks:
            raise JobTrouble("all ranks are on the batch host")
        return ranks[number % len(ranks)]

    def worker_pid(self, rank: int) -> int:
        """Of the newest worker of a rank, on this machine."""
        started = [e for line in self.tail.read() if (e := event_of(line, "WorkerStarted")) and e["rank"] == rank]
        inside = started[-1]["pid"]
        found = [out for out, number in self.cluster.processes(self.node_of(rank)).items() if number == inside]
        if not found:
            raise JobTrouble(f"no process {inside} on {self.node_of(rank)}, where rank {rank} should be")
        return found[0]

    def agent_pid(self, node: str) -> int:
        """Of the agent of a node, on this machine."""
        for pid in self.cluster.processes(node):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if b"flashrec.agent" in words and b"--manager" in words:
                return pid
        raise JobTrouble(f"no agent on {node}")


def commit() -> str:
    """The tree that is measured; '+' for one with changes."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
