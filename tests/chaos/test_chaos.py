"""A few cases of the search for failures, always the same ones; the search itself is `make test-chaos`."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from tests.chaos.case import After, AtPlace, Case, Fault, OnMessage, Together
from tests.chaos.draw import STEPS
from tests.chaos.play import play
from tests.runtime.layouts.outcome import undisturbed

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chaos")


@pytest.mark.parametrize(
    ("layout", "ranks", "verdict", "faults"),
    [
        ("ddp", 3, "right", [Fault(1, AtPlace(2, "backward"), "stop"), Fault(1, OnMessage("WorkerFormed", 1))]),
        ("ddp", 3, "right", [Fault(2, AtPlace(3, "backward")), Fault(0, AtPlace(-1, "sending"))]),
        (
            "ddp",
            3,
            "right",
            [Fault(0, AtPlace(1, "between")), Fault(0, AtPlace(-1, "receiving", life=2)), Fault(1, Together(0))],
        ),
        ("ddp", 3, "refused", [Fault(0, AtPlace(2, "forward")), Fault(1, Together(0)), Fault(2, Together(0))]),
        ("pp", 2, "refused", [Fault(1, AtPlace(3, "backward"))]),
        ("ddp", 3, "missed", [Fault(1, AtPlace(4, "after-optimizer")), Fault(2, After(60.0))]),
    ],
    ids=["stopped, then killed", "source", "two, then the target", "nobody left", "no replica", "never fires"],
)
def test_a_fixed_case(tmp_path: Path, cache: Path, layout: str, ranks: int, verdict: str, faults: list[Fault]) -> None:
    case = Case(layout, ranks, tuple(faults), patience_s=2.0)
    result = play(case, tmp_path / "case", undisturbed(layout, ranks, STEPS, cache))
    assert result.verdict == verdict, f"{result.why}\n{result.log}"


def test_another_bit_is_found(cache: Path) -> None:
    """What the comparison is worth: the same losses and digests, but for one bit."""
    wanted = undisturbed("ddp", 3, STEPS, cache)
    other = copy.deepcopy(wanted)
    assert other.differences(wanted) == []
    right = float.fromhex(wanted.losses[1][3][0][0])
    other.losses[1][3] = [[(right * (1 + 2**-23)).hex(), wanted.losses[1][3][0][1]]]
    other.results[2]["digest"] = "0" * 64
    assert [problem.split(":")[0] for problem in other.differences(wanted)] == ["rank 1 step 3", "rank 2"]
    del other.losses[0][5]
    assert "rank 0 step 5: no loss" in other.differences(wanted)
