"""What a script registers with `flashrec.Session(state=…)`: objects with a state, and generators of random numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from flashrec.runtime.snapshot import Snapshot, Stateful


class Generator:
    """A generator of Python, numpy or torch as an object with a state."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        generator = self._generator
        if isinstance(generator, torch.Generator):
            return {"state": generator.get_state()}
        if isinstance(generator, random.Random):
            return {"state": generator.getstate()}
        if hasattr(generator, "bit_generator"):
            return {"state": generator.bit_generator.state}
        return {"state": generator.get_state(legacy=False)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        generator, value = self._generator, state["state"]
        if isinstance(generator, torch.Generator):
            generator.set_state(value)
        elif isinstance(generator, random.Random):
            generator.setstate(value)
        elif hasattr(generator, "bit_generator"):
            generator.bit_generator.state = value
        else:
            generator.set_state(value)


def registered(state: Mapping[str, Any]) -> dict[str, Stateful]:
    """Every item as an object with a state. Raises TypeError that names the one that has none."""
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    found: dict[str, Stateful] = {}
    for name, item in state.items():
        if isinstance(item, kinds):
            found[name] = Generator(item)
        elif hasattr(item, "state_dict") and hasattr(item, "load_state_dict"):
            found[name] = item
        else:
            raise TypeError(f"state[{name!r}] ({type(item).__name__}) has no state_dict() and load_state_dict()")
    return found


class LargeState:
    """Registered objects that are too large to be kept for each step: they may not change before the vote.

    A `flashrec.runtime.parallel.part.Part` that looks at the version counters of their tensors.
    """

    name = "large state"

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def open(self, step: int) -> None:
        """The snapshot of the step has been taken."""

    def before_vote(self, step: int) -> None:
        """Raises RuntimeError that names what was changed too early."""
        if names := self._snapshot.changed_large():
            raise RuntimeError(
                f"step {step} has changed {', '.join(f'state[{name!r}]' for name in names)} before optimizer.step(): "
                "it is too large to be kept, so that could not be undone if the step is done again. Change it after "
                "optimizer.step(), as an average of the weights is"
            )

    def settle_for(self, step: int) -> None:
        """Nothing is kept."""

    def describe(self) -> None:
        return None

    def impose(self, described: Any) -> None:
        """Nothing is kept."""

    def complete(self) -> None:
        """Nothing is owed."""
