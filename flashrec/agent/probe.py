"""Indirect probes: this agent looks at other nodes for the manager, and answers when others look at it.

    prober                                            the node that is looked at
    "FRP?" nonce (16)  mac(ask, nonce, life)    ───►  of this very life? else silence
                                                ◄───  "FRP!" nonce  mac(answer, nonce, life)

UDP, because a probe must not depend on a connection; one socket per path (control, fabric), bound to this node's
address there. A life is a node's name and the incarnation of its agent, and both ends prove the job secret over it, so
neither travels, and a former life, another node at a re-used address and a stranger get no answer. An answer is as long
as its question: nothing is amplified. A look sends NUM_DATAGRAMS, SPACING_S apart: with 30 % loss each way one look in
thirty fails. What is kept is bounded by MAX_LOOKS.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import socket
from collections.abc import Callable

from flashrec.wire import messages as m

log = logging.getLogger("flashrec.agent")
NUM_DATAGRAMS = 5
SPACING_S = 0.05
MAX_LOOKS = 64  # at the same time; who asks for more is told that we could not look
_ASK, _ANSWER = b"FRP?", b"FRP!"
_NONCE_BYTES, _MAC_BYTES = 16, 32
DATAGRAM_BYTES = len(_ASK) + _NONCE_BYTES + _MAC_BYTES
_MAX_PER_WAKE = 64  # datagrams read before others get their turn


class ProbePort:
    """One UDP socket on one path. life(): (node, incarnation) that we answer for, None: nobody yet. Raises OSError."""

    def __init__(self, secret: bytes, host: str, life: Callable[[], tuple[str, int] | None]) -> None:
        self._secret, self._life = secret, life
        self._awaited: dict[bytes, tuple[bytes, asyncio.Future[bool]]] = {}
        numeric = socket.AI_NUMERICHOST  # never ask a name server
        family, kind, proto, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM, flags=numeric)[0]
        self._socket = socket.socket(family, kind, proto)
        try:
            self._socket.setblocking(False)
            self._socket.bind(address)
        except OSError:
            self._socket.close()
            raise
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._receive)

    @property
    def place(self) -> tuple[str, int]:
        """(host, port) for others."""
        host, port = self._socket.getsockname()[:2]
        return str(host), int(port)

    def close(self) -> None:
        self._loop.remove_reader(self._socket)
        self._socket.close()
        for _, answered in self._awaited.values():
            if not answered.done():
                answered.set_result(False)

    async def look(self, place: tuple[str, int], life: tuple[str, int], timeout_s: float) -> tuple[bool | None, str]:
        """Whether that life answers at `place`; (None, why) if we could not look."""
        if len(self._awaited) >= MAX_LOOKS:
            return None, f"{MAX_LOOKS} looks are under way"
        nonce = secrets.token_bytes(_NONCE_BYTES)
        question = _ASK + nonce + self._mac(_ASK, nonce, life)
        answered: asyncio.Future[bool] = self._loop.create_future()
        self._awaited[nonce] = (self._mac(_ANSWER, nonce, life), answered)
        ends_at, num_sent, problem = self._loop.time() + timeout_s, 0, ""
        try:
            for _ in range(NUM_DATAGRAMS):
                try:
                    self._socket.sendto(question, place)
                    num_sent += 1
                except BlockingIOError:
                    problem = "the socket is full"
                except OSError as err:
                    problem = str(err)
                await asyncio.wait([answered], timeout=min(SPACING_S, ends_at - self._loop.time()))
                if answered.done():
                    break
            await asyncio.wait([answered], timeout=max(0.0, ends_at - self._loop.time()))
            if answered.done():
                return (True, "") if answered.result() else (None, "the port was closed")
            return (False, "") if num_sent else (None, problem)
        finally:
            del self._awaited[nonce]

    def _receive(self) -> None:
        for _ in range(_MAX_PER_WAKE):
            try:
                datagram, sender = self._socket.recvfrom(DATAGRAM_BYTES + 1)
            except BlockingIOError:
                return
            except OSError:
                continue  # an earlier datagram of ours came back: the look it belongs to will see no answer
            self._hear(datagram, sender)

    def _hear(self, datagram: bytes, sender: tuple[str, int]) -> None:
        kind, nonce, proof = datagram[:4], datagram[4:20], datagram[20:]
        if kind == _ASK:
            life = self._life()
            if life is not None and hmac.compare_digest(proof, self._mac(_ASK, nonce, life)):
                try:
                    self._socket.sendto(_ANSWER + nonce + self._mac(_ANSWER, nonce, life), sender)
                except OSError as err:
                    log.debug("probe not answered: %s", err)
        elif kind == _ANSWER and nonce in self._awaited:
            expected, answered = self._awaited[nonce]
            if hmac.compare_digest(proof, expected) and not answered.done():
                answered.set_result(True)

    def _mac(self, label: bytes, nonce: bytes, life: tuple[str, int]) -> bytes:
        node, incarnation = life
        text = b"probe " + label + nonce + incarnation.to_bytes(8, "big") + node.encode()
        return hmac.new(self._secret, text, hashlib.sha256).digest()


class Prober:
    """The ports of one life of the agent. send: to the manager."""

    def __init__(self, secret: bytes, node: str, send: Callable[[m.Message], None]) -> None:
        self._secret, self._node, self._send = secret, node, send
        self._incarnation = 0
        self._ports: dict[str, ProbePort] = {}
        self._looks: set[asyncio.Task[None]] = set()

    def welcomed(self, incarnation: int, control_host: str) -> None:
        """This life is admitted: answer for it on the control path, and say where."""
        self._incarnation = incarnation
        self.offer("control", control_host)

    def offer(self, path: str, host: str) -> None:
        """Answer, and look, on this path from `host` on, our address there. A path whose address cannot be had is not
        offered: others then cannot look, which says nothing about this node."""
        if path in self._ports and self._ports[path].place[0] == host:
            return
        self._drop(path)
        try:
            self._ports[path] = ProbePort(self._secret, host, self._life)
        except OSError as err:
            log.warning("no probes over the %s path from %s: %s", path, host, err)
        self._send(m.ProbesOffered({name: port.place for name, port in self._ports.items()}))

    def ask(self, asked: m.ProbeAsked) -> None:
        """Look, and tell the manager; returns at once."""
        task = asyncio.create_task(self._look(asked))
        self._looks.add(task)
        task.add_done_callback(self._looks.discard)

    def close(self) -> None:
        for task in self._looks:
            task.cancel()
        for path in list(self._ports):
            self._drop(path)

    async def _look(self, asked: m.ProbeAsked) -> None:
        port = self._ports.get(asked.path)
        if port is None:
            reached, said = None, f"no address on the {asked.path} path"
        else:
            reached, said = await port.look((asked.host, asked.port), (asked.node, asked.incarnation), asked.timeout_s)
        self._send(m.ProbeAnswered(asked.number, asked.node, asked.path, reached, said))

    def _life(self) -> tuple[str, int] | None:
        return (self._node, self._incarnation) if self._incarnation else None

    def _drop(self, path: str) -> None:
        port = self._ports.pop(path, None)
        if port is not None:
            port.close()
