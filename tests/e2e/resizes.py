"""What `resizer.py` has said, and whether each sample was read once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

RESIZER = Path(__file__).with_name("resizer.py")
SAMPLES = 50  # as there
Lines = dict[tuple[int, int], dict[str, Any]]  # (step, rank) -> what the rank said


def said(out: Path) -> tuple[Lines, Lines]:
    """What was said of steps, and of resizes, by (step or new size, rank). Nothing may be said twice."""
    steps: Lines = {}
    resizes: Lines = {}
    for path in sorted(out.iterdir()):
        rank = int(path.name.removeprefix("rank-"))
        for line in path.read_text().splitlines():
            found = json.loads(line)
            where, key = (steps, found["step"]) if "step" in found else (resizes, found["resized"][1])
            assert (key, rank) not in where, f"rank {rank} did it twice: {found}"
            where[key, rank] = found
    return steps, resizes


def numbers(lines: Lines, first: int, last: int) -> dict[tuple[int, int], tuple[str, list[int]]]:
    return {key: (found["loss"], found["samples"]) for key, found in lines.items() if first <= key[0] < last}


def assert_each_sample_once_an_epoch(lines: Lines, num_steps: int) -> None:
    """An epoch ends with a step; what a DistributedSampler adds to give all ranks the same number is in that one."""
    seen: Counter[int] = Counter()
    num_epochs = 0
    for step in range(num_steps):
        ranks = {rank: found for (number, rank), found in lines.items() if number == step}
        sizes = {found["world"] for found in ranks.values()}
        assert sizes == {len(ranks)}, f"step {step} by ranks {sorted(ranks)} in worlds of {sizes}"
        seen.update(sample for found in ranks.values() for sample in found["samples"])
        twice = sum(seen.values()) - len(seen)
        if len(seen) == SAMPLES:
            assert twice < len(ranks), f"{twice} samples twice in epoch {num_epochs}"
            num_epochs, seen = num_epochs + 1, Counter()
        else:
            assert not twice, f"{twice} samples twice in epoch {num_epochs}, before its end"
    assert num_epochs > 5
