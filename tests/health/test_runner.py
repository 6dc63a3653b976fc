"""The runner against checks that do everything a check should not do."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashrec.health import CheckFileError, Status, run_checks
from flashrec.health.catalog import doubt_about
from flashrec.health.checkfile import parse
from flashrec.health.process import KILL_GRACE_S, _Pipe, run_bounded
from tests.health.support import CheckDir, needs_root, only_finding, statuses, verdict
from tests.support.cluster import is_gone, wait_for

ENV = {"PATH": os.defpath}


def test_every_verdict_is_taken_as_it_is(checks: CheckDir) -> None:
    for name, status in (("a", "ok"), ("b", "warn"), ("c", "fail"), ("d", "unknown")):
        checks.says(name, status, "" if status == "ok" else f"because of {name}")
    report = checks.run("* || a", "* || b", "* || c", "* || d")
    assert statuses(report) == ["ok", "warn", "fail", "unknown"]
    assert report.findings[2].verdict.reason == "because of c"
    assert (report.node, report.status) == ("n1", Status.FAIL)
    assert checks.run("* || a", "* || b", "* || d").status is Status.UNKNOWN
    assert checks.run("* || a", "* || b").status is Status.WARN
    assert checks.run("* || a").status is Status.OK


def test_only_what_is_for_this_node_is_run(checks: CheckDir, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        checks.add(name, f"touch {tmp_path}/{name}-ran; echo '{verdict(name)}'")
    lines = ("n1 || a", "n2 || b", "@big || c")
    report = checks.run(*lines, features=("big",))
    assert [finding.label for finding in report.findings] == ["a", "c"]
    assert not (tmp_path / "b-ran").exists()
    report = checks.run(*lines, features=None)
    assert statuses(report) == ["ok", "unknown"]
    assert "features of this node are not known" in report.findings[1].verdict.reason
    assert [f.label for f in checks.run(*lines, features=("big",), only=("c",)).findings] == ["c"]


def test_arguments_and_environment_reach_the_check(checks: CheckDir) -> None:
    checks.add("a", """printf '{"check":"a","status":"warn","reason":"%s|%s|%s"}' "$*" "$FLASHREC_NODE" "$SECRET" """)
    report = checks.run('* || a one "t w o"', environ={"SECRET": "x", "PATH": os.defpath})
    assert only_finding(report).verdict.reason == "one t w o|n1|"


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("true", "printed nothing"),
        ("echo all is well", "printed no verdict"),
        ("printf '\\377\\376'", "printed no verdict"),
        ("""echo '{"check":"a","status":"ok"'""", "printed no verdict"),
        ("""echo '{"check":"b","status":"ok"}'""", "printed a verdict of 'b'"),
        ("""echo '{"check":"a","status":"fine"}'""", "Invalid enum value 'fine'"),
        ("""echo '{"check":"a","status":"fail"}'""", "status fail without a reason"),
        ("""echo '{"check":"a","status":"ok","extra":1}'""", "unknown field `extra`"),
        ("""echo '{"check":"a","status":"ok","facts":{"x":{"y":1}}}'""", "printed no verdict"),
        ("""echo '{"check":"a","status":"ok"}{"check":"a","status":"ok"}'""", "printed no verdict"),
        ("""printf '{"check":"a","status":"fail","reason":"x\\\\ny"}'""", "not one line of printable text"),
        ("""echo '{"check":"a","status":"ok"}'; exit 3""", "ended with exit code 3"),
        ("echo of no use >&2; exit 2", "ended with exit code 2: of no use"),
        ("kill -SEGV $$", "was killed by signal 11"),
        ("/nonexistent/program", "ended with exit code 127"),
    ],
)
def test_what_is_not_exactly_a_verdict_is_unknown(checks: CheckDir, script: str, says: str) -> None:
    checks.add("a", script)
    finding = only_finding(checks.run("* || a"))
    assert finding.verdict.status is Status.UNKNOWN
    assert says in finding.verdict.reason
    assert finding.verdict.reason.isprintable()


def test_a_line_may_call_the_unknown_a_failure(checks: CheckDir) -> None:
    checks.add("a", "true")
    checks.says("b", "unknown", "needs root")
    assert checks.run("* || when_unknown=fail a", "* || when_unknown=fail b").status is Status.FAIL
    assert statuses(checks.run("when_unknown = fail", "* || a", "* || when_unknown=unknown b")) == ["fail", "unknown"]


@pytest.mark.parametrize("to", ["stdout", "stderr"])
def test_a_flood_is_cut_and_ended(checks: CheckDir, tmp_path: Path, to: str) -> None:
    checks.add("a", f"echo $$ >{tmp_path}/pid; exec yes {'>&2' if to == 'stderr' else ''}")
    started = time.monotonic()
    finding = only_finding(checks.run("* || timeout_s=25 a"))
    assert time.monotonic() - started < 20  # not only because its time was over
    assert finding.verdict.status is Status.UNKNOWN
    assert "printed without end" in finding.verdict.reason
    wait_for(lambda: is_gone(int((tmp_path / "pid").read_text())), "the end of the flood")


def test_a_hanging_check_is_ended_with_all_it_started(checks: CheckDir, tmp_path: Path) -> None:
    checks.add("a", f"sleep 600 & echo $! >{tmp_path}/child; trap '' TERM INT; sleep 601 & echo $! >{tmp_path}/2; wait")
    checks.says("b")
    report = checks.run("* || timeout_s=2 a", "* || b")
    assert statuses(report) == ["unknown", "ok"]
    assert report.findings[0].verdict.reason == "did not end within 2 s"
    for name in ("child", "2"):
        wait_for(lambda name=name: is_gone(int((tmp_path / name).read_text())), f"the end of {name}")
    assert checks.run("* || timeout_s=2 when_hung=fail a").status is Status.FAIL


def test_a_stopped_check_is_ended(checks: CheckDir, tmp_path: Path) -> None:
    checks.add("a", f"echo $$ >{tmp_path}/pid; kill -STOP $$")
    assert statuses(checks.run("* || timeout_s=2 a")) == ["unknown"]
    wait_for(lambda: is_gone(int((tmp_path / "pid").read_text())), "the end of the stopped check")


def test_what_a_check_leaves_running_is_killed_and_not_waited_for(checks: CheckDir, tmp_path: Path) -> None:
    """The child holds the check's output open."""
    checks.add("a", f"sleep 600 & echo $! >{tmp_path}/child; echo '{verdict('a')}'")
    started = time.monotonic()
    assert statuses(checks.run("* || timeout_s=24 a")) == ["ok"]
    assert time.monotonic() - started < 20
    wait_for(lambda: is_gone(int((tmp_path / "child").read_text())), "the end of the child")


