"""The health program as real slurmds run it: HealthCheckProgram, every few seconds, on every node.

One check, `flag`, fails on the nodes for which the test has put up a flag: the verdict is the test's, and all the
rest is real: slurmd, scontrol, the controller's reasons and states.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashrec.admin.health.reason import is_ours
from flashrec.devcluster.cluster import DevCluster
from tests.health.support import LAUNCHER, script, verdict
from tests.support.cluster import dev_cluster, is_gone, wait_for

pytestmark = pytest.mark.devcluster

FLASHREC = Path(sys.executable).with_name("flashrec")
INTERVAL_S = 2
NODES = ("n0", "n1", "n2", "n3")
WAIT_S = 120.0  # a busy machine


class Site:
    """A cluster whose nodes check themselves. Everything they read is in one folder, which root alone can write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster: DevCluster
        (folder / "checks").mkdir()
        (folder / "bin").mkdir()
        script(
            folder / "checks/flag",
            f"""if [ -e {folder}/hang-$FLASHREC_NODE ]; then trap '' TERM; sleep 600 & wait; sleep 600; fi
if [ -e {folder}/bad-$FLASHREC_NODE ]; then echo '{verdict("flag", "fail", "the flag is up")}'
else echo '{verdict("flag")}'; fi""",
        )
        self.program = script(
            folder / "program",
            f"export PATH={folder}/bin\nexec {LAUNCHER} --flashrec {FLASHREC} --log {folder}/log-$SLURMD_NODENAME"
            f" --config {folder}/conf-$SLURMD_NODENAME",
        )
        self.configure()

    def configure(self, *lines: str, flag: str = "* || flag", **settings: object) -> None:
        for node in NODES:
            chosen = {
                "check_dir": self.folder / "checks", "state_file": self.folder / f"state-{node}.json",
                "fail_runs": 2, "ok_runs": 2, "max_drained": len(NODES), "spread_s": 0.2, **settings,
            }  # fmt: skip
            text = [*(f"{key} = {value}" for key, value in chosen.items()), flag, *lines]
            beside = self.folder / "conf.new"
            beside.write_text("\n".join(text))
            beside.rename(self.folder / f"conf-{node}")

    def mark(self, what: str, *nodes: str, up: bool = True) -> None:
        for node in nodes:
            path = self.folder / f"{what}-{node}"
            if up:
                path.touch()
            else:
                path.unlink(missing_ok=True)

    def log(self, node: str) -> str:
        path = self.folder / f"log-{node}"
        return path.read_text() if path.exists() else ""

    def state(self, node: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / f"state-{node}.json").read_text())
        return found

    def await_runs(self, *nodes: str, number: int = 3) -> None:
        """Wait until the program has ended so many more runs on each of them."""
        seen: dict[str, set[float]] = {node: set() for node in nodes}

        def look() -> bool:
            for node, times in seen.items():
                times.add(self.state(node)["checked_at"])
            return all(len(times) > number for times in seen.values())

        wait_for(look, f"{number} more runs on {', '.join(nodes)}", WAIT_S)

    def nodes(self) -> dict[str, tuple[str, str]]:
        """State and reason of each node, as an administrator sees them."""
        lines = self.cluster.run(["sinfo", "-h", "-N", "-o", "%N|%T|%E"], cwd="/").stdout.splitlines()
        return {name: (state, reason) for name, state, reason in (line.split("|", 2) for line in lines)}

    def drained(self) -> list[str]:
        return [name for name, (state, _) in self.nodes().items() if "drain" in state]

    def await_drained(self, *names: str) -> None:
        wait_for(lambda: self.drained() == list(names), f"{names or 'no node'} to be drained", WAIT_S)

    def scontrol(self, *words: str) -> None:
        self.cluster.run(["scontrol", "update", *words], cwd="/")

    def submit(self, node: str) -> str:
        argv = ["sbatch", "--parsable", "--output=/dev/null", f"--nodelist={node}", "--wrap=sleep 600"]
        job = self.cluster.run(argv, cwd="/").stdout.strip()
        wait_for(lambda: self.job_state(job) == "RUNNING", f"job {job} to run", WAIT_S)
        return job

    def job_state(self, job: str) -> str:
        return self.cluster.run(["squeue", "-h", "--states=all", f"--jobs={job}", "-o", "%T"], cwd="/").stdout.strip()

    def slurmd_log(self, node: str) -> str:
        return self.cluster.layout.slurmd_log(node).read_text()

    def mend(self) -> None:
        """Leave the cluster as the next test wants to find it: nothing drained, nothing remembered, no jobs."""
        for path in [*self.folder.glob("bad-*"), *self.folder.glob("hang-*"), *(self.folder / "bin").iterdir()]:
            path.unlink()
        self.configure(ok_runs=1)
        self.cluster.run(["scancel", "--user=root"], check=False, cwd="/")
        for name, (state, reason) in self.nodes().items():
            if "drain" in state and not is_ours("flashrec-health", reason):
                self.scontrol(f"nodename={name}", "state=undrain")

        def is_mended() -> bool:
            states = [self.state(node) for node in NODES]
            return not self.drained() and not any(state["fails"] or state["may_be_drained"] for state in states)

        wait_for(is_mended, "the nodes to be as before", WAIT_S)
        self.configure()


