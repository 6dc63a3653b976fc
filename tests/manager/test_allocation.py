"""The allocation: what can be known about --no-kill, what cannot survive, and what Slurm's words mean for us."""

from __future__ import annotations

import asyncio

import pytest

from flashrec.manager.allocation import inspect_allocation, no_kill_warnings, script_has_no_kill, unsurvivable
from flashrec.manager.request import RequestError
from flashrec.slurm.scheduler import JobPlace, SlurmError, SlurmUnavailable

SCRIPTS = {
    "#!/bin/bash\n#SBATCH --no-kill\n": True,
    "#!/bin/bash\n#SBATCH -k\n": True,
    "#!/bin/bash\n#SBATCH --nodes=4 --no-kill --time=1\n": True,
    "#!/bin/bash\n#SBATCH -N4 -k # survive\n": True,
    "#!/bin/bash\n# text\n\n#SBATCH\t--no-kill\n": True,
    "#!/bin/bash\n#SBATCH --no-kill=off\n": False,
    "#!/bin/bash\n#SBATCH --comment=a # --no-kill\n": False,
    "#!/bin/bash\n##SBATCH --no-kill\n": False,
    "#!/bin/bash\n# SBATCH --no-kill\n": False,
    "#!/bin/bash\n  #SBATCH --no-kill\n": False,
    "#!/bin/bash\ntrue\n#SBATCH --no-kill\n": False,
    "#!/bin/bash\n#SBATCH --no-kill-me\n": False,
    "#!/bin/bash\n#SBATCH --kill-on-invalid-dep=no\n": False,
    "#!/bin/bash\nsbatch --no-kill x\n": False,
    "": False,
}


@pytest.mark.parametrize(("script", "has"), SCRIPTS.items())
def test_a_script_with_no_kill(script: str, has: bool) -> None:
    assert script_has_no_kill(script) is has


@pytest.mark.parametrize("name", ["FLASHREC_NO_KILL", "SBATCH_NO_KILL", "SALLOC_NO_KILL", "SLURM_NO_KILL"])
def test_markers_are_believed(name: str) -> None:
    assert no_kill_warnings(None, {name: "1"}) == ()
    for not_said in ("", "no"):
        assert len(no_kill_warnings(None, {name: not_said})) == 1


def test_the_submit_line_decides_when_the_script_does_not() -> None:
    for line in ("sbatch -k x", "sbatch --no-kill x", "sbatch -N5 --no-kill=set x"):
        assert len(no_kill_warnings("", {"FLASHREC_SUBMIT_LINE": line})) == 1, "not known to be missing"
    for line in ("sbatch x", "sbatch --no-killer x", "sbatch job-k.sh"):
        with pytest.raises(RequestError, match="#SBATCH --no-kill"):
            no_kill_warnings("", {"FLASHREC_SUBMIT_LINE": line})
    assert no_kill_warnings("#SBATCH --no-kill\n", {"FLASHREC_SUBMIT_LINE": "sbatch x"}) == ()


def test_what_cannot_survive() -> None:
    assert "one node" in unsurvivable(1, {})
    assert unsurvivable(2, {}) == ""
    assert unsurvivable(2, {"SLURM_STEPMGR": "(null)"}) == ""
    assert "step manager on node n3" in unsurvivable(2, {"SLURM_STEPMGR": "n3"})


class FakeSlurm:
    def __init__(self, job: JobPlace | Exception, script: str | Exception | None = None) -> None:
        self._job, self._script = job, script

    async def job(self, job_id: int) -> JobPlace:
        if isinstance(self._job, Exception):
            raise self._job
        return self._job

    async def batch_script(self, job_id: int) -> str | None:
        if isinstance(self._script, Exception):
            raise self._script
        return self._script

    async def node_address(self, node: str) -> str:
        return "127.0.0.1"


def inspected(client: FakeSlurm, **environ: str):
    return asyncio.run(inspect_allocation(client, environ))  # type: ignore[arg-type]


JOB = JobPlace(7, "RUNNING", ("n1", "n2", "n3"), "n1")


def test_the_managers_node_is_the_last_and_the_stale_environment_is_not_believed() -> None:
    found = inspected(
        FakeSlurm(JOB, "#SBATCH -k\n"), SLURM_JOB_ID="7", SLURMD_NODENAME="n1", SLURM_JOB_NODELIST="n[1-9]"
    )
    assert (found.job_id, found.nodes, found.warnings) == (7, ("n2", "n3", "n1"), ())
    assert found.manager_address == "127.0.0.1"


def test_a_script_that_we_may_not_see_is_a_warning() -> None:
    for script in (None, SlurmUnavailable("controller away")):
        (warning,) = inspected(FakeSlurm(JOB, script), SLURM_JOB_ID="7").warnings
        assert "cannot tell" in warning


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (SlurmUnavailable("squeue did not answer"), "cannot be asked about job 7"),
        (SlurmError("Invalid job id"), "job 7: Invalid job id"),
        (JobPlace(7, "RUNNING", ("n1",), "n1"), "the allocation has one node"),
        (JobPlace(7, "PENDING", (), ""), "the allocation has"),
    ],
)
def test_an_allocation_that_cannot_be_used_is_refused(answer, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        inspected(FakeSlurm(answer), SLURM_JOB_ID="7")
    assert said in str(caught.value)


@pytest.mark.parametrize("number", ["", "x", "7_1", "-3"])
def test_outside_of_an_allocation_the_remedy_is_shown(number: str) -> None:
    with pytest.raises(RequestError, match="sbatch --nodes=5 --no-kill"):
        inspected(FakeSlurm(JOB), SLURM_JOB_ID=number)
