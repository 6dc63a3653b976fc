"""What workers said together goes through the manager in one go: each word by itself, at one time, in its order."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashrec.config.load import load_config
from flashrec.core import effects as fx
from flashrec.core import events as e
from flashrec.manager import app
from flashrec.manager.app import Manager
from flashrec.manager.request import Request, Shape

LIMIT_S = 15
TOLD = fx.Tell("so")


class Desk:
    """A manager whose machine does what a test says. told: what happens, in this order."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        request = Request(("script.py",), (), None, None, 1, load_config(None, []), 2)
        self.manager = Manager(request, Shape(2, 1, 0), ("n1", "n2"), folder, "127.0.0.1", None)
        self.manager.journal.close()
        self.told: list[tuple[Any, ...]] = []
        self.asks: dict[e.AnyEvent, list[fx.AnyEffect]] = {}
        self.deadlines: list[float | None] = [None]  # the last one holds on
        self.journal = SimpleNamespace(
            event=lambda event, now, generation, phase: self.told.append(("line", event, now, generation)),
            effect=lambda effect, generation: self.told.append(("line", effect, generation)),
        )
        self.machine = SimpleNamespace(
            handle=self._handle, generation=1, phase="RUNNING",
            next_deadline=lambda: self.deadlines.pop(0) if len(self.deadlines) > 1 else self.deadlines[0],
        )  # fmt: skip
        manager: Any = self.manager
        manager.machine, manager.journal = self.machine, self.journal
        manager.verdicts = SimpleNamespace(flush=lambda: self.told.append(("flush",)))
        manager._performer = SimpleNamespace(perform=lambda effect: self.told.append(("perform", effect)))
        manager._parking = SimpleNamespace(started=lambda *life: self.told.append(("started", *life)))
        clock = itertools.count(100)
        monkeypatch.setattr(app, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))

    def _handle(self, event: e.AnyEvent, now: float) -> list[fx.AnyEffect]:
        self.told.append(("handle", event, now))
        self.machine.generation += 1
        return self.asks.get(event, [])

    def passed(self) -> int:
        """How often time has passed."""
        return sum(line[:2] == ("handle", e.TimePassed()) for line in self.told)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(tmp_path, monkeypatch)


def play(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), LIMIT_S))


def test_words_that_come_together_are_heard_one_after_the_other_at_one_time(desk: Desk) -> None:
    """What the first one asks for is done before the machine hears the second; condemned nodes are known before."""
    first, second = e.WorkerFormed(0, 1, 1), e.WorkerFormed(1, 1, 1)
    desk.asks = {first: [TOLD, TOLD]}

    async def scene() -> None:
        desk.manager.emit_all((first, second))

    play(scene)
    assert desk.told == [
        ("flush",),
        ("handle", first, 100.0),
        ("line", first, 100.0, 2),
        *[("line", TOLD, 2), ("perform", TOLD)] * 2,
        ("handle", second, 100.0),
        ("line", second, 100.0, 3),
    ]


def test_time_that_passes_leaves_a_line_only_where_something_follows(desk: Desk) -> None:
    async def scene() -> None:
        desk.manager.emit(e.TimePassed())
        assert [line[0] for line in desk.told] == ["flush", "handle"]
        desk.asks = {e.TimePassed(): [TOLD]}
        desk.manager.emit(e.TimePassed())
        assert [line[0] for line in desk.told[2:]] == ["flush", "handle", "line", "line", "perform"]

    play(scene)


def test_a_parked_task_is_used_up_when_its_worker_has_started(desk: Desk) -> None:
    async def scene() -> None:
        desk.manager.emit_all((e.WorkerStarted(0, 3, 77), e.WorkerFormed(1, 1, 1), e.WorkerStarted(1, 1, 78)))
        assert [line for line in desk.told if line[0] == "started"] == [("started", 0, 3), ("started", 1, 1)]
        desk.manager._parking = None
        desk.manager.emit(e.WorkerStarted(0, 4, 79))

    play(scene)


class Timers:
    """What the loop is asked for: seconds from now. `expire` lets the time of the last one come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self.asked: list[float] = []
        self.handles: list[asyncio.TimerHandle] = []
        call_later = loop.call_later

        def call(delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
            self.asked.append(delay_s)
            self._callback = callback
            self.handles.append(call_later(3600.0, callback))
            return self.handles[-1]

        monkeypatch.setattr(app, "asyncio", SimpleNamespace(get_running_loop=lambda: SimpleNamespace(call_later=call)))

    def expire(self) -> None:
        self.handles[-1].cancel()
        self._callback()

    @property
    def num_armed(self) -> int:
        return sum(not handle.cancelled() for handle in self.handles)


def test_the_timer_is_set_once_for_a_deadline_and_anew_for_another(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "time", SimpleNamespace(monotonic=lambda: 100.0))
    word = e.WorkerFormed(0, 1, 1)

    async def scene() -> None:
        timers = Timers(monkeypatch)
        desk.deadlines = [None, 102.0, 102.0, 101.0, 99.0, None, None, 103.0]
        desk.manager.emit(word)
        assert timers.asked == []
        desk.manager.emit_all((word,) * 3)
        desk.manager.emit(word)
        assert timers.asked == [pytest.approx(2.001)], "the deadline is as it was"
        desk.manager.emit(word)
        assert timers.asked[1:] == [pytest.approx(1.001)] and timers.num_armed == 1
        desk.manager.emit(word)
        assert timers.asked[2:] == [0.001], "it has passed already"
        desk.manager.emit(word)
        desk.manager.emit(word)
        assert timers.num_armed == 0, "nothing is waited for"
        desk.manager.emit(word)
        assert timers.asked[3:] == [pytest.approx(3.001)] and timers.num_armed == 1

    play(scene)


def test_after_its_deadline_the_machine_is_asked_for_the_next(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may be the same: then time has to pass once more."""
    monkeypatch.setattr(app, "time", SimpleNamespace(monotonic=lambda: 100.0))

    async def scene() -> None:
        timers = Timers(monkeypatch)
        desk.deadlines = [102.0]
        desk.manager.emit(e.WorkerFormed(0, 1, 1))
        for number in (1, 2):
            timers.expire()
            assert desk.passed() == number and timers.num_armed == 1
            assert timers.asked == [pytest.approx(2.001)] * (number + 1)

    play(scene)