@pytest.fixture(scope="module")
def module_site() -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(prefix="flashrec-health-"))
    folder.chmod(0o755)
    site = Site(folder)
    conf = (
        f"HealthCheckProgram={site.program}", f"HealthCheckInterval={INTERVAL_S}", "HealthCheckNodeState=ANY",
        "MinJobAge=3600",
    )  # fmt: skip
    try:
        with dev_cluster(num_nodes=len(NODES), slurmd_timeout_s=3600, extra_conf=conf) as site.cluster:
            yield site
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def site(module_site: Site) -> Iterator[Site]:
    yield module_site
    module_site.mend()


def test_a_failing_node_is_drained_and_a_mended_one_undrained(site: Site) -> None:
    site.mark("bad", "n1")
    site.await_drained("n1")
    state, reason = site.nodes()["n1"]
    assert state == "drained"
    assert reason.startswith("flashrec-health: flag: the flag is up [")
    assert is_ours("flashrec-health", reason)
    assert site.state("n1")["fails"] >= 2
    site.mark("bad", "n1", up=False)
    site.await_drained()
    assert site.cluster.run(["srun", "-w", "n1", "hostname"], cwd="/").stdout == "n1\n"
    assert "undrained: all that had failed is well" in site.log("n1")


def test_slurmd_finds_nothing_to_complain_about(site: Site) -> None:
    site.mark("bad", "n1")
    site.await_drained("n1")
    site.await_runs(*NODES)
    for node in NODES:
        assert "health_check" not in site.slurmd_log(node)  # it would log a failure, or that it had to kill it


def test_what_an_administrator_drained_is_left_alone(site: Site) -> None:
    site.scontrol("nodename=n1", "state=drain", "reason=new power supply")
    site.mark("bad", "n1")
    site.await_runs("n1", number=4)
    assert site.nodes()["n1"][1] == "new power supply"
    site.mark("bad", "n1", up=False)
    site.await_runs("n1", number=4)
    assert site.nodes()["n1"] == ("drained", "new power supply")
    assert "not by us or the reason was changed" in site.log("n1")


def test_a_reason_that_an_administrator_edited_is_left_alone(site: Site) -> None:
    site.mark("bad", "n2")
    site.await_drained("n2")
    edited = site.nodes()["n2"][1] + " waits for a part"
    site.scontrol("nodename=n2", f"reason={edited}")
    site.mark("bad", "n2", up=False)
    site.await_runs("n2", number=4)
    assert site.nodes()["n2"] == ("drained", edited)
    site.scontrol("nodename=n2", "state=undrain")


def test_a_busy_node_is_drained_when_it_is_idle(site: Site) -> None:
    job = site.submit("n1")
    site.mark("bad", "n1")
    wait_for(lambda: "not drained: the node is busy" in site.log("n1"), "a decision about the busy node", WAIT_S)
    site.await_runs("n1", number=2)
    assert site.drained() == [] and site.job_state(job) == "RUNNING"
    site.cluster.run(["scancel", job])
    site.await_drained("n1")


def test_a_busy_node_is_drained_if_the_site_says_so_and_its_job_goes_on(site: Site) -> None:
    site.configure(drain_busy="yes")
    job = site.submit("n1")
    site.mark("bad", "n1")
    site.await_drained("n1")
    site.await_runs("n1", number=2)
    assert site.nodes()["n1"][0] == "draining"
    assert site.job_state(job) == "RUNNING"


def test_of_all_nodes_failing_at_once_no_more_than_max_drained_are(site: Site) -> None:
    site.configure(max_drained=1, spread_s=0)
    before = {node: len(site.log(node)) for node in NODES}
    site.mark("bad", *NODES)

    def has_given_up() -> list[str]:
        return [n for n in NODES if "not drained: 1 nodes are already, max_drained = 1" in site.log(n)[before[n] :]]

    wait_for(lambda: len(has_given_up()) == len(NODES) - 1, "all nodes but one to see that it is enough", WAIT_S)
    (one,) = site.drained()
    site.await_runs(*NODES, number=2)
    assert site.drained() == [one]
    site.mark("bad", one, up=False)
    wait_for(lambda: len(site.drained()) == 1 and site.drained() != [one], "another node to take the place", WAIT_S)


