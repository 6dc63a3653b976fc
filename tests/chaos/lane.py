"""Lanes: processes that play cases, one after the other, each with a fork server of its own."""

from __future__ import annotations

import multiprocessing
import shutil
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from tests.chaos.case import Case, to_json
from tests.chaos.draw import STEPS, draw
from tests.chaos.play import Result, play
from tests.runtime import support
from tests.runtime.layouts.layout import Layout
from tests.runtime.layouts.outcome import undisturbed

ATTEMPTS = 8
BAD = ("wrong", "hung")
Wanted = Case | tuple[int, int]  # or what is drawn for (seed, index)
Played = tuple[Case, Result, int]  # the last attempt, what came of it, how many were missed before


def play_all(
    wanted: Iterable[Wanted], table: dict[str, Layout], folder: Path, jobs: int, seconds: float
) -> Iterator[Played]:
    """Play them in `jobs` lanes, as they end; none is begun later than after `seconds`."""
    until, waiting = time.monotonic() + seconds, iter(wanted)
    running: set[Future[Played]] = set()
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin) as pool:
        while True:
            while len(running) < jobs and time.monotonic() < until:
                if (each := next(waiting, None)) is None:
                    break
                running.add(pool.submit(play_until_hit, each, table, folder))
            if not running:
                return
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                yield future.result()


def _begin() -> None:
    """The fork server is to load what the layouts need."""
    support.PRELOAD.append("tests.chaos.preload")


def play_until_hit(wanted: Wanted, table: dict[str, Layout], folder: Path) -> Played:
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
