"""The demo is what strangers see first, so it is tested as they run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEMO = [sys.executable, str(ROOT / "examples/demo/demo.py")]
LAST_LINE = re.compile(
    r"demo: recovered=(yes|no) identical=(yes|no) same_job=(yes|no) steps_redone=(0|1|unknown) rto_s=(\S+) "
    r"detect_s=(\S+) fence_s=(\S+) launch_s=(\S+) form_s=(\S+) restore_s=(\S+)"
)


@pytest.mark.devcluster
@pytest.mark.torch
@pytest.mark.timeout(600)
def test_demo_recovers_and_says_so() -> None:
    argv = [*DEMO, "--node", "2", "--steps", "16", "--at-step", "6", "--name", "test-demo"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=550)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    line = done.stdout.splitlines()[-1]
    found = LAST_LINE.fullmatch(line)
    assert found, line
    assert found.groups()[:3] == ("yes", "yes", "yes")
    rto_s, *phases = map(float, found.groups()[4:])
    assert 0 < sum(phases) <= rto_s
    assert "node n2 (rank 2) loses power" in done.stdout
    assert "[rank 2.2]" in done.stdout, "progress is shown live, with the rank and its second life"


@pytest.mark.parametrize("node", ["0", "5"])
def test_only_active_nodes_can_be_hit(node: str) -> None:
    done = subprocess.run([*DEMO, "--node", node], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "choose an active node, 1 to 4" in done.stderr
