"""Watching a job from outside: its journal, its status, its output. For tests, demos and your own drills.

Everything is read from files and from Slurm's own commands; nothing here can influence the job.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

POLL_INTERVAL_S = 0.05
FINAL_STATES = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY")
Line = dict[str, Any]


class JobTimeout(TimeoutError):
    """Something that should have happened in a job did not; the message says what and where to look."""


class Journal:
    """The journal of a job while it grows. `lines()` is what has been written so far; a torn last line is left out."""

    def __init__(self, job_dir: Path) -> None:
        self.job_dir = job_dir

    def lines(self) -> list[Line]:
        try:
            text = (self.job_dir / "journal.jsonl").read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def events(self, kind: str) -> list[Line]:
        """All events of one type, e.g. 'AgentJoined', as they were told to the core (with mono)."""
        return [
            x["event"] | {"mono": x["mono"]}
            for x in self.lines()
            if x["kind"] == "event" and x["event"]["type"] == kind
        ]

    def phases(self) -> list[tuple[str, str, int]]:
        """(from, to, generation) of each move of the recovery machine."""
        return [(x["from"], x["to"], x["generation"]) for x in self.lines() if x["kind"] == "phase"]

    def resumes(self) -> int:
        """How often training has resumed after a failure."""
        return max(0, sum(after == "RUNNING" for _, after, _ in self.phases()) - 1)

    def wait_for(self, condition: Callable[[], object], what: str, timeout_s: float) -> None:
        """Poll until `condition`; raises JobTimeout, with the journal's last lines."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                tail = "\n".join(json.dumps(line)[:300] for line in self.lines()[-8:])
                raise JobTimeout(f"{what}: not within {timeout_s:g} s ({self.job_dir})\n{tail}")
            time.sleep(POLL_INTERVAL_S)


class RunCommand(Protocol):
    """Runs a command where Slurm's commands work, like `flashrec.devcluster.cluster.DevCluster.run`."""

    def __call__(
        self, argv: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]: ...


class SubmittedJob:
    """One `sbatch`; its output and job directory are in `folder`. sbatch_args: options, the script, its arguments."""

    def __init__(
        self, run: RunCommand, folder: Path, sbatch_args: Sequence[str], env: Mapping[str, str] | None = None
    ) -> None:
        self._run, self.folder = run, folder
        folder.mkdir(parents=True, exist_ok=True)
        done = run(["sbatch", "--parsable", "--output=slurm-%j.out", *sbatch_args], cwd=folder, env=env)
        self.id = int(done.stdout.strip().split(";")[0])
        self.output = folder / f"slurm-{self.id}.out"
        self.job_dir = folder / f"flashrec-{self.id}"
        self.journal = Journal(self.job_dir)
        self._shown = 0

    def new_output(self) -> list[str]:
        """Lines the job has written since the last call."""
        if not self.output.exists():
            return []
        with self.output.open() as file:
            file.seek(self._shown)
            text = file.read()
            self._shown = file.tell()
        return text.splitlines()

    def state(self) -> str:
        """Slurm's state of the job; 'UNKNOWN' if Slurm cannot be asked."""
        done = self._run(["scontrol", "--oneliner", "show", "job", str(self.id)], check=False)
        found = [word for word in done.stdout.split() if word.startswith("JobState=")]
        return found[0].partition("=")[2] if found else "UNKNOWN"

    def exit_code(self) -> int:
        """Exit code of the batch script, as Slurm recorded it."""
        done = self._run(["scontrol", "--oneliner", "show", "job", str(self.id)])
        found = next(word for word in done.stdout.split() if word.startswith("ExitCode="))
        return int(found.partition("=")[2].split(":")[0])

    def wait(self, timeout_s: float, show: Callable[[str], None] | None = None) -> str:
        """Wait until the batch script has ended; return Slurm's state then. `show` gets each new line of its output.

        COMPLETING counts: Slurm holds a job there until a lost node has answered or timed out.
        """
        deadline = time.monotonic() + timeout_s
        while (state := self.state()) not in (*FINAL_STATES, "COMPLETING"):
            if time.monotonic() > deadline:
                raise JobTimeout(f"job {self.id} is still {state} after {timeout_s:g} s; see {self.folder}")
            for line in self.new_output():
                if show:
                    show(line)
            time.sleep(4 * POLL_INTERVAL_S)
        for line in self.new_output():
            if show:
                show(line)
        return state


def path_with(directory: Path) -> str:
    """PATH with `directory` (the virtual environment's bin) in front."""
    return f"{directory}:{os.environ.get('PATH', '/usr/bin:/bin')}"