def test_a_hanging_check_hangs_nobody(site: Site) -> None:
    site.configure(flag="* || timeout_s=1 flag")
    site.mark("hang", "n1")
    wait_for(lambda: "flag: did not end within 1 s" in site.log("n1"), "the verdict about the hanging check", WAIT_S)
    site.await_runs("n1", number=3)
    assert site.drained() == []
    assert site.cluster.run(["srun", "-w", "n1", "hostname"], cwd="/").stdout == "n1\n"
    site.configure(flag="* || timeout_s=1 when_hung=fail flag")
    site.await_drained("n1")
    assert "did not end within 1 s" in site.nodes()["n1"][1]
    assert "health_check" not in site.slurmd_log("n1")


def test_a_hanging_scontrol_hangs_nobody(site: Site) -> None:
    """Nothing is drained on the word of a Slurm that does not answer; slurmd and its jobs notice nothing."""
    site.configure(slurm_timeout_s=1)
    for name in ("scontrol", "sinfo"):
        script(site.folder / "bin" / name, "trap '' TERM; sleep 600 & wait; sleep 600")
    site.mark("bad", "n1")
    wait_for(lambda: "Slurm could not be asked, nothing is changed" in site.log("n1"), "the complaint", WAIT_S)
    site.await_runs("n1", number=2)
    assert site.drained() == []
    assert site.cluster.run(["srun", "-w", "n1", "hostname"], cwd="/").stdout == "n1\n"
    assert "health_check" not in site.slurmd_log("n1")
    for name in ("scontrol", "sinfo"):
        (site.folder / "bin" / name).unlink()
    site.await_drained("n1")


def test_a_controller_that_is_away_is_waited_for(site: Site) -> None:
    """slurmd runs the program without its controller only when it starts, so the node checks itself by hand."""
    site.configure(slurm_timeout_s=3)
    site.mark("bad", "n1")
    site.cluster.stop_daemon("slurmctld")
    try:
        done = site.cluster.run([str(site.program)], node="n1", env={"SLURMD_NODENAME": "n1"}, timeout_s=60)
        done = site.cluster.run([str(site.program)], node="n1", env={"SLURMD_NODENAME": "n1"}, timeout_s=60)
        assert done.stdout == done.stderr == ""
        assert "Slurm could not be asked, nothing is changed" in site.log("n1")
    finally:
        site.cluster.start_daemon("slurmctld")
    site.await_drained("n1")


def test_the_installed_checks_say_ok_on_a_real_node(site: Site) -> None:
    conf = site.folder / "installed"
    conf.write_text(
        "* || memory --min-available-mib 1\n* || disk --min-free-percent 0 --min-inodes-percent 0 --write-test /tmp\n"
        "* || clock --controller --chronyc /none --timedatectl /none\n* || gpu\n* || nic --interface eth0\n"
        "* || processes\n* || daemons slurmd\n* || mounts /proc=proc /dev/shm=tmpfs\n"
    )
    command = [str(FLASHREC), "node-health", "--config", str(conf), "--json"]
    done = site.cluster.run(command, node="n1", env={"SLURMD_NODENAME": "n1"}, check=False)
    found = json.loads(done.stdout)
    assert found["node"] == "n1"
    bad = [f for f in found["findings"] if f["verdict"]["status"] != "ok"]
    assert not bad and len(found["findings"]) == 8 and done.returncode == 0
    # and an ordinary user gets an answer, too
    done = site.cluster.run(command, node="n1", user="nobody", env={"SLURMD_NODENAME": "n1"}, check=False)
    assert done.returncode == 0, done.stdout


def test_what_an_ended_job_left_behind_is_found_and_cleaned(site: Site) -> None:
    job = site.submit("n2")
    running = site.submit("n1")
    env = {"FLASHREC_SOCKET": "/x", "SLURM_CLUSTER_NAME": site.cluster.spec.name}
    sleep = ["sleep", "600"]
    left = site.cluster.popen(sleep, node="n2", user="nobody", env={**env, "SLURM_JOB_ID": job}, cwd="/")
    used = site.cluster.popen(sleep, node="n2", user="nobody", env={**env, "SLURM_JOB_ID": running}, cwd="/")
    conf = site.folder / "leftovers"
    conf.write_text(f"* || leftovers --clean --tmp {site.folder}\n")
    command = [str(FLASHREC), "node-health", "--config", str(conf), "--json"]

    def look() -> dict[str, Any]:
        done = site.cluster.run(command, node="n2", env={"SLURMD_NODENAME": "n2"}, check=False)
        (finding,) = json.loads(done.stdout)["findings"]
        found: dict[str, Any] = finding["verdict"]
        return found

    try:
        wait_for(lambda: look()["facts"]["processes"] == 2, "both processes to run", WAIT_S)
        assert look()["status"] == "ok"
        site.cluster.run(["scancel", job])
        wait_for(lambda: site.job_state(job) == "CANCELLED", "the job's end", WAIT_S)
        found = look()
        assert found["status"] == "warn" and f"left over from job {job}, killed" in found["reason"]
        wait_for(lambda: is_gone(left.pid) or left.poll() is not None, "the end of the process", WAIT_S)
        assert used.poll() is None
    finally:
        for process in (left, used):
            process.kill()
            process.wait()
