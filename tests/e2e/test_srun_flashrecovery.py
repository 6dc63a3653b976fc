"""`srun --flashrecovery` with the real plugin: wherever it is typed, the job survives a power cut, same numbers.

Where the batch script or salloc runs on a node of the job is Slurm's choice; the victim is never that one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashrec.devcluster.cluster import DevCluster
from flashrec.testing import Fault
from flashrec.testing.jobs import Journal, SubmittedJob, path_with
from tests.e2e.srun_job import STEPS, How, SrunJob, commands
from tests.e2e.support import SMALL, TRAIN, assert_identical, assert_no_process
from tests.support.cluster import await_no_jobs, dev_cluster, free_all, wait_for
from tests.support.people import Person, unprivileged
from tests.support.plugin import build_plugin

pytestmark = [pytest.mark.devcluster, pytest.mark.torch, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "sbatch_templates/srun.sbatch"
ME = Person("root", sys.executable, {})
CUT = Fault("cut", rank=1, place="backward", kind="request", step=4)
KILLS = tuple(Fault(f"kill{step}", rank=2, place="backward", kind="SIGKILL", step=step) for step in (6, 8, 10))
Start = Callable[..., SrunJob]


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    """`flashrec` is found in the user's PATH: plugstack.conf does not say where it is."""
    with dev_cluster(num_nodes=5, slurmd_timeout_s=3600, plugstack=(f"optional {build_plugin()}",)) as cluster:
        yield cluster


@pytest.fixture
def srun_job(cluster: DevCluster, folder: Path, request: pytest.FixtureRequest) -> Iterator[Start]:
    jobs: list[SrunJob] = []

    def start(how: How, faults: tuple[Fault, ...], person: Person = ME, user: str | None = None) -> SrunJob:
        name = re.sub(r"\W+", "-", request.node.name) + f"-{len(jobs)}"
        jobs.append(SrunJob(cluster, folder / name, how, faults, person, user))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()
    free_all(cluster)


def reasons(journal: Journal) -> list[str]:
    return [event["reason"] for event in journal.events("WorkerExited")]


@pytest.mark.parametrize("how", ["salloc", "bare", "sbatch's option"])
def test_a_power_cut(how: How, srun_job: Start, undisturbed_job) -> None:
    job = srun_job(how, (CUT,))
    job.cut_power("cut")
    job.finish(undisturbed_job(3, STEPS), recoveries=1)
    assert "salloc: Granted job allocation" in job.output() or "sbatch" in how
    assert_no_process(str(job.job_dir / "secret"))


def test_a_power_cut_and_killed_ranks_whose_end_slurm_tells(srun_job: Start, undisturbed_job) -> None:
    """One status may be late on a busy machine and is not waited for; not three."""
    job = srun_job("sbatch", (CUT, *KILLS))
    job.cut_power("cut")
    job.finish(undisturbed_job(3, STEPS), recoveries=1 + len(KILLS))
    told = [reason for reason in reasons(job.journal) if "was killed by signal 9 (SIGKILL)" in reason]
    assert told, reasons(job.journal)


def test_an_unprivileged_user_on_a_login_node(srun_job: Start) -> None:
    """Compared with a job of their own: their Python may be another one, and its files are what the example reads."""
    undisturbed = srun_job("bare", (), unprivileged(), "nobody")
    undisturbed.finish(None)
    job = srun_job("bare", (CUT, *KILLS[:1]), unprivileged(), "nobody")
    job.cut_power("cut")
    job.finish(undisturbed.out, recoveries=2)
    assert job.job_dir.stat().st_uid != 0


def test_the_template(cluster: DevCluster, folder: Path, undisturbed_job) -> None:
    """As it comes, with another number of nodes; it runs and ends with the script's exit code."""
    env = {"PATH": path_with(commands(folder, ME))}
    options = ["--nodes=3", "--ntasks-per-node=1", str(TEMPLATE), str(TRAIN), "--steps", "3"]
    job = SubmittedJob(cluster.run, folder / "template", [*options, "--out", str(folder / "t"), *SMALL], env)
    job.wait(200)
    output = job.output.read_text()
    assert job.exit_code() == 0, output[-3000:]
    assert "flashrec: 2 ranks on 2 nodes, 1 spare" in output
    assert_identical(undisturbed_job(2, 3), folder / "t")
    await_no_jobs(cluster)


