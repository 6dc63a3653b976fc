"""Up, down, and every way in which a cluster can end without `down`: nothing may stay behind, and `up` must work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from flashrec.devcluster import nodeinit, process
from flashrec.devcluster.cluster import DevCluster, take_down
from flashrec.devcluster.errors import DevClusterError
from flashrec.devcluster.record import list_clusters
from flashrec.devcluster.spec import DEFAULT_STATE_DIR, ClusterSpec, Layout
from tests.support.cluster import dev_cluster, is_gone, new_name, sweep, wait_for

pytestmark = pytest.mark.devcluster

CLI = [sys.executable, "-m", "flashrec.cli.devcluster"]


@pytest.fixture
def name() -> Iterator[str]:
    name = new_name()
    yield name
    take_down(name)


def traces(name: str) -> dict[str, object]:
    """What a cluster could leave on this machine: folders, mounts, links, processes."""
    mine = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if f"/{name}/" in (entry / "cmdline").read_text() + (entry / "environ").read_text():
                    mine.append(entry.name)
            except (OSError, UnicodeDecodeError):
                continue
    return {
        "files": sorted(path.name for path in DEFAULT_STATE_DIR.glob(f"*{name}*")),
        "mounts": [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f"/{name}/" in line],
        "links": sorted(os.listdir("/sys/class/net")),
        "processes": mine,
    }


def inits(name: str) -> list[process.InitRecord]:
    records = (DEFAULT_STATE_DIR / name / "init").glob("*.json")
    return [found for path in records if (found := process.load_init_record(path)) is not None]


def test_up_works_and_down_leaves_nothing(name: str) -> None:
    before = traces(name)
    said: list[str] = []
    with DevCluster.up(ClusterSpec(name=name, num_nodes=3), progress=said.append) as cluster:
        assert any("slurmctld" in line for line in said)
        assert sorted(cluster.run(["srun", "-N3", "hostname"]).stdout.split()) == ["n0", "n1", "n2"]
        command = cluster.run(["srun", "-N1", "sh", "-c", "id -un; pwd"], user="nobody", cwd="/tmp")
        assert command.stdout.split() == ["nobody", "/tmp"]
        assert cluster.run(["getent", "hosts", "n2"], node="n1").stdout.split() == ["10.77.0.4", "n2"]
        assert [node.slurm_state for node in cluster.status().nodes] == ["idle"] * 3
        assert traces(name)["mounts"] == [], "nothing is mounted on the machine, not even meanwhile"
        everything = {pid for node in ("ctl", *cluster.nodes) for pid in cluster.processes(node)}
        assert len(everything) >= 8, "four inits, slurmctld and three slurmd"
    assert traces(name) == before
    assert all(is_gone(pid) for pid in everything)
    cluster.down()
    assert not take_down(name), "once more is fine"


def test_orphans_are_reaped(name: str) -> None:
    with DevCluster.up(ClusterSpec(name=name, num_nodes=1)) as cluster:
        before = cluster.processes("n0")
        # A child of a child whose parent has gone belongs to PID 1; dead and unreaped it would be a zombie for good.
        cluster.run(["sh", "-c", "(sh -c 'sleep 0.5; exit 3' >/dev/null 2>&1 &)"], node="n0", cwd="/")
        init = next(pid for pid, inside in before.items() if inside == 1)
        children = Path(f"/proc/{init}/task/{init}/children")
        orphans = set(children.read_text().split()) - {str(pid) for pid in before}
        assert orphans, "the orphan is the init's child while it runs"
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in orphans), "the orphan to be reaped")


def test_two_clusters_side_by_side(name: str) -> None:
    with dev_cluster(num_nodes=2) as one, DevCluster.up(ClusterSpec(name=name, num_nodes=1)) as other:
        assert one.run(["sinfo", "-h", "-N", "-o", "%N"]).stdout.split() == ["n0", "n1"]
        assert other.run(["sinfo", "-h", "-N", "-o", "%N"]).stdout.split() == ["n0"]
        other.cut_power("n0")
        assert one.run(["srun", "-N2", "hostname"]).returncode == 0, "the same names and addresses, another network"
        other.down()
        assert one.run(["srun", "-N2", "hostname"]).returncode == 0
        assert DevCluster.attach(one.spec.name).run(["hostname"]).stdout == "ctl\n"


def test_up_twice_is_refused_and_harms_nothing(name: str) -> None:
    with DevCluster.up(ClusterSpec(name=name, num_nodes=1)) as cluster:
        with pytest.raises(DevClusterError, match="up already"):
            DevCluster.up(ClusterSpec(name=name, num_nodes=1))
        assert cluster.run(["srun", "-N1", "hostname"]).stdout == "n0\n"


def test_up_after_everything_was_killed(name: str) -> None:
    DevCluster.up(ClusterSpec(name=name, num_nodes=2))
    for record in inits(name):
        os.kill(record.pid, signal.SIGKILL)
    wait_for(lambda: not any(process.is_alive(record) for record in inits(name)), "the killed to be gone")
    with pytest.raises(DevClusterError, match="`up` starts it anew"):
        DevCluster.attach(name)
    said: list[str] = []
    with DevCluster.up(ClusterSpec(name=name, num_nodes=2), progress=said.append) as cluster:
        assert "left behind" in said[0]
        assert cluster.run(["srun", "-N2", "hostname"]).returncode == 0


@pytest.mark.parametrize("last_words", ["booting", "starting munged", "starting slurmd", "waiting"])
def test_up_killed_half_way(name: str, last_words: str) -> None:
    before = traces(name)
    up = subprocess.Popen(
        [*CLI, "up", "--name", name, "--nodes", "2"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert up.stderr is not None
    for line in up.stderr:
        if last_words in line:
            break
    else:
        pytest.fail(f"up never said {last_words!r}")
    up.kill()
    up.wait()
    up.stderr.close()
    with pytest.raises(DevClusterError, match="not up yet"):
        DevCluster.attach(name)
    with DevCluster.up(ClusterSpec(name=name, num_nodes=1)) as cluster:
        assert cluster.run(["srun", "-N1", "hostname"]).stdout == "n0\n"
    wait_for(lambda: traces(name) == before, "everything to be gone", timeout_s=5)


def test_an_init_whose_starter_dies_ends_by_itself(tmp_path: Path) -> None:
    """The moment between fork and record, when nobody else knows of it."""
    hosts = tmp_path / "hosts"
    hosts.touch()
    starter = subprocess.Popen(
        [sys.executable, "-I", "-S", nodeinit.__file__, "n0", str(hosts)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert starter.stdout is not None
    init = msgspec.json.decode(starter.stdout.readline(), type=process.InitRecord)
    assert process.is_alive(init)
    starter.communicate()  # closes its standard input
    wait_for(lambda: not process.is_alive(init), "the init to end", timeout_s=5)


def test_a_failing_up_takes_away_what_it_started_and_quotes_the_log(name: str) -> None:
    before = traces(name)
    spec = ClusterSpec(name=name, num_nodes=1, extra_conf=("NoSuchSetting=1",))
    with pytest.raises(DevClusterError, match="slurmctld did not start") as caught:
        DevCluster.up(spec)
    assert "NoSuchSetting" in str(caught.value), "the daemon's own words"
    assert traces(name) == before


def test_a_reused_pid_is_not_killed() -> None:
    bystander = subprocess.Popen(["sleep", "1000"])
    try:
        start_time = int(Path(f"/proc/{bystander.pid}/stat").read_text().rpartition(")")[2].split()[19])
        stale = process.InitRecord(pid=bystander.pid, start_time=start_time - 1, pid_namespace=0)
        assert not process.is_alive(stale)
        process.kill_namespace(stale)
        time.sleep(0.1)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_folder_that_is_not_ours_is_not_touched(tmp_path: Path) -> None:
    precious = tmp_path / "dev" / "thesis.tex"
    precious.parent.mkdir()
    precious.touch()
    with pytest.raises(DevClusterError, match="not touched"):
        take_down("dev", state_dir=tmp_path)
    with pytest.raises(DevClusterError, match="not touched"):
        DevCluster.up(ClusterSpec(name="dev", num_nodes=1), state_dir=tmp_path)
    assert precious.exists()


def test_a_lock_that_a_killed_down_left_is_removed(tmp_path: Path) -> None:
    Layout(tmp_path, "dev").lock.touch()
    assert not take_down("dev", state_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_record_of_before_a_reboot_kills_nobody(name: str) -> None:
    bystander = subprocess.Popen(["sleep", "1000"])
    try:
        layout = Layout(DEFAULT_STATE_DIR, name)
        layout.init_record("ctl").parent.mkdir(parents=True)
        start_time = int(Path(f"/proc/{bystander.pid}/stat").read_text().rpartition(")")[2].split()[19])
        init = {"pid": bystander.pid, "start_time": start_time, "pid_namespace": 1}
        layout.init_record("ctl").write_text(json.dumps(init))
        old = {"spec": {"name": name}, "boot_id": "another", "pid_namespace": 1, "is_complete": True}
        layout.record.write_text(json.dumps(old))
        with pytest.raises(DevClusterError, match="died"):
            DevCluster.attach(name)
        assert take_down(name)
        time.sleep(0.1)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_the_sweep_takes_what_a_dead_test_run_left(name: str) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = f"test-{ended.pid}-0"
    DevCluster.up(ClusterSpec(name=left, num_nodes=1))
    DevCluster.up(ClusterSpec(name=name, num_nodes=1))
    sweep()
    assert left not in list_clusters(DEFAULT_STATE_DIR)
    assert DevCluster.attach(name).run(["hostname"]).stdout == "ctl\n"


def test_slurm_notices_and_takes_the_node_back() -> None:
    # Slurm's own detection: SlurmdTimeout, but not before its messages to the silent node have timed out.
    with dev_cluster(num_nodes=3, slurmd_timeout_s=5, extra_conf=("MessageTimeout=2",)) as cluster:
        cluster.cut_power("n0")
        cluster.partition("n1")
        states = [f"n{i}" for i in (0, 1)]
        wait_for(lambda: all(cluster.slurm_state(node) == "down*" for node in states), "Slurm to notice", timeout_s=40)
        healing_at = time.monotonic()
        for node in states:
            cluster.heal(node)
        assert time.monotonic() - healing_at < 10, "not when slurmctld next looks after nodes it gave up on"
        assert sorted(cluster.run(["srun", "-N3", "hostname"]).stdout.split()) == ["n0", "n1", "n2"]
