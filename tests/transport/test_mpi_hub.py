"""The hub's own rules, with MPI and its parent played: what it never does, and when it ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flashrec.transport.mpi import hub as module
from flashrec.transport.mpi.hub import Hub
from flashrec.transport.mpi.words import BEAT, Accept, Accepted, Beats, Drop, Ended, Word


class Comm:
    """One end of a session, with the messages that wait in it. It can be received from, and nothing else."""

    def __init__(self, waiting: list[bytes | Exception]) -> None:
        self.waiting = waiting

    def Set_errhandler(self, handler: object) -> None: ...

    def Iprobe(self, source: int, tag: int) -> bool:
        return bool(self.waiting)

    def Recv(self, buffer: list[Any], source: int, tag: int) -> None:
        message = self.waiting.pop(0)
        if isinstance(message, Exception):
            raise message
        buffer[0][:] = message


class Stage:
    """Plays the parent and mpi4py; `script` is what each `hear` returns, its end ends the scene."""

    BYTE = ERRORS_RETURN = None
    Exception = RuntimeError

    def __init__(self, script: list[list[Word]], comms: dict[str, Comm]) -> None:
        self.script, self.comms, self.said, self.accepted = script, comms, [], []
        self.COMM_SELF = self
        self.Info = SimpleNamespace(Create=lambda: SimpleNamespace(Set=lambda key, value: None))

    def hear(self, timeout_s: float, others: Any) -> list[Word]:
        if not self.script:
            raise EOFError
        return self.script.pop(0)

    def say(self, word: Word) -> None:
        self.said.append(word)

    def Accept(self, port: str, info: object) -> Comm:
        self.accepted.append(port)
        return self.comms[port]


def play(script: list[list[Word]], comms: dict[str, list[bytes | Exception]], monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(module, "TICK_INTERVAL_S", 0.0)
    stage = Stage(script, {port: Comm(waiting) for port, waiting in comms.items()})
    with pytest.raises(EOFError):
        Hub(stage, stage, None).run()  # type: ignore[arg-type]
    return stage


def test_of_many_heartbeats_the_newest_is_said_and_foreign_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    beats = [BEAT.pack(7, 1, 1), BEAT.pack(7, 1, 2), BEAT.pack(7, 2, 3), BEAT.pack(8, 1, 4)]
    stage = play([[Accept(7, 1, "p")], []], {"p": beats}, monkeypatch)
    assert [word for word in stage.said if isinstance(word, Beats)] == [Beats(((7, 2),))]


def test_who_is_gone_before_its_turn_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = play([[Accept(1, 1, "p"), Accept(2, 1, "q")], [Drop(2)], [], []], {"p": [], "q": []}, monkeypatch)
    assert stage.accepted == ["p"]


def test_a_dropped_session_is_not_touched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Comm.Free either, which waits for what a dead peer will never send: `Comm` has none."""
    stage = play([[Accept(1, 1, "p")], [Drop(1)], []], {"p": [RuntimeError("touched")]}, monkeypatch)
    assert stage.accepted == ["p"]
    assert not [word for word in stage.said if isinstance(word, Ended)]


def test_an_error_ends_one_session_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    comms: dict[str, list[Any]] = {"p": [RuntimeError("broken\nstack")], "q": [BEAT.pack(2, 1, 1)]}
    stage = play([[Accept(1, 1, "p"), Accept(2, 1, "q")], [], [], []], comms, monkeypatch)
    assert [word for word in stage.said if isinstance(word, Ended)] == [Ended(1, "broken")]
    assert Beats(((2, 1),)) in stage.said


def test_a_hub_ends_before_it_runs_out_of_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lives as long as sessions do, however many there are; only lost ones count, once each."""
    monkeypatch.setattr(module, "MAX_LOST", 2)
    many: list[list[Word]] = [[Accept(n, 1, "p")] for n in range(5)]
    lost: list[list[Word]] = [[Drop(0)], [Drop(0)], [Drop(77)], [Drop(1)]]
    stage = Stage([*many, *lost, [Accept(9, 1, "p")]], {"p": Comm([])})
    Hub(stage, stage, None).run()  # type: ignore[arg-type]
    assert [word.session for word in stage.said if isinstance(word, Accepted)] == [0, 1, 2, 3, 4]
    assert len(stage.script) == 1, "it ended at the second loss"