class TestOnALoginNode:
    """Small commands without torch, on nodes that all have power."""

    @pytest.fixture
    def run(self, cluster: DevCluster, folder: Path) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
        def run(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
            path = {"PATH": path_with(commands(folder, ME))}
            return cluster.run(list(argv), cwd=folder, env=path | env, check=False, timeout_s=120)

        yield run
        await_no_jobs(cluster)

    def test_the_exit_code_comes_through_salloc(self, run) -> None:
        done = run("srun", "-N2", "--flashrecovery=spares=1", "sh", "-c", "echo $RANK/$WORLD_SIZE; exit 3")
        assert done.returncode == 3, done.stderr
        assert sorted(done.stdout.splitlines()) == ["[rank 0] 0/2", "[rank 1] 1/2"]
        assert "salloc --no-kill --kill-command=TERM --nodes=3 --ntasks-per-node=1 --job-name=sh" in done.stderr
        assert "--no-kill" not in done.stderr.replace("salloc --no-kill", ""), "no warning about --no-kill"

    @pytest.mark.parametrize("how", ["option", "environment"])
    def test_without_any_environment(self, how: str, run) -> None:
        script = "echo $RANK of $WORLD_SIZE ${FROM_OUTSIDE:-bare} $FLASHREC_HANDED_OVER"
        option, env = (["--export=NONE"], {}) if how == "option" else ([], {"SLURM_EXPORT_ENV": "NONE"})
        done = run(
            "srun", "-N2", *option, "--flashrecovery=spares=0", "/bin/sh", "-c", script,
            **env, FROM_OUTSIDE="full", TMPDIR="/var/tmp",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == ["[rank 0] 0 of 2 bare 1", "[rank 1] 1 of 2 bare 1"]

    def test_options_as_users_type_them(self, run, folder: Path) -> None:
        done = run(
            "srun", "-N", "2", "-n4", "-t5", "-l", "-Jhello", "-K", "-o", "out-%t.txt", "-e", "err", "--mem=10",
            "--flashrecovery=spares=0", "sh", "-c", "echo $RANK $LOCAL_RANK $SLURM_JOB_NAME",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        found = [(folder / f"out-{rank}.txt").read_text() for rank in range(4)]
        assert found == [f"[rank {rank}] {rank} {rank % 2} hello\n" for rank in range(4)]
        assert "--kill-on-bad-exit is left out" in done.stderr and "--error is left out" in done.stderr

    def test_an_srun_inside_a_rank_is_an_ordinary_one(self, run) -> None:
        inner = "srun --overlap -N1 -n1 sh -c 'echo inner $SLURM_STEP_ID $RANK'"
        done = run("srun", "-N2", "--flashrecovery=spares=0", "sh", "-c", f"test $RANK = 1 || {inner}")
        assert done.returncode == 0, done.stderr
        (line,) = done.stdout.splitlines()
        assert re.fullmatch(r"\[rank 0\] inner \d+ 0", line)

    def test_ctrl_c_ends_the_job_and_the_allocation(self, run, cluster: DevCluster) -> None:
        command = ["srun", "-N2", "--flashrecovery=spares=1", "sh", "-c", "echo up; exec sleep 9753"]
        done = run(sys.executable, str(Path(__file__).with_name("terminal.py")), "[rank 1] up", *command)
        assert done.stdout.splitlines()[-1] == "exit code 130", done.stdout
        await_no_jobs(cluster)
        assert_no_process("sleep 9753")

    def test_a_cancelled_job_ends_at_once(self, run, cluster: DevCluster, folder: Path) -> None:
        env = {"PATH": path_with(commands(folder, ME))}
        argv = ["srun", "-N2", "--flashrecovery=spares=1", "sh", "-c", "exec sleep 9754"]
        with (folder / "cancelled").open("wb") as output:
            process = cluster.popen(argv, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            wait_for(lambda: "all ranks launched" in (folder / "cancelled").read_text(), "the ranks", 60)
            cluster.run(["scancel", "--user=root"])
            assert process.wait(25) != 0, "well before spare_wait_s"
        finally:
            process.kill()
        assert "interrupted by SIGTERM" in (folder / "cancelled").read_text()
        assert_no_process("sleep 9754")

    def test_spec_is_refused_before_anything_starts(self, run) -> None:
        done = run("srun", "-N2", "--flashrecovery=spares=many", "true")
        assert done.returncode != 0 and "spares=" in done.stderr and "max-swaps=" in done.stderr
        assert "salloc" not in done.stderr
