"""The example repeats itself bit by bit, which is what makes a recovery comparable at all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GPT = Path(__file__).parents[2] / "examples/gpt"


def train(out: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    command = [sys.executable, *launcher, str(GPT / "train.py"), "--steps", "4", "--out", str(out), *arguments]
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, env=env).stdout


def compare(left: Path, right: Path) -> int:
    return subprocess.run([sys.executable, GPT / "compare.py", left, right], check=False).returncode


@pytest.mark.torch
def test_same_seed_same_bits_and_another_seed_others(tmp_path):
    output = train(tmp_path / "a")
    train(tmp_path / "b")
    train(tmp_path / "c", "--seed", "2")
    assert compare(tmp_path / "a", tmp_path / "b") == 0
    assert compare(tmp_path / "a", tmp_path / "c") == 1
    digest = json.loads((tmp_path / "a/final-0.json").read_text())["digest"]
    assert f"final digest of rank 0: {digest}" in output


@pytest.mark.torch
def test_ranks_read_different_text_and_end_with_the_same_model(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    train(tmp_path / "a", launcher=launcher)
    lines = [[json.loads(line) for line in (tmp_path / f"a/rank-{rank}.jsonl").open()] for rank in (0, 1)]
    losses = [[float.fromhex(line["loss"]) for line in rank] for rank in lines]
    means = [[float.fromhex(line["mean"]) for line in rank] for rank in lines]
    assert all(a != b for a, b in zip(*losses, strict=True))
    assert means[0] == means[1]
    assert means[0] == pytest.approx([(a + b) / 2 for a, b in zip(*losses, strict=True)])
    digests = {json.loads((tmp_path / f"a/final-{rank}.json").read_text())["digest"] for rank in (0, 1)}
    assert len(digests) == 1


@pytest.mark.torch
def test_impossible_options_are_refused_in_a_sentence():
    for arguments, text in ((("--heads", "3"), "--heads 3 does not divide --dim 64"), (("--steps", "0"), "at least 1")):
        done = subprocess.run(
            [sys.executable, GPT / "train.py", *arguments], check=False, capture_output=True, text=True
        )
        assert done.returncode == 2
        assert text in done.stderr
