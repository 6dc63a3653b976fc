"""What a node's peers, its processes and Slurm see of a power cut, a partition and a healing. One cluster for all."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashrec.devcluster.cluster import DevCluster
from flashrec.devcluster.errors import DevClusterError
from tests.support.cluster import dev_cluster, is_gone, shared_folder, wait_for

pytestmark = pytest.mark.devcluster

# Long enough that a FIN or RST would have arrived many times over.
SILENCE_S = 1.0

LISTEN = """
import socket, time
server = socket.create_server(("", 7000))
print("listening", flush=True)
peer, _ = server.accept()
time.sleep(1000)
"""
CONNECT = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 7000), timeout=5)
peer.settimeout(None)
print("connected", flush=True)
try:
    print("data" if peer.recv(1) else "closed", flush=True)
except OSError as error:
    print(f"error {error}", flush=True)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with dev_cluster(num_nodes=4, slurmd_timeout_s=3600, extra_conf=("MessageTimeout=3",)) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def all_nodes_healthy(cluster: DevCluster) -> Iterator[None]:
    yield
    for node in cluster.status().nodes:
        if not (node.has_power and node.link_up):
            cluster.heal(node.name)


class Watch:
    """A TCP connection between two nodes; `said` is what the client's kernel told it since it was connected."""

    def __init__(self, cluster: DevCluster, server: str, client: str, *, host: str = "") -> None:
        python = [sys.executable, "-I", "-S", "-u", "-c"]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._server = cluster.popen([*python, LISTEN], node=server, cwd="/", **options)
        assert self._server.stdout is not None and self._server.stdout.readline() == b"listening\n"
        self._client = cluster.popen([*python, CONNECT, host or server], node=client, cwd="/", **options)
        assert self._client.stdout is not None and self._client.stdout.readline() == b"connected\n"
        os.set_blocking(self._client.stdout.fileno(), False)

    def said(self) -> bytes:
        assert self._client.stdout is not None
        return self._client.stdout.read() or b""

    def close(self) -> None:
        for process in (self._client, self._server):
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def watch(cluster: DevCluster) -> Iterator[Watch]:
    watch = Watch(cluster, server="n1", client="n0")
    yield watch
    watch.close()


def commands(cluster: DevCluster, node: str) -> list[str]:
    found = []
    for pid in cluster.processes(node):
        try:
            program, *arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        found.append(" ".join([os.path.basename(program), *arguments]).strip())
    return found


def test_a_power_cut_is_silent_and_total(cluster: DevCluster, watch: Watch) -> None:
    before = cluster.processes("n1")
    assert len(before) >= 3, "init, slurmd and the listener"
    asked_at = time.monotonic()
    cut_at = cluster.cut_power("n1")
    took_s = time.monotonic() - asked_at
    assert asked_at <= cut_at <= time.monotonic()
    assert all(is_gone(pid) for pid in before)
    assert cluster.processes("n1") == {}
    time.sleep(SILENCE_S)
    assert watch.said() == b""
    assert took_s < 0.5, "milliseconds, with room for a busy machine"


def test_a_zombie_that_nobody_reaps_does_not_hold_up_a_cut(cluster: DevCluster) -> None:
    """Its parent is an `exec` outside the node; the kernel does not finish the node's init before it is reaped."""
    outside = cluster.popen(["sleep", "34567"], node="n1", cwd="/")
    try:
        wait_for(lambda: "sleep 34567" in commands(cluster, "n1"), "the command")
        os.kill(outside.pid, signal.SIGSTOP)
        cut_at = cluster.cut_power("n1")
        assert time.monotonic() - cut_at < 1.0
        assert cluster.status().nodes[1].has_power is False
        cluster.heal("n1")
        assert cluster.run(["srun", "-N1", "-w", "n1", "hostname"]).stdout == "n1\n"
    finally:
        outside.kill()
        outside.wait()


