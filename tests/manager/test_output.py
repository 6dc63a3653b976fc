"""The job's output: complete lines with their rank, last words of former lives, and no file followed for ever."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

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
