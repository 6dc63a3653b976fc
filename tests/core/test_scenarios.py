"""Scenario files: `> command` lines and what the machine asks for below each. The diff of a scenario is the review.

`pytest tests/core/test_scenarios.py --rewrite-scenarios` writes what the machine says now into the files.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.driver import Driver

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


def play(text: str) -> str:
    driver, out = Driver(), []
    for line in text.splitlines():
        if line.startswith("> "):
            out.append(line)
            out += [f"    {effect}" for effect in driver.do(line[2:])]
        elif not line.startswith("    "):
            out.append(line)
    return "\n".join(out) + "\n"


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 10


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    text = path.read_text()
    now = play(text)
    if request.config.getoption("--rewrite-scenarios"):
        path.write_text(now)
    assert now == text
