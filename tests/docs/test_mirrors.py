"""The table of slots and steps in docs/concepts/mirrors.md is what the slots and the decision of the code do."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrec.core.commit import decide
from flashrec.core.types import Plan, Report
from flashrec.runtime.mirrors.slots import Pair

pytestmark = pytest.mark.torch
PAGE = Path(__file__).resolve().parents[2] / "docs/concepts/mirrors.md"


def rows_of_the_page() -> list[list[str]]:
    table = PAGE.read_text().partition("<!-- table: tests/docs/test_mirrors.py -->")[2].strip().split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def write(pair: Pair, v: int) -> None:
    slot = pair.next()
    slot.begin(0)
    slot.complete(v, b"", b"")


def test_the_table_is_that_of_the_code() -> None:
    """Rank 1 is lost; rank 0, its holder, has kept as many copies of its own."""
    kept, held, found = Pair(), Pair(), []

    def note(moment: str, v: int, passed: int) -> None:
        """v: of the survivor, which has passed the vote of `passed`."""
        survivor = Report(v, passed, passed, True, (0,), kept.versions(), {1: held.versions()})
        plan = decide(2, {0: survivor, 1: Report(-1, -1, -1, False, (1,))})
        assert isinstance(plan, Plan), plan
        steps = [", ".join(map(str, pair.versions())) for pair in (kept, held)]
        found.append([moment, *steps, str(plan.resume_step)])

    for v in (4, 5):
        write(kept, v)
        write(held, v)
    note("step 5 is done", 6, 5)
    kept.next().begin(0)
    held.next().begin(0)
    note("step 6 has begun", 6, 5)
    write(kept, 6)
    note("copied", 6, 5)
    write(held, 6)
    note("acknowledged", 6, 5)
    note("step 6 is voted and done", 7, 6)
    assert rows_of_the_page() == found
