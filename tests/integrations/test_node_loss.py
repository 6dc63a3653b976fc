"""Each integration loses a node in the middle of a step and ends with the numbers of a run that has lost nothing.

Two nodes with ranks, one spare. The node of the last ranks goes with its agent while they stand before their vote, so
that the others have to do the step again; the spare takes over. Then comes a loss after the update, where the others
keep the step.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from flashrec.testing import Fault
from tests.e2e.support import ROOT, LocalJob, assert_at_most_one_step_redone, assert_identical, kill_node, report_of

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

OBSERVE = ROOT / "tests/integrations/observe.py"


@dataclass(frozen=True)
class Example:
    """One folder of examples/. lost: step in which a node goes; killed: step after whose update rank 0 does."""

    name: str
    arguments: tuple[str, ...] = ("--steps", "9")
    per_node: int = 1
    needs: tuple[str, ...] = ()
    lost: int = 3
    killed: int = 6

    @property
    def lost_ranks(self) -> list[int]:
        return list(range(self.per_node, 2 * self.per_node))


EXAMPLES = [
    Example("ddp"),
    Example("hsdp", per_node=2),
    Example("accelerate", needs=("accelerate", "transformers")),
    # three epochs of four batches: the node goes in the first, the process with the last batch of the second
    Example("lightning", ("--samples", "128", "--epochs", "3", "--nodes", "2"), needs=("lightning",), killed=7),
]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., LocalJob]]:
    jobs: list[LocalJob] = []

    def run(example: Example, faults: list[Fault]) -> LocalJob:
        folder = tmp_path / f"job{len(jobs)}"
        script = ROOT / "examples" / example.name / "train.py"
        train = [str(OBSERVE), str(folder / "out"), str(script), *example.arguments]
        jobs.append(
            LocalJob(
                folder, faults=faults, train=train, per_node=example.per_node, settings=["hangs.kill=false"]
            )  # a victim stands still until its fault is performed from outside
        )
        return jobs[-1]

    yield run
    for job in jobs:
        job.close()


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.name for example in EXAMPLES])
def test_a_node_is_lost_and_every_number_is_the_same(example: Example, start: Callable[..., LocalJob]) -> None:
    missing = [name for name in example.needs if importlib.util.find_spec(name) is None]
    assert not missing, f"{', '.join(missing)} is not installed: make integrations"
    first = example.lost_ranks[0]
    lost = Fault("node", rank=first, place="before-vote", kind="request", step=example.lost)
    killed = Fault("rank", rank=0, place="after-optimizer", kind="SIGKILL", step=example.killed)
    job, undisturbed = start(example, [lost, killed]), start(example, [])
    job.journal.wait_for(
        lambda: (job.faults.path / "node.armed").exists() or job.process.poll() is not None, "a victim", 240
    )
    assert job.process.poll() is None, job.output()[-4000:]
    agent, *workers = [job.agent_pid("local1"), *map(job.worker_pid, example.lost_ranks)]
    kill_node(agent, workers)
    job.faults.mark_fired("node", time.monotonic())
    assert undisturbed.wait(240) == 0, undisturbed.output()[-4000:]
    assert job.wait(240) == 0, job.output()[-4000:]
    job.faults.assert_all_fired(job.plan)
    assert_identical(undisturbed.out, job.out)
    assert_at_most_one_step_redone(job.job_dir, recoveries=2)
    node, process = report_of(job.job_dir)["recoveries"]
    ranks = ", ".join(map(str, example.lost_ranks))
    assert node["launched"] == [f"rank{'s' if len(example.lost_ranks) > 1 else ''} {ranks} on local2"]
    assert (node["resume_step"], node["steps_redone"]) == (example.lost, 1)
    assert process["resume_step"] == example.killed + 1, "the update of the lost rank counts"
