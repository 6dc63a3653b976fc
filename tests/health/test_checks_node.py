"""The checks of memory, disks, mounts, clock, processes and daemons, against roots and commands of the tests' own."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.health.support import CHECKS, needs_root, run_check, run_raw, script, write_tree
from tests.support.cluster import wait_for

MEMINFO = "MemTotal:       1024000 kB\nMemFree: 1 kB\nMemAvailable:    512000 kB\n"


def says(found: dict[str, object], status: str, reason: str = "") -> bool:
    """True if this is the verdict; the assertion shows the whole one otherwise."""
    assert found["status"] == status, found
    assert reason in str(found["reason"]), found
    return True


@pytest.mark.parametrize("check", sorted(path.stem for path in CHECKS.glob("[a-z]*.py")))
def test_every_check_explains_itself_and_refuses_what_it_does_not_know(check: str) -> None:
    assert len(run_raw(check, "--help").stdout.splitlines()) > 5
    paths = ["/"] if check in ("disk", "mounts") else []
    done = run_raw(check, *paths, "--colour=red")
    assert done.returncode == 2 and "--colour" in done.stderr


# ---- memory


def test_memory_is_all_there(tmp_path: Path) -> None:
    proc = write_tree(tmp_path, {"meminfo": MEMINFO})
    found = run_check("memory", "--proc", proc, "--sys", tmp_path, "--total-mib", 1040)
    assert says(found, "ok")
    assert found["facts"] == {"total_mib": 1000, "available_mib": 500, "edac_controllers": 0}


def test_memory_is_missing_or_used_up(tmp_path: Path) -> None:
    proc = write_tree(tmp_path, {"meminfo": MEMINFO})
    found = run_check("memory", "--proc", proc, "--sys", tmp_path, "--total-mib", 2000)
    assert says(found, "fail", "1000 MiB of memory, expected 2000")
    found = run_check("memory", "--proc", proc, "--sys", tmp_path, "--min-available-mib", 501)
    assert says(found, "fail", "only 500 MiB of memory available")


def test_memory_makes_errors(tmp_path: Path) -> None:
    edac = "devices/system/edac/mc"
    files = {f"{edac}/mc0/ue_count": "0\n", f"{edac}/mc0/ce_count": "7\n", f"{edac}/mc0/dimm0/size": "1"}
    write_tree(tmp_path, {"meminfo": MEMINFO, **files})
    where = ("--proc", tmp_path, "--sys", tmp_path)
    assert says(run_check("memory", *where, "--dimms", 1), "ok")
    assert says(run_check("memory", *where, "--dimms", 2), "fail", "1 memory modules, expected 2")
    assert says(run_check("memory", *where, "--max-corrected", 6), "warn", "7 corrected memory errors")
    write_tree(tmp_path, {f"{edac}/mc0/ue_count": "1\n"})
    assert says(run_check("memory", *where), "fail", "1 uncorrected memory errors since boot (mc0)")
    (tmp_path / edac / "mc0/ue_count").unlink()
    assert says(run_check("memory", *where), "unknown", "mc0 has no error counts")


def test_memory_that_cannot_be_looked_at_is_unknown(tmp_path: Path) -> None:
    assert says(run_check("memory", "--proc", tmp_path), "unknown", "could not look")
    write_tree(tmp_path, {"meminfo": MEMINFO})
    found = run_check("memory", "--proc", tmp_path, "--sys", tmp_path, "--dimms", 4)
    assert says(found, "unknown", "no EDAC driver")
    write_tree(tmp_path, {"meminfo": "MemFree: 1 kB\n"})
    assert says(run_check("memory", "--proc", tmp_path, "--sys", tmp_path), "unknown", "no MemTotal")


# ---- disk


def test_disk_has_room_and_takes_a_write(tmp_path: Path) -> None:
    found = run_check("disk", "--min-free-percent", 0, "--min-inodes-percent", 0, "--write-test", tmp_path)
    assert says(found, "ok")
    assert list(tmp_path.iterdir()) == []  # nothing stays behind


def test_disk_is_full_or_gone(tmp_path: Path) -> None:
    assert says(run_check("disk", "--min-free-percent", 101, tmp_path), "fail", "% free, at least 101 % wanted")
    assert says(run_check("disk", "--min-inodes-percent", 101, tmp_path), "fail", "of its inodes free")
    assert says(run_check("disk", tmp_path / "no"), "fail", "no does not exist")


@needs_root
def test_disk_is_read_only(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", tmp_path], check=True)
    try:
        assert says(run_check("disk", "--min-free-percent", 0, tmp_path), "fail", "is mounted read-only")
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@needs_root
def test_disk_takes_no_write(tmp_path: Path) -> None:
    """No room for a single page more."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "none", tmp_path], check=True)
    try:
        (tmp_path / "page").write_bytes(b"x" * 4096)
        found = run_check("disk", "--min-free-percent", 0, "--write-test", tmp_path)
        assert says(found, "fail", "No space left on device")
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@needs_root
def test_disk_of_others_needs_root(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    argv = [sys.executable, "-EsSB", str(CHECKS / "disk.py"), "--min-free-percent", "0", "--write-test", str(closed)]
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *argv],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert '"unknown"' in done.stdout and "needs root" in done.stdout, done


