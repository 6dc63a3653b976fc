"""What a user types and sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flashrec.cli.devcluster import devcluster
from flashrec.devcluster.cluster import DevCluster
from tests.support.cluster import dev_cluster, new_name

CLI = [sys.executable, "-m", "flashrec.cli.devcluster"]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(devcluster, arguments)


@pytest.mark.parametrize("command", ["", *devcluster.commands])
def test_help_teaches(command: str) -> None:
    result = invoke(*command.split(), "--help")
    assert result.exit_code == 0 and "Usage:" in result.output
    assert len(result.output.splitlines()) > 4


def test_without_a_cluster_the_message_says_how_to_get_one(tmp_path: Path) -> None:
    result = invoke("status", "--state-dir", str(tmp_path))
    assert result.exit_code == 1
    assert result.output.strip() == "Error: no cluster dev; start one with `flashrec devcluster up --name dev`"


def test_a_missing_requirement_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    result = invoke("up", "--state-dir", str(tmp_path))
    assert result.exit_code == 1
    assert "needs root: run with sudo" in result.output and "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_feature_is_a_usage_error() -> None:
    result = invoke("up", "--feature", "n4")
    assert result.exit_code == 2 and "NODE=FEATURE" in result.output


def test_down_without_a_cluster_is_fine(tmp_path: Path) -> None:
    assert invoke("down", "--state-dir", str(tmp_path)).exit_code == 0
    assert invoke("down", "--all", "--state-dir", str(tmp_path)).exit_code == 0


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with dev_cluster(num_nodes=2) as cluster:
        yield cluster


@pytest.mark.devcluster
class TestOnACluster:
    @pytest.fixture
    def name(self, cluster: DevCluster) -> str:
        return cluster.spec.name

    def test_exec_passes_the_exit_code_on_and_keeps_the_folder(self, name: str, tmp_path: Path) -> None:
        command = ["sh", "-c", "pwd; hostname; echo $SLURM_CONF; exit 7"]
        done = subprocess.run(
            [*CLI, "exec", "--name", name, "--node", "n1", "--", *command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        folder, where, conf = done.stdout.split()
        assert (folder, where, done.returncode) == (str(tmp_path), "n1", 7)
        assert Path(conf).name == "slurm.conf" and f"/{name}/" in conf

    def test_exec_as_an_ordinary_user(self, name: str) -> None:
        command = ["srun", "-N2", "-l", "id", "-un"]
        done = subprocess.run(
            [*CLI, "exec", "--name", name, "--user", "nobody", "--", *command],
            cwd="/",
            capture_output=True,
            text=True,
            check=True,
        )
        assert sorted(done.stdout.splitlines()) == ["0: nobody", "1: nobody"]

    def test_an_unknown_user_is_named(self, name: str) -> None:
        result = invoke("exec", "--name", name, "--user", "no-such-user", "--", "true")
        assert result.exit_code == 1 and "no user no-such-user" in result.output

    def test_faults_and_status(self, name: str) -> None:
        assert invoke("kill-node", "--name", name, "n1").exit_code == 0
        assert invoke("partition-node", "--name", name, "n0").exit_code == 0
        status = json.loads(invoke("status", "--name", name, "--json").output)
        assert [(node["has_power"], node["link_up"]) for node in status["nodes"]] == [(True, False), (False, False)]
        table = invoke("status", "--name", name).output
        assert "off" in table and "down" in table
        for node in ("n0", "n1"):
            assert invoke("heal-node", "--name", name, node).exit_code == 0
        assert invoke("stop-daemon", "--name", name, "slurmctld").exit_code == 0
        assert json.loads(invoke("status", "--name", name, "--json").output)["nodes"][0]["slurm_state"] is None
        assert invoke("start-daemon", "--name", name, "slurmctld").exit_code == 0
        status = json.loads(invoke("status", "--name", name, "--json").output)
        assert [node["slurm_state"] for node in status["nodes"]] == ["idle", "idle"]

    def test_inside_a_node_it_refuses_to_judge_the_cluster(self, name: str) -> None:
        """Pids mean others in there: `down` would think everything dead and delete the folder."""
        for command in (["down"], ["up"], ["status"]):
            done = subprocess.run(
                [*CLI, "exec", "--name", name, "--", *CLI, *command, "--name", name],
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 1 and "another PID namespace" in done.stderr
        assert invoke("exec", "--help").exit_code == 0
        assert DevCluster.attach(name).run(["srun", "-N2", "hostname"]).returncode == 0


@pytest.mark.devcluster
def test_up_says_what_it_does_and_what_to_do_next() -> None:
    name = new_name()
    try:
        done = invoke("up", "--name", name, "--nodes", "1", "--feature", "n0=flashspare", "--conf-line", "KillWait=3")
        assert done.exit_code == 0
        assert f"{name}: starting slurmd on 1 nodes" in done.output
        assert f"flashrec devcluster exec --name {name} -- srun -N1 hostname" in done.output
        cluster = DevCluster.attach(name)
        assert "flashspare" in cluster.run(["scontrol", "show", "node", "n0"]).stdout
        assert "KillWait                = 3 sec" in cluster.run(["scontrol", "show", "config"]).stdout
    finally:
        assert invoke("down", "--name", name).exit_code == 0
