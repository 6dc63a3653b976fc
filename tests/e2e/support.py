"""Whole jobs as tests run them: the example script under `flashrec run`, a fault plan, and the undisturbed run to
compare with. A run is only good if every fault of its plan fired, every number is the same and at most
one step was redone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashrec.testing import Fault, FaultDirectory, FaultPlan
from flashrec.testing.jobs import Journal

ROOT = Path(__file__).resolve().parents[2]
TRAIN, COMPARE = ROOT / "examples/gpt/train.py", ROOT / "examples/gpt/compare.py"
TEMPLATE = ROOT / "sbatch_templates/ddp.sbatch"
SMALL = ["--dim", "32", "--context", "32", "--batch", "2", "--bucket-mb", "0.02"]
FLASHREC = [sys.executable, "-m", "flashrec.cli.main"]
# Nothing is parked: tests of hot spares say so, and all others are tests of the ordinary launch.
QUICK = ["--set", "recovery.agent_retry_s=1", "--set", "recovery.spare_wait_s=20", "--set", "hot.park=none"]


class LocalJob:
    """`flashrec run --local` in a folder of its own. Always ended by `close` (a fixture does it)."""

    def __init__(
        self,
        folder: Path,
        *,
        faults: Sequence[Fault] = (),
        steps: int = 10,
        nodes: int = 3,
        spares: int = 1,
        settings: Sequence[str] = (),
        command: Sequence[str] | None = None,
        train: Sequence[str] = (),
        per_node: int = 2,
    ) -> None:
        """train: another script than the example's, and its arguments."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.out, self.job_dir = folder, folder / "out", folder / "job"
        self.faults = FaultDirectory(folder / "faults")
        self.plan = FaultPlan(str(self.faults.path), tuple(faults))
        inject = ["-m", "flashrec.testing.inject", str(self.faults.write_plan(self.plan)), "--"] if faults else []
        train = train or [str(TRAIN), "--steps", str(steps), "--out", str(self.out), *SMALL]
        script = command or [sys.executable, *inject, *train]
        options = [word for setting in settings for word in ("--set", setting)]
        argv = [
            *FLASHREC, "run", "--local", "--nodes", str(nodes), "--ntasks-per-node", str(per_node),
            "--spares", str(spares), "--job-dir", str(self.job_dir), *QUICK, *options, "--", *script,
        ]  # fmt: skip
        self.journal = Journal(self.job_dir)
        with (folder / "output").open("wb") as output:
            self.process = subprocess.Popen(argv, cwd=folder, stdout=output, stderr=output, start_new_session=True)

    def wait(self, timeout_s: float = 120.0) -> int:
        """Exit code of the job."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"job did not end within {timeout_s:g} s:\n{self.output()[-3000:]}") from None

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def worker_pid(self, rank: int) -> int:
        """Pid of the newest worker of a rank."""
        return [e["pid"] for e in self.journal.events("WorkerStarted") if e["rank"] == rank][-1]

    def agent_pid(self, node: str) -> int:
        """Pid of the agent of a node. Only agents are looked at: a worker's short-lived child may be gone by now."""
        for pid, line in processes_with(str(self.folder)).items():
            wanted = f"FLASHREC_NODE={node}\0".encode()
            if "flashrec.agent " in line and wanted in Path(f"/proc/{pid}/environ").read_bytes():
                return pid
        raise AssertionError(f"no agent of {node}")

    def close(self) -> None:
        """End the manager if it still runs; its agents end with it and end their workers."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def report_of(job_dir: Path) -> dict[str, Any]:
    """`flashrec report --json` of a job."""
    done = subprocess.run([*FLASHREC, "report", str(job_dir), "--json"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def assert_identical(left: Path, right: Path) -> None:
    """Losses of every step on every rank and the final digests are the same, bit by bit."""
    done = subprocess.run(
        [sys.executable, str(COMPARE), str(left), str(right)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def assert_at_most_one_step_redone(job_dir: Path, recoveries: int | None = None) -> None:
    report = report_of(job_dir)
    found = report["recoveries"]
    assert found, "no recovery in the journal"
    if recoveries is not None:
        assert len(found) == recoveries
    for recovery in found:
        assert recovery["outcome"] == "recovered", recovery
        assert recovery["steps_redone"] in (0, 1), recovery


def assert_no_step_redone(job_dir: Path, recoveries: int) -> None:
    """As above, for planned swaps: nobody was in the step at which training resumed."""
    found = report_of(job_dir)["recoveries"]
    assert [recovery["outcome"] for recovery in found] == ["recovered"] * recoveries, found
    assert [recovery["steps_redone"] for recovery in found] == [0] * recoveries, found


def resume_step(job_dir: Path) -> int:
    """Where the last recovery resumed."""
    return report_of(job_dir)["recoveries"][-1]["resume_step"]


def boundary_fences(journal: Journal) -> list[dict[str, Any]]:
    """Fences that asked all ranks to pause at the end of a step."""
    effects = [line["effect"] | {"mono": line["mono"]} for line in journal.lines() if line["kind"] == "effect"]
    return [effect for effect in effects if effect["type"] == "AnnounceFence" and effect.get("at_boundary")]


def kill_node(agent: int, workers: Sequence[int]) -> None:
    """The agent of a node and its workers die together."""
    os.kill(agent, signal.SIGKILL)
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):  # it may end first, as its agent is gone
            os.kill(worker, signal.SIGKILL)


def processes_with(text: str) -> dict[int, str]:
    """Every process on this machine (any PID namespace below us) whose command line contains `text`: pid -> line."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line and int(path.parent.name) != os.getpid():
            found[int(path.parent.name)] = line
    return found


def assert_no_process(text: str, timeout_s: float = 60.0) -> None:
    """Nothing whose command line contains `text` is left (bounded wait for the last ones to go)."""
    deadline = time.monotonic() + timeout_s
    while left := processes_with(text):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)