# ---- mounts


def test_mounts_are_there_and_answer(tmp_path: Path) -> None:
    assert says(run_check("mounts", "/proc=proc", "/proc", "/proc=p*"), "ok")


def test_mounts_are_missing_or_of_another_kind(tmp_path: Path) -> None:
    assert says(run_check("mounts", "/proc=nfs*"), "fail", "/proc is mounted as proc, expected nfs*")
    assert says(run_check("mounts", tmp_path), "fail", "is not mounted")
    line = r"36 35 98:0 / /with\040blank rw,noatime shared:1 - ext4 /dev/sda rw"
    write_tree(tmp_path, {"self/mountinfo": line + "\n", "with blank/file": ""})
    where = ("--proc", tmp_path, "--root", tmp_path)
    assert says(run_check("mounts", *where, "/with blank=ext4"), "ok")
    assert says(run_check("mounts", "--proc", tmp_path, "--root", tmp_path / "no", "/with blank"), "fail", "be read")
    assert says(run_check("mounts", "--proc", tmp_path / "no", "/"), "unknown", "could not look")


def test_mounts_that_hang_are_named_and_left_behind(silent: Path) -> None:
    """The check ends at once; whoever hangs in the mount is its child, in its group, for the runner to kill."""
    process = subprocess.Popen(
        [sys.executable, "-EsSB", CHECKS / "mounts.py", "--timeout-s", "0.5", silent, "/nowhere"],
        stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        printed = process.stdout.readline().decode()
        assert process.wait(timeout=20) == 0
        assert f"{silent} does not answer within 0.5 s" in printed
        assert "/nowhere is not mounted" in printed
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()


# ---- clock

CHRONY = "C0A80001,192.168.0.1,3,1700000000.0,{offset},0.0,0.0,0.0,0.0,0.0,0.01,0.001,64.0,{leap}"


def clock_commands(tmp_path: Path, offset: str = "0.00001", leap: str = "Normal", skew_s: int = 0) -> list[object]:
    chronyc = script(tmp_path / "chronyc", f"echo {shlex.quote(CHRONY.format(offset=offset, leap=leap))}")
    scontrol = script(
        tmp_path / "scontrol",
        f'[ "$SLURM_TIME_FORMAT" = %s ] && echo "Configuration data as of $(($(date +%s) + {skew_s}))"; echo X = Y',
    )
    return ["--chronyc", chronyc, "--scontrol", scontrol, "--timedatectl", "/nonexistent"]


def test_clock_is_in_step(tmp_path: Path) -> None:
    found = run_check("clock", *clock_commands(tmp_path), "--controller")
    assert says(found, "ok")
    assert found["facts"] == {"offset_s": 0.00001, "leap": "Normal", "controller_skew_s": 0.0}


def test_clock_is_off(tmp_path: Path) -> None:
    assert says(run_check("clock", *clock_commands(tmp_path, offset="-2.5")), "fail", "2.500 s off")
    assert says(run_check("clock", *clock_commands(tmp_path, leap="Not synchronised")), "fail", "not synchronised")
    for skew_s in (60, -60):
        found = run_check("clock", *clock_commands(tmp_path, skew_s=skew_s), "--controller")
        assert says(found, "fail", "differs from the controller's by")
        assert 55 < found["facts"]["controller_skew_s"] < 65


def test_clock_without_anybody_to_ask_is_unknown(tmp_path: Path) -> None:
    nobody = ["--chronyc", "/nonexistent/chronyc", "--timedatectl", "/nonexistent/timedatectl"]
    assert says(run_check("clock", *nobody), "unknown", "no time service answers")
    found = run_check("clock", *nobody, "--controller", "--scontrol", "/nonexistent/scontrol")
    assert says(found, "unknown", "controller's clock could not be read")
    good = clock_commands(tmp_path)[2:4]
    assert says(run_check("clock", *nobody, "--controller", *good), "ok")
    strange = script(tmp_path / "strange", "echo Configuration data as of yesterday")
    found = run_check("clock", *nobody, "--controller", "--scontrol", strange)
    assert says(found, "unknown", "in another form")


def test_clock_of_systemd(tmp_path: Path) -> None:
    for answer, status in (("yes", "ok"), ("no", "warn")):
        timedatectl = script(tmp_path / answer, f"echo NTPSynchronized={answer}")
        assert says(run_check("clock", "--chronyc", "/nonexistent", "--timedatectl", timedatectl), status)


def test_clock_commands_may_hang(tmp_path: Path) -> None:
    slow = script(tmp_path / "slow", "exec sleep 600")
    found = run_check("clock", "--chronyc", slow, "--timedatectl", slow, "--timeout-s", 0.5)
    assert says(found, "unknown", "did not answer within 0.5 s")


# ---- processes


def stat_line(pid: int, name: str, state: str, start: int = 5) -> str:
    return f"{pid} ({name}) {state} " + " ".join(["0"] * 18) + f" {start} 0 0\n"


def test_processes_are_fine(tmp_path: Path) -> None:
    write_tree(tmp_path, {"1/stat": stat_line(1, "init", "S"), "2/stat": stat_line(2, "a ) D (", "S"), "x/stat": "x"})
    found = run_check("processes", "--proc", tmp_path, "--max-stuck", 0, "--max-zombies", 0)
    assert says(found, "ok")
    assert found["facts"] == {"processes": 2, "zombies": 0, "stuck": 0}


def test_processes_are_stuck_or_dead(tmp_path: Path) -> None:
    write_tree(tmp_path, {"1/stat": stat_line(1, "nfs client", "D"), "2/stat": stat_line(2, "gone", "Z")})
    where = ("--proc", tmp_path, "--interval-s", 0.1)
    assert says(run_check("processes", *where), "ok")
    found = run_check("processes", *where, "--max-stuck", 0)
    assert says(found, "fail", "1 processes in uninterruptible sleep, at most 0 wanted: nfs client")
    assert says(run_check("processes", *where, "--max-zombies", 0), "fail", "1 zombie processes")


def test_an_instant_in_sleep_is_not_stuck(tmp_path: Path) -> None:
    """The process goes on between the two looks; another one takes its number in state D."""
    write_tree(tmp_path, {"1/stat": stat_line(1, "io", "D")})
    argv = [sys.executable, "-EsSB", str(CHECKS / "processes.py"), "--proc", str(tmp_path), "--max-stuck", "0"]
    with subprocess.Popen([*argv, "--interval-s", "3"], stdout=subprocess.PIPE, text=True) as process:
        time.sleep(1)
        write_tree(tmp_path, {"1/stat": stat_line(1, "io", "D", start=6)})
        assert process.stdout is not None
        assert '"ok"' in process.stdout.read()


def test_load_warns(tmp_path: Path) -> None:
    write_tree(tmp_path, {"1/stat": stat_line(1, "init", "S"), "loadavg": "0.1 9999.0 0.1 1/2 3\n"})
    assert says(run_check("processes", "--proc", tmp_path, "--max-load-per-cpu", 2), "warn", "load of")


def test_no_processes_at_all_is_unknown(tmp_path: Path) -> None:
    assert says(run_check("processes", "--proc", tmp_path), "unknown", "no processes are visible")
    assert says(run_check("daemons", "--proc", tmp_path, "slurmd"), "unknown", "no processes are visible")


@needs_root
def test_a_real_uninterruptible_process_is_seen(frozen: Path) -> None:
    with subprocess.Popen(["touch", frozen / "file"]) as stuck:
        wait_for(lambda: " D " in Path(f"/proc/{stuck.pid}/stat").read_text(), "the process to be stuck")
        found = run_check("processes", "--max-stuck", 0, "--interval-s", 0.5)
        assert says(found, "fail", "touch")
        subprocess.run(["fsfreeze", "--unfreeze", frozen], check=True)


# ---- daemons


def test_daemons_run(tmp_path: Path) -> None:
    proc = write_tree(tmp_path / "proc", {"7/comm": "slurmd\n", "8/comm": "a-name-longer-t\n"})
    munge, unmunge = script(tmp_path / "munge", "echo MUNGE:x:"), script(tmp_path / "unmunge", "grep -q MUNGE:x:")
    commands = ("--munge", "--munge-command", munge, "--unmunge-command", unmunge)
    assert says(run_check("daemons", "--proc", proc, "slurmd", "a-name-longer-than-15", *commands), "ok")
    assert says(run_check("daemons", "--proc", proc, "slurmd", "munged"), "fail", "munged does not run")
    script(tmp_path / "unmunge", "exit 15")
    assert says(run_check("daemons", "--proc", proc, *commands), "fail", "its own credential: exit code 15")
    script(tmp_path / "munge", "echo munge: no socket >&2; exit 6")
    assert says(run_check("daemons", "--proc", proc, *commands), "fail", "munge: no socket")
