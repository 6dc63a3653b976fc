"""What all benchmarks do with their figures: quartiles, and a table on a page of the documentation."""

from __future__ import annotations

import statistics
from pathlib import Path


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def put_table(page: Path, begin: str, end: str, text: str) -> None:
    """Replace what stands on `page` between the lines `begin` and `end`."""
    before, _, rest = page.read_text().partition(begin)
    page.write_text(f"{before}{begin}\n\n{text}\n{end}{rest.partition(end)[2]}")
