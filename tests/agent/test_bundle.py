"""What workers say together goes in one message, in order, and nothing waits for long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from flashrec.agent.bundle import Bundle
from flashrec.core import events as e
from flashrec.core.types import Report
from flashrec.wire import messages as m


class Said:
    def __init__(self, num_workers: int) -> None:
        self.sent: list[m.Sendable] = []
        self.bundle = Bundle(self.sent.append, lambda: num_workers)

    async def until(self, count: int) -> None:
        while len(self.sent) < count:
            await asyncio.sleep(0.001)


def reported(rank: int) -> e.WorkerReported:
    return e.WorkerReported(rank, 1, 2, Report(5, 4, 4, True, (0, 1)))


def play(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 10))


def test_the_word_of_all_workers_is_one_message_at_once() -> None:
    async def scene() -> None:
        said = Said(8)
        for rank in range(8):
            said.bundle.relay(reported(rank))
        assert said.sent == [m.Relayed(tuple(reported(rank) for rank in range(8)))]

    play(scene)


def test_nobody_is_waited_for_for_long() -> None:
    async def scene() -> None:
        said = Said(8)
        said.bundle.relay(reported(0))
        said.bundle.relay(reported(1))
        assert said.sent == []
        await said.until(1)
        assert said.sent == [m.Relayed((reported(0), reported(1)))]
        said.bundle.relay(reported(2))
        await said.until(2)
        assert said.sent[1:] == [reported(2)], "one is sent as it is"

    play(scene)


def test_anything_else_goes_at_once_and_stays_behind_what_waits() -> None:
    async def scene() -> None:
        said, gone = Said(8), e.WorkerExited(0, 1, "none", True, "killed")
        said.bundle.relay(reported(0))
        said.bundle.relay(e.WorkerFormed(0, 1, 2))
        said.bundle.relay(gone)
        assert said.sent == [m.Relayed((reported(0), e.WorkerFormed(0, 1, 2))), gone]
        await asyncio.sleep(0.01)
        assert len(said.sent) == 2

    play(scene)


def test_the_only_worker_of_a_node_waits_for_nobody() -> None:
    async def scene() -> None:
        said = Said(1)
        said.bundle.relay(reported(0))
        assert said.sent == [reported(0)]

    play(scene)


def test_what_waits_is_sent_at_the_end() -> None:
    async def scene() -> None:
        said = Said(8)
        said.bundle.relay(reported(0))
        said.bundle.flush()
        assert said.sent == [reported(0)]

    play(scene)
