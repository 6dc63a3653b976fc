"""The journal: every line whole, in order, whatever the disk does; a slow disk holds nobody up."""

from __future__ import annotations

import collections
import errno
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

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
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    return Disk(monkeypatch)


def close(journal: Journal) -> None:
    """At once, and nothing of it is left."""
    journal.close()
    assert not journal._writer.is_alive()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(journal._fd)


def test_kinds_of_lines(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", print)
    journal.event(e.WorkerJoined(1, 2), 12.5, 3, Phase.RUNNING)
    journal.effect(fx.ChangePhase(Phase.RUNNING, Phase.FENCING, 4, "why"), 4)
    journal.effect(fx.AnnounceResume(4), 4)
    journal.verdict("node n1", "dead", "silent", 4)
    journal.note("hello", answer=42)
    close(journal)
    said = lines(tmp_path / "j")
    assert [x["kind"] for x in said] == ["event", "phase", "effect", "verdict", "note"]
    assert [x["seq"] for x in said] == [1, 2, 3, 4, 5]
    assert said[0]["mono"] == 12.5, "the time that the machine was given"
    assert said[0]["event"] == {"type": "WorkerJoined", "rank": 1, "incarnation": 2}
    assert (said[1]["from"], said[1]["to"]) == ("RUNNING", "FENCING")


def test_events_that_were_said_together_have_one_time(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", print)
    for now in (12.5, 12.5, 13.0):
        journal.event(e.WorkerJoined(1, 2), now, 3, Phase.RUNNING)
        time.sleep(0.002)
    journal.note("x")
    close(journal)
    first, second, third, note = (line["wall"] for line in lines(tmp_path / "j"))
    assert first == second < third < note


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
    close(journal)
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
    close(journal)
    assert len(complaints) == 1


def test_torn_writes_make_whole_lines(tmp_path: Path, disk: Disk) -> None:
    disk.at_most = 7
    journal = Journal(tmp_path / "j", print)
    for number in range(10):
        journal.note("x", number=number)
    close(journal)
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
    assert journal._writer.is_alive(), "the disk has not answered yet"
    disk.open.set()


def test_after_its_end_it_takes_nothing_and_breaks_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", print)
    journal.note("x")
    close(journal)
    journal.note("y")
    assert journal.num_kept == 0
    journal.close()
    assert len(lines(tmp_path / "j")) == 1


def test_bytes_that_are_no_text_do_not_stop_the_job(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", print)
    journal.note("job started", command=("python", os.fsdecode(b"caf\xe9.py")))
    journal.close()
    assert lines(tmp_path / "j")[0]["command"][0] == "python"


def test_a_journal_of_nothing_is_removed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", print)
    journal.discard()
    journal.discard()
    close(journal)
    assert not (tmp_path / "j").exists()


# ---- between the loop and the thread


def test_a_full_disk_is_tried_now_and_then(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 60.0)
    complaints: list[str] = []
    journal = Journal(tmp_path / "j", complaints.append)
    disk.full = True
    journal.note("x")
    until(lambda: complaints)
    time.sleep(0.1)
    assert disk.refusals == 1
    close(journal)


def test_lines_are_gathered_without_waking_the_thread_for_each(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GATHER_S", 60.0)
    journal = Journal(tmp_path / "j", print)
    notify, woken = journal._changed.notify, list[int]()
    monkeypatch.setattr(journal._changed, "notify", lambda: (woken.append(len(woken)), notify()))
    until(lambda: journal._rests)
    journal.note("x")
    until(lambda: not journal._rests)
    for _ in range(99):
        journal.note("x")
    assert len(woken) == 1 and disk.writes == 0
    close(journal)
    assert len(lines(tmp_path / "j")) == 100 and disk.writes == 1


def test_at_the_end_nothing_is_gathered_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GATHER_S", 60.0)
    journal = Journal(tmp_path / "j", print)
    until(lambda: journal._rests)
    close(journal)


def test_not_all_lines_are_taken_at_once(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """While many are put together the loop stands still."""
    monkeypatch.setattr(module, "MAX_LINES_AT_ONCE", 10)
    journal = Journal(tmp_path / "j", print)
    disk.open.clear()
    for _ in range(100):
        journal.note("x")
    disk.open.set()
    close(journal)
    assert len(lines(tmp_path / "j")) == 100 and disk.writes >= 10


def test_a_line_is_added_without_the_lock_while_the_thread_writes(tmp_path: Path, disk: Disk) -> None:
    """Whoever has it may be held up for as long as the system likes."""
    journal = Journal(tmp_path / "j", print)
    disk.open.clear()
    journal.note("first")
    until(lambda: not journal.num_kept)
    adding = threading.Thread(target=journal.note, args=("second",), daemon=True)
    with journal._changed:
        adding.start()
        adding.join(DEADLINE_S)
        assert not adding.is_alive()
    disk.open.set()
    close(journal)
    assert [line["what"] for line in lines(tmp_path / "j")] == ["first", "second"]


class Slowly(collections.deque[bytes]):
    """Lines that are kept, with a moment of time where another thread could come between: before one is added, or when
    it has been seen that there is none."""

    before_append: Callable[[], None] = staticmethod(lambda: None)
    seen_empty: Callable[[], None] = staticmethod(lambda: None)

    def append(self, line: bytes) -> None:
        self.before_append()
        super().append(line)

    def __len__(self) -> int:
        found = super().__len__()
        if not found:
            self.seen_empty()
        return found


def test_a_line_is_there_before_the_thread_is_woken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "collections", SimpleNamespace(deque=Slowly))
    journal = Journal(tmp_path / "j", print)
    until(lambda: journal._rests)
    journal._kept.before_append = lambda: time.sleep(0.1)  # type: ignore[attr-defined]
    journal.note("x")
    until(lambda: len(lines(tmp_path / "j")) == 1)
    close(journal)


def test_a_line_that_comes_when_the_thread_is_about_to_rest_wakes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has seen that there is none, and does not wait yet."""
    monkeypatch.setattr(module, "collections", SimpleNamespace(deque=Slowly))
    journal = Journal(tmp_path / "j", print)
    until(lambda: journal._rests)
    adding = threading.Thread(target=journal.note, args=("second",), daemon=True)

    def seen_empty() -> None:
        if threading.current_thread() is journal._writer and adding.ident is None:
            adding.start()
            adding.join(0.2)  # with the rule kept it waits for the lock now

    journal._kept.seen_empty = seen_empty  # type: ignore[attr-defined]
    journal.note("first")
    until(lambda: len(lines(tmp_path / "j")) == 2)
    close(journal)
