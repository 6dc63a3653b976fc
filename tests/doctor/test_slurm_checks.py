"""Slurm itself: no controller, versions that do not fit, clocks that disagree, shared nodes."""

import asyncio

import pytest

from flashrec.admin.doctor.facts import Missing, gather, parse_version
from flashrec.admin.doctor.finding import Status
from flashrec.admin.doctor.slurm_checks import check_slurm
from flashrec.slurm.cli import CliScheduler
from flashrec.slurm.command import Commands
from tests.doctor.builders import NOTHING, UNASKED, by_name, facts, node, not_ok
from tests.doctor.fakes import FakeCommands


def test_healthy_cluster_is_fine() -> None:
    assert not_ok(check_slurm(facts())) == []


def test_without_a_controller_there_is_only_that_to_say() -> None:
    (found,) = check_slurm(NOTHING)
    assert (found.check, found.status) == ("slurm.controller", Status.FAIL)
    assert "the controller did not answer" in found.what


@pytest.mark.parametrize(
    ("controller", "client", "status"),
    [
        ("22.05.8", (22, 5, 8), Status.OK),
        ("26.05.5", (24, 11, 5), Status.OK),
        ("21.08.8", (21, 8, 8), Status.FAIL),
        ("24.11.5", (26, 5, 5), Status.FAIL),
        ("26.11.0", (26, 11, 0), Status.WARN),
        ("odd", (24, 11, 5), Status.UNKNOWN),
    ],
)
def test_versions(controller: str, client: tuple[int, int, int], status: Status) -> None:
    found = by_name(check_slurm(facts({"SLURM_VERSION": controller}, client=client)))
    assert found["slurm.version"].status is status


def test_slurmd_of_two_releases_is_told() -> None:
    mixed = facts(nodes={"n1": node("n1"), "n2": node("n2", version="24.05.1")})
    assert by_name(check_slurm(mixed))["slurm.node-versions"].status is Status.WARN
    same = facts(nodes={"n1": node("n1"), "n2": node("n2", version="24.11.1")})
    assert by_name(check_slurm(same))["slurm.node-versions"].status is Status.OK


@pytest.mark.parametrize(
    ("controller", "here", "status"),
    [
        (1000.0, 1000.9, Status.OK),  # the controller prints whole seconds
        (1000.0, 1002.5, Status.OK),
        (1000.0, 1003.5, Status.WARN),
        (1003.0, 1000.0, Status.WARN),
        (1400.0, 1000.0, Status.FAIL),
        (1000.0, 1400.0, Status.FAIL),
    ],
)
def test_clock_of_the_controller(controller: float, here: float, status: Status) -> None:
    assert by_name(check_slurm(facts(clock=(controller, here))))["clock.controller"].status is status


def test_partition_that_shares_nodes_is_told() -> None:
    found = by_name(check_slurm(facts(sharing={"main": "EXCLUSIVE", "debug": "NO"})))["slurm.OverSubscribe"]
    assert found.status is Status.WARN
    assert "partition debug" in found.what


@pytest.mark.parametrize(
    ("fact", "check"),
    [("nodes", "slurm.node-versions"), ("clock", "clock.controller"), ("sharing", "slurm.OverSubscribe")],
)
def test_what_could_not_be_asked_is_unknown_never_fine(fact: str, check: str) -> None:
    found = by_name(check_slurm(facts(**{fact: UNASKED})))[check]
    assert (found.status, found.what) == (Status.UNKNOWN, UNASKED.why)


def test_no_node_with_a_version_is_not_fine() -> None:
    found = by_name(check_slurm(facts(nodes={"n1": node("n1", version="")})))["slurm.node-versions"]
    assert found.status is Status.UNKNOWN


@pytest.mark.parametrize(
    ("line", "sharing"),
    [
        ("PartitionName=main Default=YES OverSubscribe=EXCLUSIVE State=UP", "EXCLUSIVE"),  # 22.05, 24.11
        ("PartitionName=main Exclusive=NODE OverSubscribe=NO State=UP", "EXCLUSIVE"),  # 26.05
        ("PartitionName=main Exclusive=NO OverSubscribe=FORCE:2 State=UP", "FORCE:2"),
    ],
)
def test_ways_to_say_that_jobs_get_whole_nodes(line: str, sharing: str) -> None:
    with FakeCommands({"scontrol": f"echo '{line}'"}):
        assert asyncio.run(gather(CliScheduler(), Commands())).sharing == {"main": sharing}


def test_no_partition_is_no_answer() -> None:
    with FakeCommands({"scontrol": "echo"}):
        assert isinstance(asyncio.run(gather(CliScheduler(), Commands())).sharing, Missing)


@pytest.mark.parametrize("text", ["22.05.8", "slurm-wlm 22.05.8", "slurm 22.05.8-1"])
def test_versions_are_found_in_what_slurm_prints(text: str) -> None:
    assert parse_version(text) == (22, 5, 8)
