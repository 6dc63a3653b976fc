"""When findings about a node become "sick" and "well" again. Pure: what was found goes in, the state comes out.

Each check is counted for itself: `fail_after` failing looks in a row make the node sick, and it is well when every
check that made it so has been good `well_after` times in a row. A look that could not see is neither. Two things count
at once: what is found before the node is admitted (nothing runs there yet, so doubt costs nothing), and a finding that
names its own `fail_after` (a lost GPU does not come back by being looked at again).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

GOOD = frozenset({"ok", "warn"})


class HealthRules(msgspec.Struct, frozen=True):
    """What an agent has to do; the section `health` of the configuration explains each field. Times in seconds."""

    enabled: bool = False
    file: str = ""
    only: tuple[str, ...] = ()
    admit: tuple[str, ...] = ()
    period_s: float = 240.0
    again_s: float = 5.0
    timeout_s: float = 15.0
    gpu_period_s: float = 10.0
    fail_after: int = 3
    well_after: int = 2


class Found(msgspec.Struct, frozen=True):
    """One check's word. status: 'ok', 'warn', 'fail', 'unknown'. fail_after: looks in a row; 0: as the rules say."""

    check: str
    status: str
    reason: str = ""
    fail_after: int = 0


class _Count(msgspec.Struct):
    failed: int = 0
    good: int = 0
    is_sick: bool = False
    reason: str = ""


class NodeState:
    """The state of one node: 'unknown' until some check was good, then 'well' or 'sick'. is_admitted: it may be in use,
    so one failing look is not enough any more."""

    def __init__(self, rules: HealthRules) -> None:
        self._rules = rules
        self._counts: dict[str, _Count] = {}
        self._could_not: dict[str, str] = {}
        self.is_admitted = False
        self._has_seen_good = False

    def look(self, found: Iterable[Found]) -> None:
        """Take one look."""
        for one in found:
            if one.status == "unknown":
                self._could_not[one.check] = one.reason
                continue
            self._could_not.pop(one.check, None)
            self._count(one)

    def _count(self, one: Found) -> None:
        count = self._counts.setdefault(one.check, _Count())
        if one.status in GOOD:
            self._has_seen_good = True
            count.failed, count.good = 0, count.good + 1
            if count.good >= self._rules.well_after:
                count.is_sick, count.reason = False, ""
            return
        count.failed, count.good = count.failed + 1, 0
        needed = one.fail_after or (self._rules.fail_after if self.is_admitted else 1)
        count.is_sick = count.is_sick or count.failed >= needed
        count.reason = one.reason

    @property
    def state(self) -> str:
        if any(count.is_sick for count in self._counts.values()):
            return "sick"
        return "well" if self._has_seen_good else "unknown"

    @property
    def reasons(self) -> tuple[str, ...]:
        """Check and finding of what makes the node sick; if nothing could be seen at all, why not."""
        if self.state == "unknown":
            return tuple(f"{check}: {reason}" for check, reason in sorted(self._could_not.items()))
        return tuple(f"{name}: {count.reason}" for name, count in sorted(self._counts.items()) if count.is_sick)

    @property
    def is_in_doubt(self) -> bool:
        """A check has begun to fail, or to be good again, and needs more looks to be believed: look again soon."""
        return any(count.good if count.is_sick else count.failed for count in self._counts.values())