def test_a_kill_without_the_cut_is_not_silent(cluster: DevCluster, watch: Watch) -> None:
    """The contrast that shows what the cut is for: here the dying kernel closes the connection in everybody's sight."""
    init = next(pid for pid, inside in cluster.processes("n1").items() if inside == 1)
    os.kill(init, signal.SIGKILL)
    said = b""

    def has_spoken() -> bool:
        nonlocal said
        said += watch.said()
        return said != b""

    wait_for(has_spoken, "the peer to see the end of the connection", timeout_s=5)
    assert said.startswith((b"closed", b"error"))


def test_a_partition_is_silent_and_kills_nothing(cluster: DevCluster, watch: Watch) -> None:
    before = set(cluster.processes("n1"))
    cluster.partition("n1")
    time.sleep(SILENCE_S)
    assert watch.said() == b""
    assert set(cluster.processes("n1")) >= before
    status = cluster.status().nodes[1]
    assert (status.has_power, status.link_up) == (True, False)
    assert cluster.run(["ping", "-c1", "-W1", "n1"], node="n0", check=False).returncode != 0 or not has_ping()

    cluster.heal("n1")
    assert set(cluster.processes("n1")) >= before
    assert watch.said() == b"", "the connection lives on as well"
    assert cluster.run(["srun", "-N1", "-w", "n1", "hostname"]).stdout == "n1\n"


def has_ping() -> bool:
    return subprocess.run(["which", "ping"], capture_output=True, check=False).returncode == 0


def test_a_healed_node_is_a_new_life_under_the_old_name(cluster: DevCluster) -> None:
    def card() -> tuple[str, str]:
        said = cluster.run(["ip", "-o", "addr", "show", "eth0"], node="n2").stdout
        link = cluster.run(["ip", "-o", "link", "show", "eth0"], node="n2").stdout
        return re.findall(r"inet (\S+)", said)[0], re.findall(r"link/ether (\S+)", link)[0]

    def network() -> str:
        return cluster.run(["readlink", "/proc/self/ns/net"], node="n2").stdout

    cluster.run(["touch", "/dev/shm/of-an-earlier-life"], node="n2")
    old_card, old_network = card(), network()
    # Something must hold the old one, or the kernel gives its number to the next.
    with open(f"/proc/{next(iter(cluster.processes('n2')))}/ns/net", "rb"):
        cluster.cut_power("n2")
        cluster.heal("n2")
        assert card() == old_card
        assert network() != old_network
    assert cluster.run(["ls", "/dev/shm"], node="n2").stdout == ""
    assert cluster.run(["hostname"], node="n2").stdout == "n2\n"
    assert cluster.run(["srun", "-N1", "-w", "n2", "hostname"]).stdout == "n2\n"


def test_faults_need_a_node_with_power(cluster: DevCluster) -> None:
    cluster.cut_power("n3")
    with pytest.raises(DevClusterError, match="n3 has no power"):
        cluster.cut_power("n3")
    with pytest.raises(DevClusterError, match="n3 has no power"):
        cluster.run(["true"], node="n3")
    with pytest.raises(DevClusterError, match="no node n9; there are ctl, n0"):
        cluster.cut_power("n9")
    with pytest.raises(DevClusterError, match="ctl is not a Slurm node"):
        cluster.cut_power("ctl")


JOB = """#!/bin/bash
srun --no-kill -N4 -n4 --overlap --input=none --output=none sleep 12345 &
sleep 1.5
kill -9 $(ps -o pid= --ppid $!) $!   # first the child that ends the step when srun dies
while sleep 0.05; do
    for ask in ask.*; do
        [ -e "$ask" ] || continue
        node=${ask#ask.}; rm "$ask"
        ( srun --no-kill -N1 -n1 -w "$node" --overlap hostname >"out.$node" 2>&1; mv "out.$node" "answer.$node" ) &
    done
done
"""


