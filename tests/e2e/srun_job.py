"""Jobs whose user typed `srun --flashrecovery`: in a batch script, in salloc, on a login node, or only at sbatch.

The journal's place, and how patient the manager is, are in a config file that SPEC names.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import yaml

from flashrec.devcluster.cluster import DevCluster
from flashrec.testing import Fault, FaultDirectory, FaultPlan
from flashrec.testing.jobs import Journal, SubmittedJob, path_with
from tests.e2e.support import SMALL, TRAIN, assert_at_most_one_step_redone, assert_identical
from tests.support.people import Person

How = Literal["sbatch", "salloc", "bare", "sbatch's option"]
ACTIVE, SPARES, STEPS = 3, 1, 12


class SrunJob:
    """Starts at once; `finish` compares it with an undisturbed one. Everything is in `folder`, also what it printed."""

    def __init__(
        self, cluster: DevCluster, folder: Path, how: How, faults: Sequence[Fault], person: Person, user: str | None
    ) -> None:
        folder.mkdir()
        self.folder, self.out, self.job_dir = folder, folder / "out", folder / "job"
        self._cluster, self._user = cluster, user
        self.journal = Journal(self.job_dir)
        self.faults = FaultDirectory(folder / "faults")
        self.plan = FaultPlan(str(self.faults.path), tuple(faults), timeout_s=200)
        (folder / "c.yaml").write_text(
            yaml.safe_dump({"job_dir": str(self.job_dir), "recovery": {"agent_retry_s": 1, "spare_wait_s": 20}})
        )
        self.spec = f"spares={SPARES},config={folder}/c.yaml"
        self.env = {**person.env, "PATH": path_with(commands(folder, person))}
        train = [
            person.python, "-m", "flashrec.testing.inject", str(self.faults.write_plan(self.plan)), "--", str(TRAIN),
            "--steps", str(STEPS), "--out", str(self.out), *SMALL,
        ]  # fmt: skip
        for made in (folder, *folder.rglob("*/")):  # the user may not be us
            made.chmod(0o777)
        self._output = folder / "output"
        self._submitted: SubmittedJob | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._start(how, train)

    def _start(self, how: How, train: list[str]) -> None:
        option = f"--flashrecovery={self.spec}"
        allocation = ["--no-kill", f"--nodes={ACTIVE + SPARES}", "--ntasks-per-node=1"]
        match how:
            case "bare":
                self._run(["srun", f"-N{ACTIVE}", option, *train])
            case "salloc":
                self._run(["salloc", *allocation, "srun", f"-N{ACTIVE}", option, *train])
            case "sbatch":
                self._submit([], ["srun", option, *train], allocation)
            case "sbatch's option":
                self._submit([option], ["srun", *train], allocation)

    def _run(self, argv: list[str]) -> None:
        with self._output.open("wb") as output:
            self._process = self._cluster.popen(
                argv,
                cwd=self.folder,
                env=self.env,
                user=self._user,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def _submit(self, options: list[str], command: list[str], allocation: list[str]) -> None:
        script = self.folder / "job.sh"
        script.write_text(f"#!/bin/bash\n#SBATCH {' '.join(allocation)}\n{shlex.join(command)}\n")
        assert self._user is None, "sbatch as somebody else: not needed yet"
        self._submitted = SubmittedJob(self._cluster.run, self.folder, [*options, str(script)], self.env)
        self._output = self._submitted.output

    def output(self) -> str:
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def cut_power(self, fault_id: str) -> str:
        """Of the node where the victim of this fault waits. Returns the node."""
        armed = self.faults.await_armed(fault_id, 150)
        self.faults.mark_fired(fault_id, self._cluster.cut_power(armed.node))
        return armed.node

    def finish(self, undisturbed: Path | None, recoveries: int = 0) -> None:
        """None: this is the undisturbed one."""
        code = self._wait(300)
        assert code == 0, self.output()[-4000:]
        self.faults.assert_all_fired(self.plan)
        if undisturbed is not None:
            assert_identical(undisturbed, self.out)
            assert_at_most_one_step_redone(self.job_dir, recoveries)

    def _wait(self, timeout_s: float) -> int:
        if self._submitted is not None:
            self._submitted.wait(timeout_s)
            return self._submitted.exit_code()
        assert self._process is not None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not over after {timeout_s:g} s:\n{self.output()[-4000:]}") from None

    def close(self) -> None:
        """Whatever happened, it ends here."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._cluster.run(["scancel", "--user=root,nobody"], check=False)


def commands(folder: Path, person: Person) -> Path:
    """A folder for PATH in which `flashrec` and `python` are what this user can run."""
    made = folder / "bin"
    made.mkdir(exist_ok=True)
    for name, words in (("flashrec", "-m flashrec.cli.main "), ("python", "")):
        (made / name).write_text(f'#!/bin/sh\nexec {person.python} {words}"$@"\n')
        (made / name).chmod(0o755)
    return made
