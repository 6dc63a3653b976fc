"""An integration is at most ten lines, and its page shows exactly these."""

from __future__ import annotations

import pytest

from tests.integrations.diffs import PAGES, block, diff_of, num_changed, shown_in


@pytest.mark.parametrize("name", PAGES)
def test_an_integration_changes_at_most_ten_lines(name: str) -> None:
    diff = diff_of(name)
    assert any(line.startswith("+") and "flashrec" in line for line in diff), "train.py takes part in recovery"
    assert num_changed(diff) <= 10


@pytest.mark.parametrize("name", PAGES)
def test_the_page_shows_the_difference(name: str) -> None:
    assert shown_in(PAGES[name], name) == block(name), "python -m tests.integrations.diffs writes it anew"
