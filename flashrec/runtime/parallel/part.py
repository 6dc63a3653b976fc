"""What a kind of parallelism keeps inside torch that a recovery has to know about.

DDP remembers gradient buckets, FSDP half-gathered parameters, a pipeline stage whether it has shaken hands. None of it
is in a state_dict, and a rank that differs in it from its peers issues other collectives than they do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from flashrec.runtime import codec
from flashrec.runtime.errors import LayoutMismatch


class Part(Protocol):
    """All instances of one kind in the model of this rank."""

    name: str  # of the kind, the same on every rank

    def settle_for(self, step: int) -> None:
        """After a fence, on a rank that keeps its state: as it was when `step` began. No communication."""

    def describe(self) -> Any:
        """What a target has to take over, for `codec`; asked for after `settle_for`. None: nothing."""

    def impose(self, described: Any) -> None:
        """On a target, whose tensors have arrived: take over what the source described, and settle. No communication.
        Raises LayoutMismatch when it belongs to another model."""

    def complete(self) -> None:
        """After a fence, groups work again and every state that can be local is restored: communication that an
        interrupted update still owes. Called on all ranks of a generation, or on none. Raises RuntimeError."""


@runtime_checkable
class Opener(Protocol):
    """A `Part` that wants to know of each step."""

    def open(self, step: int) -> None:
        """`step` begins, for the first time or again. No communication. What it raises is told to the script."""


@runtime_checkable
class Checker(Protocol):
    """Looks whether this rank may vote for a step."""

    def check(self, step: int) -> None:
        """All gradients of `step` are there. No communication. What it raises is told to the script."""


@runtime_checkable
class Voter(Protocol):
    """A `Part` that has to do something before each vote."""

    def before_vote(self, step: int) -> None:
        """All gradients of `step` are there, on every rank alike; the same collectives may be issued on all ranks."""


class Parts:
    """The parts of one session, in an order that all ranks share."""

    def __init__(self, parts: Iterable[Part], checkers: Iterable[Checker] = ()) -> None:
        """checkers: more of them, which have nothing to do in a recovery."""
        self._parts = sorted(parts, key=lambda part: part.name)
        self._openers = [part for part in self._parts if isinstance(part, Opener)]
        self._checkers = [*(part for part in self._parts if isinstance(part, Checker)), *checkers]
        self._voters = [part for part in self._parts if isinstance(part, Voter)]

    def open(self, step: int) -> None:
        for part in self._openers:
            part.open(step)

    def before_vote(self, step: int) -> None:
        """The checks first: what comes after them may wait for other ranks, and they wait for whatever precedes it."""
        for checker in self._checkers:
            checker.check(step)
        for part in self._voters:
            part.before_vote(step)

    def settle_for(self, step: int) -> None:
        for part in self._parts:
            part.settle_for(step)

    def complete(self) -> None:
        for part in self._parts:
            part.complete()

    def describe(self) -> dict[str, bytes]:
        """For the manifest: the description of every part. Raises CannotEncode."""
        return {part.name: codec.encode(part.describe(), f"parts[{part.name!r}]") for part in self._parts}

    def impose(self, described: Mapping[str, bytes]) -> None:
        """Raises LayoutMismatch, also when source and target do not have the same parts."""
        if list(described) != [part.name for part in self._parts]:
            raise LayoutMismatch(
                f"the source trains with {list(described)}, this rank with {[part.name for part in self._parts]}: "
                "wrap the model alike on every rank"
            )
        for part in self._parts:
            part.impose(codec.decode(described[part.name]))
