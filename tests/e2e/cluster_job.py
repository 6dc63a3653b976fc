"""A job on a dev cluster as tests run it: submitted with a fault plan, hit from outside, compared at the end."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from flashrec.devcluster.cluster import DevCluster
from flashrec.testing import Fault, FaultDirectory, FaultPlan
from flashrec.testing.jobs import FINAL_STATES, SubmittedJob, path_with
from tests.e2e.support import QUICK, SMALL, TRAIN, assert_at_most_one_step_redone, assert_identical
from tests.support.people import Person

PLACES = ("forward", "backward", "before-vote", "in-optimizer", "after-optimizer")


class NodeJob:
    """A submitted job with a fault plan; `hit` performs one planned fault on the node where its victim waits. train:
    another script than the example's, and its arguments but for --steps and --out."""

    _EXAMPLE = " ".join([str(TRAIN), *SMALL])

    def __init__(
        self, cluster: DevCluster, folder: Path, name: str, *, nodes: int, spares: int, steps: int,
        faults: Sequence[Fault] = (), settings: tuple[str, ...] = (), per_node: int = 1, options: str = "",
        person: Person | None = None, sbatch: tuple[str, ...] = (), train: str = "",
    ) -> None:  # fmt: skip
        self.cluster, self.folder, self.out = cluster, folder / name, folder / name / "out"
        self.folder.mkdir(parents=True)
        self.faults = FaultDirectory(self.folder / "faults")
        self.plan = FaultPlan(str(self.faults.path), tuple(faults), timeout_s=200)
        inject = f"-m flashrec.testing.inject {self.faults.write_plan(self.plan)} --" if faults else ""
        held = "--set hangs.kill=false"  # a victim stands still until its fault is performed from outside
        options = " ".join([*QUICK, held, *(f"--set {setting}" for setting in settings), options])
        python = person.python if person else "python"
        script = self.folder / "job.sh"
        script.write_text(
            f"#!/bin/bash\n#SBATCH --nodes={nodes}\n#SBATCH --ntasks-per-node={per_node}\n#SBATCH --no-kill\n"
            f"{python} -m flashrec.cli.main run --spares {spares} {options} -- "
            f"{python} {inject} {train or self._EXAMPLE} --steps {steps} --out {self.out}\n"
        )
        env = {"PATH": path_with(Path(sys.executable).parent)}
        run = cluster.run
        if person is not None:
            env, run = person.env, functools.partial(cluster.run, user=person.name)
            for place in (self.folder, *self.folder.rglob("*/")):
                place.chmod(0o777)
        self.submitted = SubmittedJob(run, self.folder, [*sbatch, str(script)], env)
        self.journal, self.job_dir = self.submitted.journal, self.submitted.job_dir

    def hit(self, fault_id: str, perform: Callable[[str], float]) -> str:
        """Wait for the victim, perform the fault on its node, record when. Returns the node."""
        self.journal.wait_for(
            lambda: (self.faults.path / f"{fault_id}.armed").exists() or self.submitted.state() in FINAL_STATES,
            f"a victim for fault {fault_id}", 120,
        )  # fmt: skip
        assert self.submitted.state() not in FINAL_STATES, self.submitted.output.read_text()[-4000:]
        armed = self.faults.await_armed(fault_id, 1)
        self.faults.mark_fired(fault_id, perform(armed.node))
        return armed.node

    @property
    def nodes(self) -> list[str]:
        """The job's nodes in order of preference: the first get the ranks, the last is the batch host."""
        (note,) = [line for line in self.journal.lines() if line.get("what") == "job started"]
        return list(note["nodes"])

    def await_spare(self, node: str, former: int) -> None:
        """Wait until `node` has joined again, after its life number `former`."""
        self.journal.wait_for(lambda: self.life(node) > former, f"node {node} returns as a spare", 60)

    def life(self, node: str) -> int:
        return max((e["incarnation"] for e in self.journal.events("AgentJoined") if e["node"] == node), default=0)

    def finish(self, undisturbed: Path | None, recoveries: int | None = None) -> None:
        self.submitted.wait(300)
        output = self.submitted.output.read_text()
        assert self.submitted.exit_code() == 0, output[-4000:]
        self.faults.assert_all_fired(self.plan)
        if undisturbed is not None:
            assert_identical(undisturbed, self.out)
            assert_at_most_one_step_redone(self.job_dir, recoveries)

    def close(self) -> None:
        self.cluster.run(["scancel", str(self.submitted.id)], check=False)