def test_a_descendant_that_left_the_group_is_not_waited_for(checks: CheckDir, tmp_path: Path) -> None:
    checks.add("a", f"setsid sleep 600 & echo $! >{tmp_path}/child; echo '{verdict('a')}'")
    started = time.monotonic()
    try:
        assert statuses(checks.run("* || timeout_s=24 a")) == ["ok"]
        assert time.monotonic() - started < 20
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_all_checks_together_have_a_limit(checks: CheckDir) -> None:
    checks.add("a", "sleep 600")
    lines = ["parallel = 1", "run_timeout_s = 2", *["* || timeout_s=1.5 a"] * 3]
    started = time.monotonic()
    report = checks.run(*lines)
    assert time.monotonic() - started < 15
    assert statuses(report) == ["unknown"] * 3
    assert report.findings[0].verdict.reason == "did not end within 1.5 s"
    assert report.findings[2].verdict.reason == "not run: the checks before it used up run_timeout_s"


def test_checks_run_side_by_side(checks: CheckDir, tmp_path: Path) -> None:
    """Each waits for the other: one after the other they would never end."""
    os.mkfifo(tmp_path / "fifo")
    checks.add("a", f"echo x >{tmp_path}/fifo; echo '{verdict('a')}'")
    checks.add("b", f"read x <{tmp_path}/fifo; echo '{verdict('b')}'")
    assert statuses(checks.run("* || a", "* || b")) == ["ok", "ok"]
    report = checks.run("parallel = 1", "* || timeout_s=1 a", "* || timeout_s=1 b")
    assert statuses(report) == ["unknown", "unknown"]


def test_the_runners_caller_is_not_held_up(checks: CheckDir) -> None:
    """An agent has other things to do: its loop goes on while checks run."""
    checks.add("a", "sleep 600")

    async def count() -> int:
        turns = 0
        task = asyncio.create_task(run_one(checks))
        while not task.done():
            await asyncio.sleep(0.01)
            turns += 1
        return turns

    async def run_one(checks: CheckDir) -> None:
        await run_checks(checks.plan("* || timeout_s=1 a"), "n1")

    assert asyncio.run(count()) > 10


def test_cancelling_ends_the_checks(checks: CheckDir, tmp_path: Path) -> None:
    checks.add("a", f"echo $$ >{tmp_path}/pid; sleep 600")

    async def cancel() -> None:
        task = asyncio.create_task(run_checks(checks.plan("* || a"), "n1"))
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancel())
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: is_gone(pid), "the end of the check")


def test_a_check_that_no_signal_reaches_is_left_behind(checks: CheckDir, tmp_path: Path, frozen: Path) -> None:
    checks.add("a", f"echo $$ >{tmp_path}/pid; exec touch {frozen}/file")
    started = time.monotonic()
    finding = only_finding(checks.run("* || timeout_s=2 when_hung=fail a"))
    assert time.monotonic() - started < 15
    assert finding.verdict.status is Status.FAIL
    assert finding.verdict.reason == "did not end within 2 s; it outlives SIGKILL in state D"
    assert not is_gone(int((tmp_path / "pid").read_text()))  # the fault was real


