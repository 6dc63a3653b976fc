"""The journal: every line whole, in order, whatever the disk does; a slow disk holds nobody up."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path

import pytest

from flashrec.core import effects as fx
from flashrec.core import events as e
from flashrec.core.types import Phase
from flashrec.manager import journal as module
from flashrec.manager.journal import Journal

DEADLINE_S = 10.0


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def until(condition) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Disk:
    """Stands for os.write: full, slow, or taking only so many bytes, for as long as the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full, self.at_most, self.open = False, 1 << 30, threading.Event()
        self.refusals = self.writes = 0
        self.open.set()
        self._write = os.write
        monkeypatch.setattr(module.os, "write", self.write)

    def write(self, fd: int, data: bytes) -> int:
        self.open.wait(DEADLINE_S)
        self.writes += 1
        if self.full:
            self.refusals += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._write(fd, data[: self.at_most])


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_kinds_of_lines(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", print)
    journal.event(e.WorkerJoined(1, 2), 12.5, 3, Phase.RUNNING)
    journal.effect(fx.ChangePhase(Phase.RUNNING, Phase.FENCING, 4, "why"), 4)
    journal.effect(fx.AnnounceResume(4), 4)
    journal.verdict("node n1", "dead", "silent", 4)
    journal.note("hello", answer=42)
    journal.close()
    said = lines(tmp_path / "j")
    assert [x["kind"] for x in said] == ["event", "phase", "effect", "verdict", "note"]
    assert [x["seq"] for x in said] == [1, 2, 3, 4, 5]
    assert said[0]["mono"] == 12.5, "the time that the machine was given"
    assert said[0]["event"] == {"type": "WorkerJoined", "rank": 1, "incarnation": 2}
    assert (said[1]["from"], said[1]["to"]) == ("RUNNING", "FENCING")


def test_a_full_disk_is_told_once_and_nothing_is_lost(tmp_path: Path, disk: Disk) -> None:
    complaints: list[str] = []
    journal = Journal(tmp_path / "j", complaints.append)
    journal.note("before")
    until(lambda: len(lines(tmp_path / "j")) == 1)
    disk.full = True
    for number in range(20):
        journal.note("during", number=number)
        until(lambda: disk.refusals > number)  # noqa: B023
    until(lambda: complaints)
    disk.full = False
    journal.note("after")
    journal.close()
    assert [x["seq"] for x in lines(tmp_path / "j")] == list(range(1, 23))
    (complaint,) = complaints
    assert "No space left on device" in complaint and "the job goes on" in complaint


def test_each_outage_of_the_disk_is_told(tmp_path: Path, disk: Disk) -> None:
    complaints: list[str] = []
    journal = Journal(tmp_path / "j", complaints.append)
    for count in (1, 2):
        disk.full = True
        journal.note("x")
        until(lambda: len(complaints) == count)  # noqa: B023
        disk.full = False
        journal.note("y")
        until(lambda: len(lines(tmp_path / "j")) == 2 * count)  # noqa: B023
    journal.close()


def test_a_device_that_is_always_full(tmp_path: Path) -> None:
    complaints: list[str] = []
    journal = Journal(Path("/dev/full"), complaints.append)
    for _ in range(100):
        journal.note("x")
    journal.close()
    assert len(complaints) == 1


def test_torn_writes_make_whole_lines(tmp_path: Path, disk: Disk) -> None:
    disk.at_most = 7
    journal = Journal(tmp_path / "j", print)
    for number in range(10):
        journal.note("x", number=number)
    journal.close()
    assert [x["number"] for x in lines(tmp_path / "j")] == list(range(10))


def test_what_is_kept_is_bounded_and_a_torn_line_stays_whole(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_KEPT_LINES", 5)
    complaints: list[str] = []
    journal = Journal(tmp_path / "j", complaints.append)
    disk.at_most = 7
    disk.open.clear()
    journal.note("first")  # is being written while the disk hangs, then it is full
    until(lambda: not journal.num_kept)
    disk.full = True
    disk.open.set()
    until(lambda: complaints)
    for number in range(50):
        journal.note("x", number=number)
    assert journal.num_kept == 5
    disk.full = False
    journal.close()
    said = lines(tmp_path / "j")
    assert said[0]["what"] == "first"
    assert [x.get("number") for x in said[1:]] == [45, 46, 47, 48, 49], "the newest are kept; seq shows the gap"


def test_a_slow_disk_holds_nobody_up(tmp_path: Path, disk: Disk) -> None:
    journal = Journal(tmp_path / "j", print)
    disk.open.clear()
    started = time.monotonic()
    for _ in range(100):
        journal.note("x")
    assert time.monotonic() - started < 1.0, "the manager's loop would stand still, and its agents lose their lease"
    disk.open.set()
    journal.close()
    assert len(lines(tmp_path / "j")) == 100


def test_lines_that_have_piled_up_are_written_together(tmp_path: Path, disk: Disk) -> None:
    journal = Journal(tmp_path / "j", print)
    disk.open.clear()
    for _ in range(1000):
        journal.note("x")
    disk.open.set()
    journal.close()
    assert len(lines(tmp_path / "j")) == 1000 and disk.writes <= 3


def test_a_disk_that_hangs_for_ever_does_not_hold_up_the_end(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.1)
    journal = Journal(tmp_path / "j", print)
    disk.open.clear()
    journal.note("x")
    journal.close()
    disk.open.set()


def test_after_its_end_it_takes_nothing_and_breaks_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", print)
    journal.note("x")
    journal.close()
    journal.note("y")
    assert journal.num_kept == 0
    journal.close()
    assert len(lines(tmp_path / "j")) == 1


def test_bytes_that_are_no_text_do_not_stop_the_job(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", print)
    journal.note("job started", command=("python", os.fsdecode(b"caf\xe9.py")))
    journal.close()
    assert lines(tmp_path / "j")[0]["command"][0] == "python"
