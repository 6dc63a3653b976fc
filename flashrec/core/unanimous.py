"""Do all ranks meet a condition? Asked at every event, so it must not cost a look at every rank.

The one that did not meet it the last time is looked at first; only when it does the search goes on behind it. So one
phase, in which every rank comes to meet the condition once, costs about two looks a rank, not one a rank and event.
Where the search begins is all that is remembered: the answer is always that of the list as it is now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeVar

import msgspec

T = TypeVar("T")


class Unanimous(msgspec.Struct):
    """One per condition. at: where the search begins."""

    at: int = 0

    def is_met(self, members: Sequence[T], condition: Callable[[T], object]) -> bool:
        """True when `condition` holds for all of `members`."""
        start = self.at if self.at < len(members) else 0
        if members and not condition(members[start]):  # as good as always
            self.at = start
            return False
        for index in chain(range(start + 1, len(members)), range(start)):
            if not condition(members[index]):
                self.at = index
                return False
        return True
