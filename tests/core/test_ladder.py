"""Rungs that no scenario file can write down; the others are in scenarios/checkpoint_* and last_checkpoint*."""

from __future__ import annotations

from flashrec.core import effects as fx
from flashrec.core import events as e
from flashrec.core.types import Phase, Report
from tests.core.driver import Driver


def test_a_mirror_is_nothing_that_survivors_could_save() -> None:
    """The shard of rank 0 is left in the memory of rank 1: a lost rank with a node would be restored from there."""
    driver = Driver()
    for line in ("job n1 n2 active=2 per_node=1", "agent n1 n2", "started all", "joined all", "restored all v=0",
                 "kept 0 step=-1 how=found", "condemn n1"):  # fmt: skip
        driver.do(line)
    report = Report(4, 3, 3, True, (1,), keeps=(4,), holds={0: (4,)})
    driver.machine.handle(e.WorkerReported(1, 1, 2, report), driver.now)
    assert driver.machine.phase is Phase.PLACING
    effects = driver.machine.handle(e.TimePassed(), 31.0)
    assert not [effect for effect in effects if isinstance(effect, fx.PublishPlan)]
    (stop,) = [effect for effect in effects if isinstance(effect, fx.StopJob)]
    assert "no last checkpoint: no replica of the shard of rank 0 is left" in stop.reason


def test_zero_loads_turn_the_rung_off() -> None:
    driver = Driver()
    for line in ("limits max_loads=0", "job n1 n2 active=1 per_node=1", "agent n1 n2", "started all", "joined all",
                 "restored all v=0", "kept 0 step=3 how=saved"):  # fmt: skip
        driver.do(line)
    assert driver.do("exit 0")[-1].endswith("recovery.max_loads is 0")
