"""What flashrec's own sruns are given: they stay ordinary, and their tasks find the agent without an environment."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from flashrec.core.types import Assignment
from flashrec.manager.steps import Contact, SlurmLauncher, agent_environment, worker_environment
from flashrec.transport.paths import exit_socket_path, socket_path

CONTACT = Contact("10.0.0.1:7", "key", Path("/jobs/secret"), 120.0, tempfile.gettempdir())
LAUNCHER = SlurmLauncher(7, CONTACT, ("python", "t.py"), ("--export=NONE",), Path("/jobs/logs"))


def words(step) -> list[str]:
    (argv,) = step._argvs
    return argv


def test_the_plugin_finds_the_socket_of_each_node_on_the_launchers_command_line() -> None:
    argv = words(LAUNCHER.workers(3, {"n1": [Assignment(0, 0, 1, 1, False)], "n2": [Assignment(1, 0, 1, 1, False)]}))
    at = argv.index("flashrec.agent.launch")
    assert argv[at - 1] == "-m" and argv[at + 1] == "--exit-socket"
    assert argv[at + 2].replace("%N", "n2") == str(exit_socket_path(socket_path("key", "n2", CONTACT.tmp)))
    assert argv.index("--") > at + 2


def test_an_agent_gets_its_environment_whatever_the_ranks_get() -> None:
    argv = words(LAUNCHER.agents(["n1"], 1))
    assert "--export=ALL" in argv and "--export=NONE" not in argv
    assert "SLURM_EXPORT_ENV" not in agent_environment({"SLURM_EXPORT_ENV": "NONE"})
    assert worker_environment({"SLURM_EXPORT_ENV": "NONE"})["SLURM_EXPORT_ENV"] == "NONE"


def test_an_agent_is_no_part_of_an_mpi_job() -> None:
    """Its beater must be alone in its MPI world, and the loss of a node must not end an MPI job step."""
    assert "--mpi=none" in words(LAUNCHER.agents(["n1"], 1))


def test_they_are_marked_for_the_plugin_and_are_not_redirected() -> None:
    for environment in (agent_environment, worker_environment):
        assert environment({"SLURM_STDOUTMODE": "x", "SLURM_LABELIO": "1"}) == {"FLASHREC_HANDED_OVER": "1"}


def test_sockets_are_where_the_manager_says_if_that_exists_here(tmp_path: Path) -> None:
    assert socket_path("key", "n1", str(tmp_path)) == tmp_path / f"flashrec-{os.geteuid()}" / "key" / "n1.sock"
    assert socket_path("key", "n1", str(tmp_path / "gone")) == socket_path("key", "n1")


def test_a_step_is_in_the_job_of_its_nodes() -> None:
    launcher = SlurmLauncher(7, CONTACT, ("python", "t.py"), (), Path("/jobs/logs"), {"p1": 12}.get)
    task = [Assignment(0, 0, 1, 1, False)]
    assert "--jobid=7" in words(launcher.workers(3, {"n1": task, "n2": task}))
    assert "--jobid=12" in words(launcher.workers(3, {"p1": task}))
    assert "--jobid=12" in words(launcher.agents(["p1"], 1))
    with pytest.raises(ValueError, match="one job"):
        launcher.workers(3, {"n1": task, "p1": task})
