"""Nodes through a short job: who says nothing, who has no flashrec, whose clock is off, who does not see the folder."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec

from flashrec.admin.doctor.examine import NodeReport
from flashrec.admin.doctor.finding import Finding, Status, warn
from flashrec.admin.doctor.nodes import job_argv, judge, look_at_nodes, print_report, read_reports
from flashrec.slurm.command import Commands
from tests.doctor.builders import by_name
from tests.doctor.fakes import FakeCommands


def report(node: str = "n1", **changes: object) -> NodeReport:
    whole = NodeReport(node, time.time(), "0.1.0", True, (Finding("machine.TMPDIR", Status.OK, "/tmp", node=node),))
    return msgspec.structs.replace(whole, **changes)


def encoded(made: NodeReport) -> str:
    return print_report(made)


def look(tmp_path: Path, srun: str, environ: dict[str, str] | None = None) -> list[Finding]:
    with FakeCommands({"srun": srun}):
        return asyncio.run(
            look_at_nodes(Commands(timeout_s=5.0), ("n1", "n2", "n3"), "/opt/flashrec", environ or {}, tmp_path)
        )


def test_each_node_is_told_of(tmp_path: Path) -> None:
    srun = f"echo 'prolog says hello'; echo '{encoded(report('n1'))}'; echo 'flashrec-doctor: not executable on n2'"
    found = look(tmp_path, srun)
    told = {(finding.node, finding.check): finding.status for finding in found}
    assert told[("n1", "machine.TMPDIR")] is Status.OK
    assert told[("n1", "nodes.job-dir")] is Status.OK
    assert told[("n2", "nodes.flashrec")] is Status.FAIL
    assert told[("n3", "nodes")] is Status.UNKNOWN, "a node that says nothing is never fine"


def test_nodes_that_are_not_free_are_unknown_with_what_srun_said(tmp_path: Path) -> None:
    found = look(
        tmp_path, "echo 'srun: error: Unable to allocate resources: Immediate execution impossible' >&2; exit 1"
    )
    assert {finding.status for finding in found} == {Status.UNKNOWN}
    assert all("Immediate execution impossible" in finding.what for finding in found)


def test_srun_that_hangs_is_unknown(tmp_path: Path) -> None:
    with FakeCommands({"srun": "sleep 60"}):
        found = asyncio.run(look_at_nodes(Commands(timeout_s=0.3), ("n1",), "/opt/flashrec", {}, tmp_path))
    assert [finding.status for finding in found] == [Status.UNKNOWN]


def test_folder_that_cannot_be_written_to_is_unknown() -> None:
    found = asyncio.run(look_at_nodes(Commands(), ("n1",), "/opt/flashrec", {}, Path("/proc/none")))
    assert [finding.status for finding in found] == [Status.UNKNOWN]


def test_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    seen.mkdir()
    look(tmp_path, f"for word; do case $word in --proof=*) cat ${{word#--proof=}} && : > {seen}/proof;; esac; done")
    assert (seen / "proof").exists(), "the file that nodes look for was there while srun ran"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["seen"]


def test_job_asks_for_each_node_once_and_never_waits_for_ever() -> None:
    argv = job_argv(("n1", "n3"), "/opt/flashrec", {}, "/home/x/.proof")
    assert {"--nodelist=n1,n3", "--ntasks=2", "--ntasks-per-node=1", "--immediate=20", "--time=2"} <= set(argv)
    assert argv[-4:] == ["/opt/flashrec", "doctor", "--local-only", "--proof=/home/x/.proof"]
    inside = job_argv(("n1",), "/opt/flashrec", {"SLURM_JOB_ID": "7"}, "/p")
    assert "--overlap" in inside and "--immediate=20" not in inside


def test_clock_of_a_node() -> None:
    for clock, status in [
        (100.5, Status.OK),
        (99.5, Status.OK),
        (103.5, Status.OK),
        (98.0, Status.WARN),
        (107, Status.WARN),
    ]:
        found = by_name(judge(report(clock=clock), 100.0, 103.0, "/x"))
        assert found["clock.node"].status is status, clock


def test_node_that_does_not_see_the_folder() -> None:
    assert by_name(judge(report(sees_proof=False), 0, 9e9, "/x"))["nodes.job-dir"].status is Status.FAIL
    assert by_name(judge(report(sees_proof=None), 0, 9e9, "/x"))["nodes.job-dir"].status is Status.UNKNOWN


def test_what_the_node_found_is_passed_on_under_its_name() -> None:
    made = report(findings=(msgspec.structs.replace(warn("a.b", "bad", "mend"), node="n1"),))
    reports, _ = read_reports(encoded(made) + "\n")
    assert msgspec.structs.replace(warn("a.b", "bad", "mend"), node="n1") in judge(reports["n1"], 0, 9e9, "/x")


def test_reports_of_several_nodes_may_be_mixed_line_by_line() -> None:
    """srun does that, and cuts lines of more than about a thousand bytes anywhere."""
    long = tuple(warn(f"check.{index}", "x" * 100, "mend") for index in range(40))
    made = [report(node, findings=long) for node in ("n1", "n2")]
    lines = [encoded(one).splitlines() for one in made]
    assert max(map(len, lines[0])) < 500
    mixed = [line for pair in zip(*lines, strict=True) for line in reversed(pair)]
    assert read_reports("\n".join(mixed))[0] == {"n1": made[0], "n2": made[1]}


def test_report_that_is_not_whole_is_none() -> None:
    lines = encoded(report(findings=tuple(warn("a", "x" * 100, "") for _ in range(9)))).splitlines()
    assert read_reports("\n".join(lines[:-1]))[0] == {}
    assert read_reports("\n".join([*lines[:-1], lines[-1][:-5]]))[0] == {}


def test_lines_that_are_no_reports_are_skipped() -> None:
    reports, missing = read_reports(
        "\n".join(["hello", "{}", "flashrec-doctor-report n1 0 1 !", "flashrec-doctor-report n1 0 1 aGk=", "\x00"])
    )
    assert (reports, missing) == ({}, set())
