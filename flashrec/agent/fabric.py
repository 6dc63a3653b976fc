"""The agent's side of the heartbeats over MPI: keeps a beater, and passes on what it and the manager's hub have to say.

All initiative is the manager's: it offers a hub, the agent answers with what its beater can do, is given a port, and
says when the beater connects. A life of the agent has its own beater, and each hub is met by a fresh one at most once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from flashrec.transport.mpi.supervisor import Supervisor
from flashrec.transport.mpi.words import Beats, Ended, FromChild, Going, Loaded, Means, Meet, Settings, Unusable
from flashrec.wire import messages as m

log = logging.getLogger("flashrec.agent")


class Fabric:
    """address: ours on the control connection. send: to the manager. sent: (session, number of heartbeats sent)."""

    def __init__(self, incarnation: int, address: str, send: Callable[[m.Message], None]) -> None:
        self._incarnation, self._address, self._send = incarnation, address, send
        self._supervisor: Supervisor | None = None
        self._running: asyncio.Task[None] | None = None
        self._offer: m.FabricOffered | None = None  # one that is not answered yet
        self._means: Means | None = None
        self._hub = 0  # of the offer that was answered last
        self._met = 0  # the hub that this beater has met, well or not
        self._session = 0
        self.sent = (0, 0)

    def take(self, message: m.FabricOffered | m.FabricPort) -> None:
        """What the manager says."""
        match message:
            case m.FabricOffered():
                self._offer = message
                if self._supervisor is None:
                    self._start(message)
                elif self._met == message.hub:
                    self._renew("it meets each hub once")
                elif self._means is not None:
                    self._answer(self._means)
            case m.FabricPort() if self._means is None or self._supervisor is None:
                self._send(m.FabricEnded(message.session, "its MPI beater is being replaced"))
            case m.FabricPort():
                self._session, self._met = message.session, self._hub
                knock = (message.address, message.knock)
                self._supervisor.say(Meet(message.session, self._incarnation, message.port, knock))

    async def close(self) -> None:
        """End the beater."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    def _start(self, offer: m.FabricOffered) -> None:
        settings = Settings(
            offer.provider, offer.interface, self._address, offer.library, offer.ports, offer.interval_s
        )
        self._supervisor = Supervisor("beater", settings, self._hear, self._gone)
        self._running = asyncio.create_task(self._supervisor.run())

    def _renew(self, reason: str) -> None:
        assert self._supervisor is not None
        self._means, self._met, self._session = None, 0, 0
        self._supervisor.renew(reason)

    def _hear(self, word: FromChild) -> None:
        match word:
            case Loaded():
                self._means, self._met, self._session = word.means, 0, 0
                if self._offer is not None:
                    self._answer(word.means)
            case Unusable():
                log.warning("no heartbeats over MPI: %s", word.problem)
                hub = self._offer.hub if self._offer is not None else self._hub
                self._send(m.FabricReady(hub, problem=word.problem))
            case Going():
                self._send(m.FabricGoing(word.session))
            case Ended():
                self._end(word.session, word.reason)
            case Beats():
                self.sent = word.newest[0]

    def _answer(self, means: Means) -> None:
        assert self._offer is not None
        self._hub, self._offer = self._offer.hub, None
        self._send(m.FabricReady(self._hub, means.library, means.provider, means.interface, means.address))

    def _gone(self, reason: str) -> None:
        log.warning("the MPI beater is replaced: %s", reason)
        self._means = None
        self._end(self._session, f"its MPI beater was lost ({reason})")

    def _end(self, session: int, reason: str) -> None:
        if session and session == self._session:
            self._session = 0
            self._send(m.FabricEnded(session, reason))
