"""The end of a worker's interpreter: nothing of ours may still be taking process groups apart then."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from flashrec.runtime import farewell, stuck
from flashrec.runtime.inplace import DISPOSE_THREAD

pytestmark = pytest.mark.torch


def test_the_disposal_of_former_groups_is_waited_for() -> None:
    said: list[str] = []
    may_end = threading.Event()

    def dispose() -> None:
        may_end.wait(10)
        said.append("disposed")

    threading.Thread(target=dispose, name=DISPOSE_THREAD, daemon=True).start()
    control = SimpleNamespace(is_forked=lambda: False, say_farewell=may_end.set)
    farewell._say_farewell(SimpleNamespace(control=control))  # type: ignore[arg-type]
    assert said == ["disposed"]


def test_nothing_is_collected_while_a_thread_of_gloo_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([False, False, True])
    said: list[object] = []
    monkeypatch.setattr(stuck, "is_idle", lambda: said.append(next(looks)) or said[-1])
    monkeypatch.setattr(farewell.gc, "collect", lambda: said.append("collected"))
    control = SimpleNamespace(is_forked=lambda: False, say_farewell=lambda: None)
    farewell._say_farewell(SimpleNamespace(control=control))  # type: ignore[arg-type]
    assert said == [False, False, True, "collected"]
