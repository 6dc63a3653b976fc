"""What a supervisor and its child say to each other, and what a heartbeat looks like on the fabric.

A *session* is one attempt to meet, and what comes of it: a random number that the manager draws, which both sides learn
over the authenticated control connection. Every heartbeat carries it, with the incarnation of the agent: what does not
carry the right ones is not believed, whatever communicator it came through.
"""

from __future__ import annotations

import struct
from typing import Union

import msgspec

from flashrec.wire.frames import Decoder

BEAT = struct.Struct("!QQQ")  # session, incarnation, sequence; up to 128 bytes an MPI send completes at once
BEAT_TAG = 1
CONNECT_TIMEOUT_S = 3
ACCEPT_TIMEOUT_S = 1  # MPICH takes whole seconds; the hub hears nobody meanwhile
TICK_INTERVAL_S = 0.1  # a child says something at least as often (a beater: at each heartbeat)


class Word(msgspec.Struct, frozen=True, tag=True):
    """Base of all words; the class name is the tag."""


class Settings(msgspec.Struct, frozen=True):
    """towards: our address on the control connection. library: '' or the path of a libmpi. ports: (0, 0) means any."""

    provider: str = "tcp"
    interface: str = ""
    towards: str = ""
    library: str = ""
    ports: tuple[int, int] = (0, 0)
    interval_s: float = 0.25


class Means(msgspec.Struct, frozen=True):
    """What one side watches the fabric with. address: '' if the interface has none (cxi, psm3); knock: its TCP port."""

    library: str
    provider: str
    interface: str
    address: str = ""
    knock: int = 0

    def __str__(self) -> str:
        return f"{self.library}, {self.provider}" + (f" on {self.interface}" if self.interface else "")


# ---- supervisor -> child


class Begin(Word, frozen=True):
    """First word to any child."""

    settings: Settings


class Accept(Word, frozen=True):
    """Hub: the beater of this session is in Connect with this port."""

    session: int
    incarnation: int
    port: str


class Drop(Word, frozen=True):
    """Hub: the beater of this session is gone; have nothing to do with it."""

    session: int


class Meet(Word, frozen=True):
    """Beater: connect to the hub. knock: (address, port) that must answer first; ('', 0): there is none."""

    session: int
    incarnation: int
    port: str
    knock: tuple[str, int]


# ---- child -> supervisor


class Loaded(Word, frozen=True):
    """libmpi works. ports: where a hub accepts."""

    means: Means
    ports: tuple[str, ...] = ()


class Unusable(Word, frozen=True):
    """There is no libmpi here that can do it; starting again changes nothing."""

    problem: str


class Going(Word, frozen=True):
    """Beater: connecting from this moment on."""

    session: int


class Accepted(Word, frozen=True):
    """Hub: the session stands. took_s: so long nobody else was heard."""

    session: int
    took_s: float


class Ended(Word, frozen=True):
    """The session is over, or never came to be. took_s: as above."""

    session: int
    reason: str
    took_s: float = 0.0


class Beats(Word, frozen=True):
    """Hub: (session, newest sequence) of who was heard; all have been looked at. Beater: what it has sent."""

    newest: tuple[tuple[int, int], ...] = ()


ToChild = Union[Begin, Accept, Drop, Meet]
FromChild = Union[Loaded, Unusable, Going, Accepted, Ended, Beats]
to_child: Decoder[ToChild] = Decoder(ToChild)
from_child: Decoder[FromChild] = Decoder(FromChild)
_encoder = msgspec.msgpack.Encoder()


def pack(word: Word) -> bytes:
    """One word as a frame."""
    payload = _encoder.encode(word)
    return struct.pack("!I", len(payload)) + payload