class Job:
    """A running --no-kill job over all nodes whose batch script starts a job step on a node when asked to."""

    def __init__(self, cluster: DevCluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        (folder / "job.sh").write_text(JOB)
        self.submitted_at = time.monotonic()
        options = ["--parsable", "-N4", "--no-kill", "--output=batch.out", "job.sh"]
        self.id = cluster.run(["sbatch", *options], cwd=folder, user="nobody").stdout.strip()
        wait_for(lambda: all(self.has_task(node) for node in cluster.nodes), "the job's tasks on all nodes")
        time.sleep(2.0)  # srun is killed by then

    def has_task(self, node: str) -> bool:
        return "sleep 12345" in commands(self._cluster, node)

    def state(self) -> str:
        return self._cluster.run(["squeue", "-h", "-j", self.id, "-o", "%T %N"], cwd="/").stdout.strip()

    def step_on(self, node: str) -> str:
        answer = self._folder / f"answer.{node}"
        answer.unlink(missing_ok=True)
        (self._folder / f"ask.{node}").touch()
        wait_for(answer.exists, f"a job step on {node}", timeout_s=15)
        return answer.read_text()

    def cancel(self) -> None:
        self._cluster.run(["scancel", self.id], cwd="/", check=False)
        wait_for(lambda: self._cluster.slurm_state("n3") == "idle", "the job to end", timeout_s=30)


@pytest.fixture(scope="module")
def job(cluster: DevCluster) -> Iterator[Job]:
    with shared_folder() as folder:
        job = Job(cluster, folder)
        yield job
        job.cancel()


def test_a_node_healed_in_time_is_back_in_its_running_job(cluster: DevCluster, job: Job) -> None:
    for _ in range(3):
        cluster.cut_power("n2")
        assert job.step_on("n3") == "n3\n", "a spare starts while the lost node is silent"
        cluster.heal("n2")
        assert job.step_on("n2") == "n2\n"
    assert job.state() == "RUNNING n[0-3]"
    assert [job.has_task(node) for node in cluster.nodes] == [True, True, False, True]


def test_stopping_a_daemon_leaves_the_job_alone(cluster: DevCluster, job: Job) -> None:
    cluster.stop_daemon("n1")
    assert cluster.status().nodes[1].slurmd_pid is None
    assert job.has_task("n1")
    cluster.start_daemon("n1")
    assert job.step_on("n1") == "n1\n"
    assert job.has_task("n1")

    cluster.stop_daemon("slurmctld")
    assert cluster.slurm_state("n0") is None, "no answer is not a state"
    assert job.has_task("n0")
    cluster.start_daemon("slurmctld")
    assert job.state() == "RUNNING n[0-3]"
    assert job.step_on("n3") == "n3\n"


def test_the_batch_host_comes_back_without_ending_the_job(cluster: DevCluster, job: Job) -> None:
    # slurmctld forgives a missing batch script for BatchStartTimeout (default 10 s) + MessageTimeout after the start.
    time.sleep(max(0.0, job.submitted_at + 16 - time.monotonic()))
    cluster.cut_power("n0")
    cluster.heal("n0")
    time.sleep(1.0)
    assert job.state() == "RUNNING n[0-3]"
    assert job.has_task("n1") and job.has_task("n3")


@pytest.mark.usefixtures("job")
def test_srun_aborts_the_whole_step_when_a_node_of_it_comes_back(cluster: DevCluster, job: Job) -> None:
    """Not ours but Slurm's, kept here because recovery depends on it: srun must not outlive the loss of a node."""
    job.cancel()
    step = cluster.popen(
        ["srun", "--no-kill", "-N3", "-w", "n[1-3]", "sleep", "23456"], cwd="/", stderr=subprocess.PIPE
    )
    wait_for(lambda: all("sleep 23456" in commands(cluster, f"n{i}") for i in (1, 2, 3)), "the step")
    cluster.cut_power("n2")
    cluster.heal("n2")
    _, said = step.communicate(timeout=60)
    assert b"missing" in said
    assert not any("sleep 23456" in commands(cluster, node) for node in cluster.nodes)
