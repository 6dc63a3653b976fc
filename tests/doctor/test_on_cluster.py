"""`flashrec doctor` on real Slurm: an installation that is sound, and one mistake at a time."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashrec.devcluster.cluster import DevCluster
from tests.support.cluster import dev_cluster, shared_folder, wait_for
from tests.support.people import Person, unprivileged
from tests.support.plugin import build_plugin

pytestmark = pytest.mark.devcluster

ROOT = Path(__file__).parents[2]
FLASHREC = Path(sys.executable).with_name("flashrec")
OTHER_SLURM = "0x140b00"  # 20.11: older than any that we support, so never the one of this machine
LUA = ROOT / "slurm_plugin/lua"


def site(*arguments: str, plugin: Path | None = None, conf: tuple[str, ...] = (), **settings: Any) -> Any:
    """A cluster installed as docs/admin/install.md says. conf: lines of slurm.conf that differ."""
    files = {}
    for name in ("cli_filter", "job_submit"):
        # The example looks in /etc/slurm; the cluster's slurm.conf is elsewhere.
        files[f"{name}.lua"] = (
            (LUA / f"{name}.lua.example")
            .read_text()
            .replace(f"/etc/slurm/flashrec_{name}.lua", str(LUA / f"flashrec_{name}.lua"))
        )
    whole = {
        "num_nodes": 3,
        "features": {"n2": "flashspare"},
        "plugstack": (f"optional {plugin or build_plugin()} flashrec={FLASHREC} {' '.join(arguments)}",),
        "conf_files": files,
        "extra_conf": ("CliFilterPlugins=cli_filter/lua", "JobSubmitPlugins=lua", *conf),
    }
    return dev_cluster(**(whole | settings))


def look(
    cluster: DevCluster, *options: str, code: int | None = None, person: Person | None = None, **where: Any
) -> dict[str, dict[str, str]]:
    """Findings by check; with --nodes by check and node as 'check@node'. code: the exit code that it must have."""
    command = [str(FLASHREC)]
    if person:
        command = [person.python, "-m", "flashrec.cli.main"]
        where |= {"user": person.name, "env": person.env}
    done = cluster.run([*command, "doctor", "--json", *options], check=False, timeout_s=200, **where)
    assert code in (None, done.returncode), done.stdout + done.stderr
    found = json.loads(done.stdout)["findings"]
    return {f"{one['check']}@{one['node']}" if one["node"] else one["check"]: one for one in found}


@pytest.fixture(scope="module")
def sound() -> Iterator[DevCluster]:
    with site("pool=flashspare") as cluster:
        cluster.run([str(FLASHREC), "pool", "--plugstack", str(cluster.layout.conf_dir / "plugstack.conf"), "sync"])
        yield cluster


@pytest.fixture
def shared() -> Iterator[Path]:
    with shared_folder() as folder:
        yield folder


def _state(cluster: DevCluster, node: str) -> str:
    """One word with its marks: 'idle*' does not answer."""
    return cluster.run(["sinfo", "-h", "-N", "-n", node, "-o", "%T"]).stdout.strip()


# What a dev cluster is not, and says so: no cgroups, no health program, no epilog of ours.
# pyslurm: there may be one that was made for another release, for the contract suite.
TOLD_OF_A_DEV_CLUSTER = {"pyslurm.version", "slurm.ProctrackType", "health.program", "hooks.epilog", "machine.job-dir"}


def test_sound_installation_has_no_failure(sound: DevCluster) -> None:
    found = look(sound, code=0)
    assert {name for name, one in found.items() if one["status"] != "ok"} - {
        "slurm.PrologFlags"
    } <= TOLD_OF_A_DEV_CLUSTER
    assert {
        "plugin.loaded",
        "plugin.file",
        "plugin.flashrec",
        "lua.cli_filter",
        "lua.job_submit",
        "pool.reservation",
    } <= {name for name, one in found.items() if one["status"] == "ok"}


def test_ordinary_user_sees_the_same(sound: DevCluster, shared: Path) -> None:
    found = look(sound, person=unprivileged(), cwd=shared, code=0)
    assert not [name for name, one in found.items() if one["status"] == "fail"]
    assert found["plugin.loaded"]["status"] == "ok"


def test_nodes_are_looked_at(sound: DevCluster, shared: Path) -> None:
    found = look(sound, "--nodes", "n[0-1]", cwd=shared, code=0)
    for node in ("n0", "n1"):
        assert f"nodes@{node}" not in found, found[f"nodes@{node}"]
        assert {found[f"{check}@{node}"]["status"] for check in ("nodes.job-dir", "clock.node", "plugin.file")} == {
            "ok"
        }


def test_node_that_is_busy_is_unknown(sound: DevCluster, shared: Path) -> None:
    job = sound.run(["sbatch", "--parsable", "-N1", "-w", "n0", "--wrap", "sleep 300"], cwd=shared).stdout.strip()
    try:
        wait_for(lambda: "RUNNING" in sound.run(["squeue", "-h", "-j", job, "-o", "%T"]).stdout, "the job")
        found = look(sound, "--nodes", "n0", cwd=shared)
    finally:
        sound.run(["scancel", job])
        wait_for(
            lambda: not sound.run(["squeue", "-h", "-j", job], check=False).stdout.strip(), "the end of the job", 60
        )
    assert found["nodes@n0" if "nodes@n0" in found else "nodes"]["status"] == "unknown"


def test_pool_whose_node_is_down(sound: DevCluster) -> None:
    sound.run(["scontrol", "update", "nodename=n2", "state=down", "reason=test"])
    try:
        found = look(sound, code=1)
    finally:
        sound.run(["scontrol", "update", "nodename=n2", "state=resume"])
        wait_for(lambda: _state(sound, "n2") in ("idle", "reserved"), "n2 to answer again", 60)
    assert found["pool.nodes"]["status"] == "fail" and "n2 (DOWN" in found["pool.nodes"]["what"]


def test_reservation_that_is_gone(sound: DevCluster) -> None:
    sound.run(["scontrol", "delete", "reservationname=flashspare"])
    try:
        found = look(sound, code=1)
    finally:
        sound.run([str(FLASHREC), "pool", "--plugstack", str(sound.layout.conf_dir / "plugstack.conf"), "sync"])
    assert found["pool.reservation"]["status"] == "fail"
    assert "flashrec pool sync" in found["pool.reservation"]["do"]
    assert look(sound)["pool.reservation"]["status"] == "ok"


def test_controller_that_is_down(sound: DevCluster) -> None:
    sound.stop_daemon("slurmctld")
    try:
        found = look(sound, code=1)
    finally:
        sound.start_daemon("slurmctld")
    assert found["slurm.controller"]["status"] == "fail"
    assert found["plugin.line"]["status"] == "unknown"
    assert found["python.version"]["status"] == "ok"


def test_plugin_for_another_slurm_and_a_short_batch_start_timeout() -> None:
    with site(plugin=build_plugin(OTHER_SLURM), conf=("BatchStartTimeout=10",)) as cluster:
        found = look(cluster, code=1)
        assert found["plugin.file"]["status"] == "fail"
        assert "20.11" in found["plugin.file"]["what"] and "build it again" in found["plugin.file"]["do"]
        assert found["plugin.loaded"]["status"] == "fail"
        assert "Incompatible" in found["plugin.loaded"]["what"], "srun's own words are shown"
        assert found["slurm.BatchStartTimeout"]["status"] == "warn"
        assert "65000" in found["slurm.BatchStartTimeout"]["do"]
        assert cluster.run(["srun", "-N1", "hostname"]).stdout.strip(), "and all other jobs run"


def test_no_plugin_no_filters_and_a_step_manager_by_default() -> None:
    with dev_cluster(2, extra_conf=("SlurmctldParameters=enable_stepmgr", "PrologFlags=contain")) as cluster:
        found = look(cluster, code=1)
    assert found["plugin.line"]["status"] == found["plugin.loaded"]["status"] == "fail"
    assert found["lua.cli_filter"]["status"] == "warn"
    assert found["slurm.stepmgr"]["status"] == "fail"
    assert found["pool.reservation"]["status"] == "ok", "a site may have no pool"


def test_flashrec_that_is_not_at_its_place(shared: Path) -> None:
    line = f"optional {build_plugin()} flashrec=/no/such/flashrec"
    with site(plugstack=(line,)) as cluster:
        found = look(cluster, "--nodes", "n0", cwd=shared, code=1)
    assert found["plugin.flashrec"]["status"] == "fail"
    assert found["nodes.flashrec@n0"]["status"] == "fail"
    assert "/no/such/flashrec" in found["nodes.flashrec@n0"]["what"]
