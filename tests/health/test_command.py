"""`flashrec node-health` as people and programs call it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flashrec.cli.main import main
from tests.health.support import CheckDir, script


@pytest.fixture
def conf(checks: CheckDir, tmp_path: Path) -> Path:
    checks.says("good")
    checks.says("odd", "warn", "a little [red]odd[/red]")
    checks.says("blind", "unknown", "needs root")
    path = tmp_path / "conf"
    path.write_text(f"check_dir = {checks.folder}\n* || good\n* || odd\n* || blind\nn7 || bad\n")
    checks.says("bad", "fail", "it is broken")
    return path


def call(conf: Path, *args: str) -> Result:
    return CliRunner().invoke(main, ["node-health", "--config", str(conf), *args])


def test_people_see_a_table(conf: Path) -> None:
    result = call(conf, "--node", "n1")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("node n1: unknown")
    assert "a little [red]odd[/red]" in result.output
    assert "needs root" in result.output and "bad" not in result.output


def test_a_failure_is_exit_code_1(conf: Path) -> None:
    result = call(conf, "--node", "n7")
    assert result.exit_code == 1
    assert "it is broken" in result.output


def test_programs_get_json(conf: Path) -> None:
    result = call(conf, "--node", "n7", "--json")
    found = json.loads(result.output)
    assert (result.exit_code, found["node"], found["status"]) == (1, "n7", "fail")
    assert [f["verdict"]["status"] for f in found["findings"]] == ["ok", "warn", "unknown", "fail"]
    assert found["findings"][3]["verdict"]["reason"] == "it is broken"


def test_one_check_alone(conf: Path) -> None:
    result = call(conf, "--node", "n7", "--only", "good", "--only", "odd", "--json")
    assert [f["label"] for f in json.loads(result.output)["findings"]] == ["good", "odd"]
    result = call(conf, "--only", "nope")
    assert result.exit_code == 2 and "has no check nope; it has: bad, blind, good, odd" in result.output


def test_a_list_runs_nothing_and_finds_mistakes(conf: Path, checks: CheckDir, tmp_path: Path) -> None:
    checks.add("good", f"touch {tmp_path}/ran")
    result = call(conf, "--list")
    assert result.exit_code == 0 and "installed: bad, blind, good, odd" in result.output
    assert not (tmp_path / "ran").exists()
    assert json.loads(call(conf, "--list", "--json").output)["lines"][3]["terms"] == ["n7"]
    conf.write_text(conf.read_text() + "* || no-such\n")
    result = call(conf, "--list")
    assert result.exit_code == 2 and f"{conf}:6: there is no check no-such" in result.output


def test_a_file_that_cannot_be_used_is_exit_code_2(conf: Path) -> None:
    conf.write_text("nonsense\n")
    result = call(conf)
    assert result.exit_code == 2
    assert f"flashrec node-health: {conf}:1: 'nonsense' is neither" in result.output
    assert call(conf.parent / "missing").exit_code == 2


def test_the_nodes_name_is_slurms_if_it_is_known(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHREC_NODE", raising=False)
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    assert call(conf).exit_code == 1
    monkeypatch.delenv("SLURMD_NODENAME")
    assert json.loads(call(conf, "--json").output)["node"] == os.uname().nodename.partition(".")[0]


def test_features_that_slurm_does_not_tell_are_unknown(
    conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("scontrol", "sinfo"):
        script(tmp_path / name, "echo Unable to contact slurm controller >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    conf.write_text(conf.read_text() + "@a100 || good\n")
    result = call(conf, "--node", "n1", "--json")
    assert "features of this node are not known" in json.loads(result.output)["findings"][3]["verdict"]["reason"]


def test_without_a_file_the_built_in_checks_run() -> None:
    result = CliRunner().invoke(main, ["node-health", "--list"])
    assert result.exit_code == 0, result.output
    if not Path("/etc/flashrec/node-health.conf").exists():
        assert "built-in checks" in result.output


def test_slurm_mode_ends_well_whatever_happens(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    assert call(conf, "--slurm").exit_code == 0
