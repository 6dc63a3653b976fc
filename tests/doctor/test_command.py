"""`flashrec doctor` as a whole, with Slurm's commands missing, hanging or lying."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from flashrec.cli import doctor as command
from flashrec.cli.main import main
from tests.doctor.fakes import FakeCommands

CONFIG = """\
Configuration data as of {now}
ClusterName             = tux
PlugStackConfig         = /nowhere/plugstack.conf
SLURM_VERSION           = 22.05.8
"""


def run(*options: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *options])


def read(result: Result) -> dict[str, dict[str, Any]]:
    return {found["check"]: found for found in json.loads(result.output)["findings"]}


def test_without_slurm_it_says_so_and_looks_at_the_rest() -> None:
    with FakeCommands({}):
        result = run("--json")
    found = read(result)
    assert result.exit_code == 1
    assert found["slurm.controller"]["status"] == "fail"
    assert "not found" in found["slurm.controller"]["what"]
    assert found["python.version"]["status"] == "ok"
    assert "unknown" in {value["status"] for value in found.values()}


def test_commands_that_hang_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "CALL_TIMEOUT_S", 0.3)
    hang = "sleep 300"
    with FakeCommands(dict.fromkeys(("scontrol", "sinfo", "squeue", "srun", "munge"), hang)):
        began = time.monotonic()
        result = run("--json")
    assert time.monotonic() - began < 100, "each of a dozen questions was given up"
    assert "did not answer" in read(result)["slurm.controller"]["what"]


def test_controller_that_is_away() -> None:
    said = "echo 'slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    with FakeCommands({"scontrol": said, "sinfo": said, "squeue": said, "srun": "exit 0"}):
        result = run("--json")
    assert result.exit_code == 1
    assert "Unable to contact slurm controller" in read(result)["slurm.controller"]["what"]


def test_output_of_nonsense_is_unknown_not_a_crash() -> None:
    now = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
    config = f"cat <<'EOF'\n{CONFIG.format(now=now)}\nEOF"
    with FakeCommands({"scontrol": config, "sinfo": "echo '{[<'", "squeue": "echo '[]'", "srun": "exit 0"}):
        result = run("--json")
    found = read(result)
    assert found["slurm.controller"]["status"] == "ok"
    assert found["clock.controller"]["status"] == "ok"
    assert found["slurm.node-versions"]["status"] == "unknown"
    assert found["plugin.line"]["status"] == "fail"


def test_pool_with_an_impossible_size_is_told(tmp_path: Path) -> None:
    stack = tmp_path / "plugstack.conf"
    stack.write_text("optional flashrecovery.so pool=flashspare size=many\n")
    config = CONFIG.format(now="2026-01-01T00:00:00").replace("/nowhere/plugstack.conf", str(stack))
    with FakeCommands({"scontrol": f"cat <<'EOF'\n{config}\nEOF"}):
        result = run("--json")
    found = read(result)
    assert found["pool.arguments"]["status"] == "fail" and "size=many" in found["pool.arguments"]["what"]
    assert found["python.version"]["status"] == "ok", "and all else is looked at"


def test_markup_in_what_slurm_says_is_shown_as_it_is() -> None:
    said = "echo '[bold]boom[/bold]' >&2; exit 1"
    with FakeCommands({"scontrol": said, "sinfo": said}):
        result = run()
    assert "[bold]boom[/bold]" in " ".join(result.output.split())


def test_table_names_what_to_do_and_counts() -> None:
    with FakeCommands({}):
        result = run("--quiet")
    assert "slurm.controller" in result.output and "do: " in result.output
    assert "python.version" not in result.output, "--quiet leaves out what is fine"
    assert " fail" in result.output.splitlines()[-1] and " ok" in result.output.splitlines()[-1]


def test_wrong_node_list_and_configuration_are_refused(tmp_path: Any) -> None:
    assert "not a host list" in run("--nodes", "n[1").output
    broken = tmp_path / "config.yaml"
    broken.write_text("control: {port: many}")
    assert "port" in run("--config", str(broken)).output


def test_same_verdict_of_many_nodes_is_one_row() -> None:
    found = [command.Finding("a", command.Status.WARN, "b", "c", f"n{index}") for index in range(1, 5)]
    ((finding, nodes),) = command.merged(found)
    assert (finding.check, nodes) == ("a", "n[1-4]")
