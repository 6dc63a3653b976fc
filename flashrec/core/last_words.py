"""What dying scripts said, and whether it was a bug: the same exception at the same step in a later attempt.

A fault may raise as well (a peer is lost, a GPU has fallen off), so the first sighting of an exception is no verdict.
An attempt is what happens between two resumes; however many ranks raise in it, that is one sighting.
"""

from __future__ import annotations

import msgspec

from flashrec.core.events import WorkerRaised


class LastWords(msgspec.Struct):
    """said: rank -> exception of its newest life. seen: (step, fingerprint) -> attempt it was first seen in."""

    said: dict[int, WorkerRaised] = {}
    seen: dict[tuple[int, str], int] = {}
    attempt: int = 1

    def of(self, rank: int) -> WorkerRaised | None:
        return self.said.get(rank)

    def hear(self, words: WorkerRaised) -> None:
        self.said[words.rank] = words

    def forget(self, rank: int) -> None:
        """A next life of the rank begins."""
        self.said.pop(rank, None)

    def begin_world(self) -> None:
        """Next lives of all ranks begin, of which there may be fewer. It is no new attempt before all have resumed: a
        node that is not sound may raise in each of these lives, and is left out in the end."""
        self.said.clear()

    def is_repeated(self, words: WorkerRaised) -> bool:
        """True if a former attempt ended with it: a retry does not help. The first sighting is remembered."""
        key = (words.raised.step, words.raised.fingerprint)
        return self.seen.setdefault(key, self.attempt) != self.attempt
