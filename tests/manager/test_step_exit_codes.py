"""A job that lost nothing ends with the exit code of its ranks; a step that we ended says nothing about them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from flashrec.core.membership import Slot
from flashrec.core.types import Assignment
from flashrec.manager.launches import Launches
from flashrec.manager.steps import Step

TASK = Assignment(rank=0, local_rank=0, incarnation=1, generation=1, joins=False)


class OneProcess:
    """A launcher whose worker step is one process of ours."""

    def __init__(self, folder: Path, code: str) -> None:
        self._folder, self._code = folder, code

    def job_of(self, node: str) -> int:
        return 5

    def workers(self, launch, placement) -> Step:
        return Step(f"workers {launch}", self._folder / "log", (), [[sys.executable, "-c", self._code]], [{}])


def launches(folder: Path, code: str, slot: Slot | None) -> Launches:
    return Launches(OneProcess(folder, code), lambda *_: None, lambda *_: slot, lambda _: None, lambda *_, **__: None)


async def finish(started: Launches) -> int:
    started.begin({"n1": (TASK,)})
    while started.tasks:
        await asyncio.sleep(0.01)
    return started.worst_code


@pytest.mark.parametrize("state", ["up", "gone"])
def test_a_step_may_take_its_time_after_its_ranks_have_ended(state: str, tmp_path: Path) -> None:
    """srun is often slower than the agent's pidfd: the ranks are 'gone' and it still runs. It is left alone."""
    slot = Slot(0, "n1", 0, incarnation=1, state=state)
    code = "import time, sys; time.sleep(1.6); sys.exit(3)"
    assert asyncio.run(finish(launches(tmp_path, code, slot))) == 3


def test_a_superseded_step_is_ended_and_its_code_does_not_count(tmp_path: Path) -> None:
    assert asyncio.run(finish(launches(tmp_path, "import time; time.sleep(60)", None))) == 0


def test_a_step_ended_by_us_at_the_end_does_not_count(tmp_path: Path) -> None:
    slot = Slot(0, "n1", 0, incarnation=1, state="gone")

    async def stop() -> int:
        code = f"import time; open({str(tmp_path / 'started')!r}, 'w'); time.sleep(60)"
        started = launches(tmp_path, code, slot)
        started.begin({"n1": (TASK,)})
        while not (tmp_path / "started").exists():
            await asyncio.sleep(0.01)
        await started.stop(0.1)
        return started.worst_code

    assert asyncio.run(stop()) == 0
