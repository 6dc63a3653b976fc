"""The judge of the demo: compare.py sees every difference and takes no half run for a whole one."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples/gpt/compare.py"
spec = importlib.util.spec_from_file_location("compare", SCRIPT)
assert spec and spec.loader
compare = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compare)


def write_run(directory: Path, ranks: int = 2, steps: int = 3) -> Path:
    directory.mkdir()
    for rank in range(ranks):
        lines = [{"step": step, "loss": (step + rank / 8).hex(), "mean": float(step).hex()} for step in range(steps)]
        (directory / f"rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        final = {"rank": rank, "steps": steps, "digest": "d" * 64}
        (directory / f"final-{rank}.json").write_text(json.dumps(final))
    return directory


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return write_run(tmp_path / "a"), write_run(tmp_path / "b")


def test_equal_runs_have_no_difference(runs):
    assert compare.first_difference(*runs) == ""


def test_last_bit_of_one_loss_is_seen(runs):
    path = runs[1] / "rank-1.jsonl"
    path.write_text(path.read_text().replace((1.125).hex(), (1.125 + 2**-52).hex()))
    assert compare.first_difference(*runs).startswith("step 1, rank 1")


def test_final_digest_is_compared(runs):
    path = runs[1] / "final-1.json"
    path.write_text(path.read_text().replace("d" * 64, "e" * 64))
    assert compare.first_difference(*runs).startswith("final digest of rank 1")


def test_other_world_size_is_a_difference(tmp_path):
    assert "ranks [0, 1]" in compare.first_difference(write_run(tmp_path / "a"), write_run(tmp_path / "b", ranks=3))


def test_more_steps_are_a_difference(tmp_path):
    left, right = write_run(tmp_path / "a", steps=3), write_run(tmp_path / "b", steps=4)
    assert compare.first_difference(left, right).startswith("step 3")


def test_redone_step_counts_by_its_last_line(runs):
    path = runs[1] / "rank-0.jsonl"
    wrong = json.dumps({"step": 1, "loss": "0x1p+9", "mean": "0x1p+9"}) + "\n"
    path.write_text(wrong + path.read_text())
    assert compare.first_difference(*runs) == ""
    path.write_text(path.read_text() + wrong)
    assert compare.first_difference(*runs).startswith("step 1, rank 0")


def test_line_torn_by_a_crash_is_skipped_but_its_step_must_come_again(runs):
    path = runs[1] / "rank-0.jsonl"
    whole = path.read_text()
    path.write_text('{"step": 0, "lo\n' + whole)
    assert compare.first_difference(*runs) == ""
    path.write_text('{"step": 0, "lo\n' + whole.partition("\n")[2])
    with pytest.raises(compare.Unreadable, match="no line for step 0"):
        compare.first_difference(*runs)


def test_unfinished_rank_is_not_a_result(runs):
    (runs[1] / "final-1.json").unlink()
    with pytest.raises(compare.Unreadable, match="have not finished"):
        compare.first_difference(*runs)


def test_exit_codes(runs, tmp_path):
    def exit_code(*directories: Path) -> int:
        return subprocess.run([sys.executable, SCRIPT, *directories], check=False, capture_output=True).returncode

    assert exit_code(*runs) == 0
    assert exit_code(runs[0], tmp_path / "nowhere") == 2
    (runs[1] / "final-0.json").write_text(json.dumps({"rank": 0, "steps": 3, "digest": "x"}))
    assert exit_code(*runs) == 1