def test_a_program_on_a_dead_file_server_does_not_hang_its_starter(silent: Path) -> None:
    """exec itself does not return, and whoever waits for it hangs where only SIGKILL helps; so in a process apart."""
    code = (
        "import asyncio, sys; from flashrec.health.process import run_bounded\n"
        "print(asyncio.run(run_bounded([sys.argv[1]], {}, 0.5)).exit_code)"
    )
    argv = [sys.executable, "-c", code, str(silent / "check")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == "None\n", done


def test_what_was_written_before_the_end_is_read_after_it() -> None:
    async def read() -> bytes:
        reader, writer = os.pipe()
        pipe = _Pipe(reader, 1000, lambda: None)
        os.write(writer, b"words")
        pipe.read_rest()
        pipe.close()
        os.close(reader)
        os.close(writer)
        return bytes(pipe.data)

    assert asyncio.run(read()) == b"words"


def test_the_rest_of_the_output_is_read_after_the_end() -> None:
    ended = asyncio.run(run_bounded(["sh", "-c", "head -c 60000 /dev/zero"], ENV, 10))
    assert (ended.exit_code, len(ended.out), ended.is_flood, ended.stuck) == (0, 60000, False, "")


def test_time_is_the_only_limit_of_a_quiet_program() -> None:
    started = time.monotonic()
    ended = asyncio.run(run_bounded(["sleep", "600"], ENV, 0.2))
    assert ended.exit_code is None and ended.stuck == ""
    assert time.monotonic() - started < 10 + KILL_GRACE_S


def test_no_descriptors_are_left(checks: CheckDir) -> None:
    checks.add("a", "sleep 600")
    checks.says("b")
    checks.run("* || b")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        checks.run("* || timeout_s=0.1 a", "* || b")
    assert len(os.listdir("/proc/self/fd")) == before


# ---- which programs are run at all


def test_a_check_that_does_not_exist_ends_it_before_anything_is_run(checks: CheckDir, tmp_path: Path) -> None:
    checks.add("a", f"touch {tmp_path}/ran")
    with pytest.raises(CheckFileError, match=r"test.conf:3: there is no check b in .*; there are: a"):
        checks.run("* || a", "* || b")
    assert not (tmp_path / "ran").exists()


def test_what_cannot_be_executed_is_named(checks: CheckDir) -> None:
    checks.add("a", "true", mode=0o644)
    with pytest.raises(CheckFileError, match="is not executable"):
        checks.run("* || a")


def test_a_check_directory_that_is_not_there_is_named() -> None:
    with pytest.raises(CheckFileError, match="check_dir = /nonexistent: no such directory"):
        asyncio.run(run_checks(parse("check_dir = /nonexistent\n* || a", "f"), "n1"))


@needs_root
def test_root_runs_nothing_that_others_can_change(checks: CheckDir, tmp_path: Path) -> None:
    path = checks.says("a")
    path.chmod(0o775)
    with pytest.raises(CheckFileError, match=r"not run as root: .*a can be written by others"):
        checks.run("* || a")
    path.chmod(0o755)
    os.chown(path, 65534, 65534)
    with pytest.raises(CheckFileError, match="belongs to user 65534"):
        checks.run("* || a")
    os.chown(path, 0, 0)
    checks.folder.chmod(0o777)
    with pytest.raises(CheckFileError, match="checks can be written by others"):
        checks.run("* || a")
    checks.folder.chmod(0o755)
    assert statuses(checks.run("* || a")) == ["ok"]


@needs_root
def test_a_link_is_judged_by_what_it_leads_to(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.touch(mode=0o666)
    target.chmod(0o666)
    (tmp_path / "link").symlink_to(target)
    assert "target can be written" in doubt_about(tmp_path / "link")


@needs_root
def test_a_link_that_somebody_else_can_turn_elsewhere_is_doubtful(tmp_path: Path) -> None:
    """Else they could, between the look and the start of what it leads to."""
    theirs, target = tmp_path / "theirs", tmp_path / "checks"
    theirs.mkdir()
    target.mkdir(mode=0o755)
    (target / "disk").touch(mode=0o755)
    (tmp_path / "link").symlink_to(theirs / "inner")
    (theirs / "inner").symlink_to(target)
    assert doubt_about(tmp_path / "link" / "disk") == ""
    os.lchown(theirs / "inner", 65534, 65534)
    assert "inner belongs to user 65534" in doubt_about(tmp_path / "link" / "disk")
    os.lchown(theirs / "inner", 0, 0)
    os.chown(theirs, 65534, 65534)
    assert "theirs belongs to user 65534" in doubt_about(tmp_path / "link" / "disk")


@needs_root
def test_links_in_a_circle_cannot_be_judged(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="symbolic links"):
        doubt_about(tmp_path / "a")
