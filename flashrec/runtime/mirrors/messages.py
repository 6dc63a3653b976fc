"""What a rank and the holder of its mirror say to each other, on one connection for as long as a generation lasts.

rank                                      holder
(handshake of transport.handshake)
Ship (which state, its manifest) ──────►  takes the slot that is not the newest complete one
the bytes of the slot ─────────────────►
Sealed (digest) ───────────────────────►  compares it with its own
                      ◄─────────────────  Acknowledged: it counts from now on; or why it does not
"""

from __future__ import annotations

import msgspec


class Ship(msgspec.Struct, frozen=True):
    """The state of `rank` at the start of step v follows, `size` bytes."""

    rank: int
    generation: int
    v: int
    size: int
    manifest: bytes


class Sealed(msgspec.Struct, frozen=True):
    """After the bytes: their digest, and that of the manifest, as `slots.digest_of` takes it."""

    digest: bytes


class Acknowledged(msgspec.Struct, frozen=True):
    """error: '' means that the mirror of step v counts."""

    v: int
    error: str = ""
