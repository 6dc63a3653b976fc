"""The rendered configuration: what a test of a real cluster would only show after minutes, or never."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrec.devcluster.errors import DevClusterError
from flashrec.devcluster.slurmconf import render_hosts, render_plugstack_conf, render_slurm_conf
from flashrec.devcluster.spec import ClusterSpec, Layout

LAYOUT = Layout(Path("/state"), "dev")


def settings_of(spec: ClusterSpec) -> dict[str, str]:
    lines = render_slurm_conf(spec, LAYOUT, memory_mib=1000).splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith(("NodeName", "Partition")))


def lines_of(spec: ClusterSpec, key: str) -> list[str]:
    return [line for line in render_slurm_conf(spec, LAYOUT, memory_mib=1000).splitlines() if line.startswith(key)]


def test_what_lets_a_job_outlive_power_cuts() -> None:
    settings = settings_of(ClusterSpec(slurmd_timeout_s=3600))
    assert settings["SlurmdTimeout"] == "3600"
    assert settings["ReturnToService"] == "2"
    assert int(settings["BatchStartTimeout"]) > 3600
    assert settings["JobRequeue"] == "0"


def test_memory_never_keeps_an_overlapping_step_waiting() -> None:
    spec = ClusterSpec(num_nodes=1)
    assert settings_of(spec)["SelectTypeParameters"] == "CR_Core"
    assert "RealMemory=1000" in lines_of(spec, "NodeName=")[0], "or --mem is refused"


def test_jobs_get_whole_nodes() -> None:
    assert " OverSubscribe=EXCLUSIVE " in lines_of(ClusterSpec(), "PartitionName=main")[0]


def test_nothing_of_a_slurm_the_machine_runs_is_used() -> None:
    text = render_slurm_conf(ClusterSpec(), LAYOUT, memory_mib=1000)
    assert "/etc/slurm" not in text and "/var" not in text and "/run" not in text
    settings = settings_of(ClusterSpec())
    for key in ("StateSaveLocation", "SlurmdSpoolDir", "SlurmdPidFile", "SlurmctldPidFile", "PlugStackConfig"):
        assert settings[key].startswith("/state/dev/"), key
    assert settings["AuthInfo"] == "socket=/state/dev/munge/munge.socket"


def test_nodes_and_what_is_added() -> None:
    spec = ClusterSpec(num_nodes=2, cpus_per_node=4, features={"n1": "flashspare"}, extra_conf=("PrologFlags=Alloc",))
    n0, n1 = lines_of(spec, "NodeName=")
    assert n0.startswith("NodeName=n0 NodeAddr=10.77.0.2 CPUs=4 ") and "Feature" not in n0
    assert n1.endswith(" Feature=flashspare")
    assert settings_of(spec)["PrologFlags"] == "Alloc"


def test_plugstack_holds_the_given_lines_and_the_folder() -> None:
    text = render_plugstack_conf(ClusterSpec(plugstack=("optional /x.so",)), LAYOUT)
    assert text == "optional /x.so\ninclude /state/dev/etc/plugstack.conf.d/*.conf\n"


def test_every_station_has_a_name_and_its_own_address() -> None:
    spec = ClusterSpec(num_nodes=200)
    names = [line.split() for line in render_hosts(spec).splitlines()]
    assert ["10.77.0.1", "ctl"] in names and ["10.77.0.201", "n199"] in names
    assert len({spec.address(name) for name in spec.stations}) == len({spec.mac(name) for name in spec.stations}) == 201


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "../x"}, "cluster name"),
        ({"name": ""}, "cluster name"),
        ({"num_nodes": 0}, "nodes must be 1 to 200"),
        ({"cpus_per_node": 0}, "cpus-per-node"),
        ({"slurmd_timeout_s": 0}, "slurmd-timeout"),
        ({"num_nodes": 2, "features": {"n2": "x"}}, "unknown node n2"),
        ({"extra_conf": ("A=1\nB=2",)}, "one line each"),
    ],
)
def test_a_wrong_specification_is_refused_in_words(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(DevClusterError, match=message):
        ClusterSpec(**wrong)  # type: ignore[arg-type]


def test_a_state_folder_too_deep_for_a_socket_is_refused() -> None:
    with pytest.raises(DevClusterError, match="shorter --state-dir"):
        Layout(Path("/" + "x" * 100), "dev")


def test_further_files_are_plain_names_that_the_cluster_does_not_write() -> None:
    assert ClusterSpec(conf_files={"job_submit.lua": "x = 1\n"}).conf_files == {"job_submit.lua": "x = 1\n"}
    for name in ("slurm.conf", "../job_submit.lua", "a/b", ".hidden", ""):
        with pytest.raises(DevClusterError, match="plain file name"):
            ClusterSpec(conf_files={name: ""})
