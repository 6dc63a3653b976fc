"""The program that slurmd runs: the watchdog over everything, and what it finds out for itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.health.support import LAUNCHER, needs_root, script
from tests.support.cluster import is_gone, wait_for


def launch(*args: object, env: dict[str, str] | None = None, timeout_s: float = 60) -> float:
    """Run as slurmd does: little environment, a pipe that is read to its end. Returns how long it took."""
    started = time.monotonic()
    done = subprocess.run(
        [LAUNCHER, *map(str, args)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=env if env is not None else {"SLURMD_NODENAME": "n1"}, timeout=timeout_s, check=False, cwd="/",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, b"")
    return time.monotonic() - started


def test_the_program_gets_what_it_needs(tmp_path: Path) -> None:
    program = script(tmp_path / "flashrec", f'{{ echo "$*"; env; }} >{tmp_path}/got; echo out; echo "<4>words" >&2')
    launch("--flashrec", program, "--config", "/some/file", "--log", tmp_path / "log")
    got = (tmp_path / "got").read_text().splitlines()
    assert got[0] == "node-health --slurm --config /some/file"
    assert "SLURMD_NODENAME=n1" in got
    (path,) = [line for line in got if line.startswith("PATH=")]
    assert "/usr/bin" in path and "/usr/sbin" in path
    assert not any(line.startswith("SLURM_CONF=") for line in got)
    assert (tmp_path / "log").read_text() == "<4>words\n"


def test_what_it_says_goes_to_syslog_with_its_level(tmp_path: Path) -> None:
    program = script(tmp_path / "flashrec", 'echo "<4>words of warning" >&2')
    script(tmp_path / "logger", f'{{ echo "$*"; cat; }} >{tmp_path}/logged')
    launch("--flashrec", program, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    logged = (tmp_path / "logged").read_text()
    assert "--prio-prefix" in logged and "flashrec-node-health" in logged
    assert "<4>words of warning" in logged


def test_the_exit_code_is_nobodys_business(tmp_path: Path) -> None:
    launch("--flashrec", script(tmp_path / "flashrec", "exit 7"), "--log", tmp_path / "log")


def test_nothing_of_it_is_left_after_a_good_run(tmp_path: Path) -> None:
    """Not even the timer, which would run on for a minute; an own copy of sleep tells its pid."""
    real = shutil.which("sleep")
    script(tmp_path / "sleep", f"echo $$ >{tmp_path}/timer; exec {real} 600")
    program = script(tmp_path / "flashrec", f"while [ ! -s {tmp_path}/timer ]; do {real} 0.01; done")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    launch("--flashrec", program, "--log", tmp_path / "log", env=env)
    wait_for(lambda: is_gone(int((tmp_path / "timer").read_text())), "the end of the timer")


def test_a_hanging_program_is_killed_with_all_it_started(tmp_path: Path) -> None:
    program = script(
        tmp_path / "flashrec",
        f"trap '' TERM INT HUP USR1; sleep 600 & echo $! >{tmp_path}/child; echo $$ >{tmp_path}/pid; wait",
    )
    took = launch("--flashrec", program, "--log", tmp_path / "log", "--limit-s", 1)
    assert took < 20
    for name in ("pid", "child"):
        wait_for(lambda name=name: is_gone(int((tmp_path / name).read_text())), f"the end of {name}")
    assert "<3>did not end within 1 s and was killed" in (tmp_path / "log").read_text()


def test_a_program_that_no_signal_reaches_is_left_behind(tmp_path: Path, frozen: Path) -> None:
    program = script(tmp_path / "flashrec", f"echo $$ >{tmp_path}/pid; exec touch {frozen}/file")
    took = launch("--flashrec", program, "--log", tmp_path / "log", "--limit-s", 1)
    assert took < 20
    assert " D " in Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat").read_text()  # the fault was real


def test_no_flashrec_is_said_and_harms_nobody(tmp_path: Path) -> None:
    launch("--flashrec", "/nonexistent/flashrec", "--log", tmp_path / "log")
    assert "no flashrec command is installed" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    "args", [["--colour", "red"], ["--config"], ["--limit-s", "0"], ["--limit-s", "58"], ["--limit-s", "x"], ["x"]]
)
def test_wrong_options_are_told_to_whom_typed_them(args: list[str]) -> None:
    done = subprocess.run([LAUNCHER, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "usage: flashrec-node-health" in done.stderr


@needs_root
def test_slurmd_is_looked_at_for_what_it_does_not_tell(tmp_path: Path) -> None:
    """Its SLURM_CONF and the folder of its commands. A shell under slurmd's name stands in for it."""
    slurmd = tmp_path / "opt/slurm/sbin/slurmd"
    slurmd.parent.mkdir(parents=True)
    shutil.copy("/bin/sh", slurmd)
    program = script(tmp_path / "flashrec", f"env >{tmp_path}/got")
    command = f"env -i PATH=/nonexistent {LAUNCHER} --flashrec {program} --log {tmp_path}/log; true"
    subprocess.run([slurmd, "-c", command], env={"SLURM_CONF": "/etc/mine.conf", "PATH": os.defpath}, check=True)
    got = (tmp_path / "got").read_text().splitlines()
    assert "SLURM_CONF=/etc/mine.conf" in got
    (path,) = [line for line in got if line.startswith("PATH=")]
    assert path.startswith(f"PATH=/nonexistent:{slurmd.parent}/../bin:/usr/sbin:/usr/bin:")
