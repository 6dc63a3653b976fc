"""The whole product on one machine: `flashrec run --local`, the example, faults from outside, the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flashrec.testing import Fault, FaultDirectory, FaultPlan

pytestmark = pytest.mark.torch
SCRIPT = Path(__file__).parents[2] / "examples" / "gpt" / "train.py"
SMALL = ["--steps", "12", "--dim", "32", "--layers", "1", "--context", "32"]


def run(path: Path, command: list[str]) -> dict[int, str]:
    """Three ranks on three nodes and a spare; the digest of each rank's final state."""
    path.mkdir()
    whole = [sys.executable, "-m", "flashrec.cli.main", "run", "--local", "--nodes", "4", "--ntasks-per-node", "1"]
    whole += ["--job-dir", str(path / "job"), "--", sys.executable, *command, *SMALL, "--out", str(path / "out")]
    done = subprocess.run(whole, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return {rank: json.loads((path / "out" / f"final-{rank}.json").read_text())["digest"] for rank in range(3)}


def test_the_example_survives_with_the_same_bits(tmp_path: Path) -> None:
    faults = FaultDirectory(tmp_path / "faults")
    plan = FaultPlan(
        str(faults.path),
        (
            Fault("a", rank=1, step=3, place="in-optimizer", kind="SIGKILL"),
            Fault("b", rank=0, step=7, place="in-collective", kind="SIGKILL", holder=2),
        ),
    )
    wanted = run(tmp_path / "undisturbed", [str(SCRIPT)])
    found = run(tmp_path / "hit", ["-m", "flashrec.testing.inject", str(faults.write_plan(plan)), "--", str(SCRIPT)])
    faults.assert_all_fired(plan)
    assert found == wanted


MIRRORED = """
import torch, torch.distributed as dist, flashrec
flashrec.init()
dist.init_process_group("gloo")
model = torch.nn.Linear(100, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
session = flashrec.Session(model, optimizer, mirrors="all")
for step in session.steps(23):
    with step:
        loss = model(torch.randn(4, 100)).sum()
        loss.backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
        optimizer.step()
        optimizer.zero_grad()
"""


def test_the_report_says_what_mirrors_have_cost(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MIRRORED)
    flashrec = [sys.executable, "-m", "flashrec.cli.main"]
    job = ["run", "--local", "--nodes", "2", "--ntasks-per-node", "1", "--spares", "0", "--job-dir", "job"]
    whole = [*flashrec, *job, "--", sys.executable, "train.py"]
    done = subprocess.run(whole, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    report = [*flashrec, "report", "job", "--json"]
    said = subprocess.run(report, check=True, cwd=tmp_path, capture_output=True, timeout=60)
    found = json.loads(said.stdout)["mirrors"]
    copy = 4 * (1000 + 10) * 2  # parameters and momentum; slots are padded
    assert [each["rank"] for each in found] == [0, 1]
    for each in found:
        assert 2 * copy <= each["own_bytes"] == each["held_bytes"] < 2 * copy + 1024
        assert each["wait_ms"] >= 0.0
