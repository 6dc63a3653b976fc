"""Which source is asked for what next. No I/O; called by the threads of all connections of a target.

Each source gets the next piece when it is ready for one. When there are several, some of what each has sent is asked
for again at another one, the digest only: replicas that differ are found before anybody trains on a mixture of them.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from flashrec.runtime.errors import RecoveryFailed
from flashrec.runtime.transfer.pieces import Piece

CHECK_EVERY = 8  # the first piece of each source, then one in so many


@dataclass(frozen=True)
class Request:
    """check: compare only."""

    piece: Piece
    check: bool


class Requests:
    """sources: ranks; the first one sends what only one may send, and the first piece, so that it always sends."""

    def __init__(self, pieces: Sequence[Piece], sources: Sequence[int], names: Sequence[str]) -> None:
        """names: of the tensors, for messages."""
        self._sources, self._names = sources, names
        self._single = deque(piece for piece in pieces if not piece.is_shared or piece.number == 0)
        self._shared = deque(piece for piece in pieces if piece.is_shared and piece.number > 0)
        self._checks: dict[int, deque[Piece]] = {source: deque() for source in sources}
        self._num_open = len(pieces)  # pieces and checks without an answer
        self._num_sent: Counter[int] = Counter()
        self._sender: dict[int, int] = {}
        self._digests: dict[int, bytes] = {}
        self._changed = threading.Condition()
        self._is_over = False
        self.error: RecoveryFailed | None = None

    def take(self, source: int, *, wait: bool) -> Request | None:
        """The next request to `source`. None: nothing now, or with `wait` nothing any more."""
        with self._changed:
            while not self._is_over and self._num_open:
                if self._checks[source]:
                    return Request(self._checks[source].popleft(), check=True)
                if source == self._sources[0] and self._single:
                    return Request(self._single.popleft(), check=False)
                if self._shared:
                    return Request(self._shared.popleft(), check=False)
                if not wait:
                    return None
                self._changed.wait()
            return None

    def arrived(self, piece: Piece, source: int, digest: bytes) -> None:
        """`piece` is there; its digest is that of the source."""
        with self._changed:
            self._digests[piece.number], self._sender[piece.number] = digest, source
            self._num_open -= 1
            if piece.is_shared and len(self._sources) > 1:
                if self._num_sent[source] % CHECK_EVERY == 0:
                    other = self._sources[(self._sources.index(source) + 1) % len(self._sources)]
                    self._checks[other].append(piece)
                    self._num_open += 1
                self._num_sent[source] += 1
            self._changed.notify_all()

    def compared(self, piece: Piece, source: int, digest: bytes) -> str:
        """What `source` says of a piece that another one has sent. Returns what is wrong, '' when nothing is."""
        with self._changed:
            self._num_open -= 1
            self._changed.notify_all()
            if digest == self._digests[piece.number]:
                return ""
            return (
                f"rank {self._sender[piece.number]} and rank {source} hold the same shard, but other bytes in "
                f"{self.name(piece)}: memory of one of their nodes is not sound, or they have trained apart"
            )

    def fail(self, error: RecoveryFailed) -> None:
        """Ask for nothing more; `error` says why."""
        with self._changed:
            self.error = self.error or error
            self._is_over = True
            self._changed.notify_all()

    def end(self) -> None:
        """Ask for nothing more, a connection has failed."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def digests(self) -> list[bytes]:
        """In the order of the pieces, when all are there."""
        return [self._digests[number] for number in sorted(self._digests)]

    def name(self, piece: Piece) -> str:
        """Which tensors a piece is of: for messages."""
        first, last = self._names[piece.blocks[0].tensor], self._names[piece.blocks[-1].tensor]
        return first if first == last else f"{first} … {last}"
