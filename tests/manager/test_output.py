"""The job's output: complete lines with their rank, last words of former lives, and no file followed for ever."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flashrec.manager import output
from flashrec.manager.output import LAST_WORDS_S, POLL_S, OutputFollower

LAST_POLLS = int(LAST_WORDS_S / POLL_S) + 2


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def follower(tmp_path: Path, stream: io.StringIO) -> OutputFollower:
    return OutputFollower(tmp_path, "all", stream)


def write(folder: Path, name: str, text: str) -> None:
    with (folder / name).open("a") as file:
        file.write(text)


def test_lines_are_shown_when_they_are_complete(follower, stream, tmp_path: Path) -> None:
    follower.watch(3, 1)
    follower.copy()
    write(tmp_path, "rank-3.1.log", "one\ntw")
    follower.copy()
    assert stream.getvalue() == "[rank 3] one\n"
    write(tmp_path, "rank-3.1.log", "o\nthree")
    follower.copy()
    follower.copy(final=True)
    assert stream.getvalue() == "[rank 3] one\n[rank 3] two\n[rank 3] three\n"


def test_last_words_of_a_former_life_may_come_late(follower, stream, tmp_path: Path) -> None:
    follower.watch(0, 1)
    follower.watch(0, 2)
    follower.copy()
    write(tmp_path, "rank-0.1.log", "late, and cut o")
    for _ in range(LAST_POLLS):
        follower.copy()
    assert stream.getvalue() == "[rank 0] late, and cut o\n"


def test_former_lives_are_forgotten_and_the_current_one_is_not(follower, stream, tmp_path: Path) -> None:
    for incarnation in range(1, 21):
        follower.watch(0, incarnation)
    assert follower.num_followed == 20
    for _ in range(LAST_POLLS):
        follower.copy()
    assert follower.num_followed == 1
    write(tmp_path, "rank-0.20.log", "still heard\n")
    follower.copy()
    assert stream.getvalue() == "[rank 0.20] still heard\n"


@pytest.mark.parametrize(("follow", "ranks"), [("all", 2), ("rank0", 1), ("none", 0)])
def test_what_is_followed(follow: str, ranks: int, tmp_path: Path, stream: io.StringIO) -> None:
    follower = OutputFollower(tmp_path, follow, stream)
    for rank in range(2):
        follower.watch(rank, 1)
    assert follower.num_followed == ranks


def test_a_huge_file_comes_in_pieces_and_in_the_end_entirely(
    follower, stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_CHUNK", 1000)
    text = "".join(f"line {number}\n" for number in range(10_000))
    write(tmp_path, "rank-0.1.log", text + "the end")
    follower.watch(0, 1)
    follower.copy()
    assert 0 < len(stream.getvalue()) < 5000
    follower.copy(final=True)
    shown = stream.getvalue().splitlines()
    assert [line.removeprefix("[rank 0] ") for line in shown] == [*text.splitlines(), "the end"]


def test_an_endless_line_is_shown_in_pieces(follower, stream, tmp_path: Path) -> None:
    """A progress bar that ends its lines with a carriage return."""
    write(tmp_path, "rank-0.1.log", "50 %\r" * 20_000)
    follower.watch(0, 1)
    follower.copy()
    assert stream.getvalue().count("50 %") == 20_000


def test_a_file_that_is_not_there_yet(follower, stream, tmp_path: Path) -> None:
    follower.watch(0, 1)
    follower.copy()
    follower.copy(final=True)
    assert stream.getvalue() == ""
    write(tmp_path, "rank-0.1.log", "late\n")
    follower.copy()
    assert stream.getvalue() == "[rank 0] late\n"


def test_bytes_that_are_no_text(follower, stream, tmp_path: Path) -> None:
    (tmp_path / "rank-0.1.log").write_bytes(b"caf\xe9\n")
    follower.watch(0, 1)
    follower.copy()
    assert stream.getvalue() == "[rank 0] caf\ufffd\n"


SCRIPT = """
import sys, pathlib
from flashrec.manager.output import OutputFollower
from flashrec.manager.voice import say
follower = OutputFollower(pathlib.Path(sys.argv[1]), "all")
follower.watch(0, 1)
follower.copy()
say("a word")
follower.copy(final=True)
sys.exit(3)
"""


@pytest.mark.parametrize("to", ["/dev/full", "closed"])
def test_a_full_or_closed_output_neither_stops_the_job_nor_changes_its_exit_code(to: str, tmp_path: Path) -> None:
    write(tmp_path, "rank-0.1.log", "caf\u00e9\n")
    where = ">&- 2>&-" if to == "closed" else f"> {to} 2> {to}"
    command = f'exec "$0" -c "$1" {tmp_path} {where}'
    environ = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(["sh", "-c", command, sys.executable, SCRIPT], check=False, env=environ)
    assert done.returncode == 3


def test_the_output_does_not_depend_on_the_locale(tmp_path: Path) -> None:
    write(tmp_path, "rank-0.1.log", "caf\u00e9\n")
    environ = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, check=False, env=environ)
    assert done.stdout == "[rank 0] caf\u00e9\n".encode()


def test_reading_holds_nobody_up(follower, monkeypatch: pytest.MonkeyPatch) -> None:
    """The filesystem hangs; the loop, which renews the agents' leases, goes on."""
    hangs = threading.Event()
    monkeypatch.setattr(follower, "copy", lambda: hangs.wait(10))

    async def play() -> None:
        task = asyncio.create_task(follower.run())
        for _ in range(10):
            await asyncio.sleep(0.001)
        hangs.set()
        task.cancel()

    started = time.monotonic()
    asyncio.run(play())
    assert time.monotonic() - started < 5


def test_very_many_files_are_read_in_turn(stream: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MAX_LOOKS", 3)
    looks: list[int] = []
    take = output._take
    monkeypatch.setattr(output, "_take", lambda one, lines: (looks.append(one.rank), take(one, lines))[1])
    follower = OutputFollower(tmp_path, "all", stream)
    for rank in range(7):
        follower.watch(rank, 1)
        (tmp_path / f"rank-{rank}.1.log").write_text("hello\n")
    for _ in range(7):
        follower.copy()
    assert sorted(looks) == sorted([*range(7)] * 3), "each as often as any other, three at a time"
    follower.copy(final=True)
    assert stream.getvalue().count("hello") == 7
