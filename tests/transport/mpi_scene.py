"""A hub and beaters with real MPI on the loopback interface, brought together as manager and agents do it. Whatever a
test does, no MPI process outlives it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from flashrec.transport.mpi import words
from flashrec.transport.mpi.supervisor import Supervisor
from flashrec.transport.mpi.words import Accepted, Beats, Ended, FromChild, Going, Loaded, Settings, Unusable

LIMIT_S = 240.0  # 20 cycles start 20 processes, on however busy a machine


class Child:
    """One supervised child and everything it said."""

    def __init__(self, role: str, settings: Settings, stall_s: float) -> None:
        self.said: list[FromChild] = []
        self.losses: list[str] = []
        self.supervisor = Supervisor(role, settings, self.said.append, self.losses.append, stall_s)
        self.task = asyncio.create_task(self.supervisor.run())

    @property
    def pid(self) -> int:
        return self.supervisor.pid

    @property
    def loaded(self) -> Loaded | None:
        """What it said last about its library."""
        return next((word for word in reversed(self.said) if isinstance(word, Loaded)), None)

    @property
    def problems(self) -> list[str]:
        return [word.problem for word in self.said if isinstance(word, Unusable)]

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def ended(self, session: int) -> Ended | None:
        return next((word for word in self.said if isinstance(word, Ended) and word.session == session), None)

    def is_accepted(self, session: int) -> bool:
        return any(isinstance(word, Accepted) and word.session == session for word in self.said)

    def newest(self, session: int) -> int:
        """Sequence of the newest heartbeat of a session."""
        return max((dict(word.newest).get(session, 0) for word in self.said if isinstance(word, Beats)), default=0)

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


class Scene:
    """The hub of a test, and its beaters."""

    def __init__(self, settings: Settings, stall_s: float) -> None:
        """stall_s: of the hub; a test that is about silence makes it short for its victim only."""
        self.settings = settings
        self.children: list[Child] = []
        self.hub = self.start("hub", stall_s)
        self._numbers = itertools.count(1)

    def start(self, role: str, stall_s: float) -> Child:
        self.children.append(Child(role, self.settings, stall_s))
        return self.children[-1]

    async def beater(self, stall_s: float = 20.0) -> Child:
        made = self.start("beater", stall_s)
        await until(lambda: made.loaded)
        return made

    def invite(self, beater: Child, incarnation: int = 1, knock: int | None = None) -> tuple[int, str]:
        """Tell a beater to meet the hub; session and port."""
        loaded = self.hub.loaded
        assert loaded is not None
        session = next(self._numbers)
        port = loaded.ports[session % len(loaded.ports)]
        place = (loaded.means.address, loaded.means.knock if knock is None else knock)
        beater.supervisor.say(words.Meet(session, incarnation, port, place))
        return session, port

    async def meet(self, beater: Child, incarnation: int = 1) -> int:
        """The whole rendezvous, to the first heartbeat; the session."""
        session, port = self.invite(beater)
        await until(lambda: Going(session) in beater.said)
        self.hub.supervisor.say(words.Accept(session, incarnation, port))
        await until(lambda: self.hub.newest(session))
        return session

    async def is_heard_on(self, session: int, count: int = 2) -> None:
        """Until so many more heartbeats have come: the session goes on."""
        seen = self.hub.newest(session)
        await until(lambda: self.hub.newest(session) >= seen + count)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def play(act: Callable[[Scene], Awaitable[None]], stall_s: float = 20.0, **settings: object) -> None:
    """Run one scene once its hub has loaded, or has said that it cannot."""

    async def run() -> None:
        scene = Scene(Settings(**{"interface": "lo", "interval_s": 0.05} | settings), stall_s)
        try:
            async with asyncio.timeout(LIMIT_S):
                await until(lambda: scene.hub.loaded or scene.hub.problems)
                await act(scene)
        finally:
            pids = [child.pid for child in scene.children if child.pid]
            await asyncio.gather(*(child.close() for child in scene.children))
            assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    asyncio.run(run())


__all__ = ["Child", "Scene", "play", "signal", "until"]
