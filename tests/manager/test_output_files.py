"""srun's -o: which file gets the output of which rank, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrec.manager.output import OutputFollower
from flashrec.manager.output_files import OutputFiles, output_file
from flashrec.manager.request import OutputFile, RequestError

ENVIRON = {"SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "a/b", "USER": "alice"}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("out", "out"),
        ("out-%j", "out-17"),
        ("out-%5j.%t", "out-00017.3"),
        ("%A_%a.%2t.%u", "17_4294967294.03.alice"),
        ("%x.100%%", "a_b.100%"),
        ("/tmp/%j", "/tmp/17"),
    ],
)
def test_patterns(pattern: str, name: str, tmp_path: Path) -> None:
    assert OutputFiles(OutputFile(pattern), ENVIRON).path(3) == tmp_path / name


@pytest.mark.parametrize(
    ("pattern", "said"),
    [("%N", "%N cannot be used: ranks move"), ("a%s", "%s"), ("%J", "use %j"), ("%q", "known are"), ("a%", "known are"),
     ("", "needs a file")],
)  # fmt: skip
def test_what_cannot_be_known_is_refused(pattern: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        OutputFiles(OutputFile(pattern), ENVIRON)


def test_a_file_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"cannot write .*nowhere/out-0: No such file"):
        OutputFiles(OutputFile("nowhere/out-%t"), ENVIRON).open_all(2)


@pytest.mark.parametrize(("is_appended", "text"), [(False, "new\n"), (True, "old\nnew\n")])
def test_what_was_there_before(is_appended: bool, text: str, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("old\n")
    files = OutputFiles(OutputFile("out", is_appended), ENVIRON)
    files.open_all(2)
    files.write(0, b"new\n")
    files.close()
    assert (tmp_path / "out").read_text() == text


@pytest.mark.parametrize(
    ("pattern", "is_labelled", "expected"),
    [
        ("all", False, {"all": ["one", "two"]}),
        ("all", True, {"all": ["[rank 0] one", "[rank 1] two"]}),
        ("r%t", False, {"r0": ["one"], "r1": ["two"]}),
    ],
)
def test_the_follower_writes_there(
    pattern: str, is_labelled: bool, expected: dict[str, list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    files = OutputFiles(OutputFile(f"out-{pattern}", is_labelled=is_labelled), ENVIRON)
    follower = OutputFollower(logs, "all", files=files)
    for rank, text in enumerate(("one\n", "two")):
        follower.watch(rank, 1)
        (logs / f"rank-{rank}.1.log").write_text(text)
    follower.copy(final=True)
    assert {name: (tmp_path / f"out-{name}").read_text().splitlines() for name in expected} == expected
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("pattern", "mode", "expected"),
    [
        (None, None, (None, None)),
        ("all", None, (None, "all")),
        ("none", None, (None, "none")),
        ("o", None, (OutputFile("o", False, True), None)),
        ("o", "append", (OutputFile("o", True, True), None)),
    ],
)
def test_what_the_option_means(pattern: str | None, mode: str | None, expected: tuple) -> None:
    assert output_file(pattern, mode, is_labelled=True) == expected


def test_one_ranks_output_is_refused() -> None:
    with pytest.raises(RequestError, match=r"output\.follow=rank0"):
        output_file("0", None, is_labelled=False)
