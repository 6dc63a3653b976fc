"""A process that plays cases, one after the other, with a fork server of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.chaos.case import Case, to_json
from tests.chaos.draw import STEPS, draw
from tests.chaos.play import Result, play
from tests.runtime import support
from tests.runtime.layouts.layout import Layout
from tests.runtime.layouts.outcome import undisturbed

ATTEMPTS = 8
BAD = ("wrong", "hung")
Played = tuple[Case, Result, int]  # the last attempt, what came of it, how many were missed before


def begin() -> None:
    """The fork server is to load what the layouts need."""
    support.PRELOAD.append("tests.chaos.preload")


def play_until_hit(wanted: Case | tuple[int, int], table: dict[str, Layout], folder: Path) -> Played:
    """Play one case, or what is drawn for (seed, index).

    A case of which a fault did not fire proves nothing: the next attempt is drawn. What bad ones leave stays in
    `folder`.
    """
    for attempt in range(ATTEMPTS):
        case = wanted if isinstance(wanted, Case) else draw(*wanted, attempt, table)
        path = folder / f"{case.seed}-{case.index}-{case.attempt}"
        try:
            wanted_outcome = undisturbed(case.layout, case.world_size, STEPS, folder / "undisturbed")
        except AssertionError as err:
            return case, Result("wrong", "with nothing failing", log=str(err)), attempt
        result = play(case, path, wanted_outcome)
        if result.verdict in BAD:
            (path / "case.json").write_text(to_json(case))
        else:
            shutil.rmtree(path, ignore_errors=True)
        if result.verdict != "missed" or isinstance(wanted, Case):
            break
    return case, result, attempt
