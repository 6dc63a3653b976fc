"""What a script registers with `flashrec.Session(state=…)`: objects with a state, and generators of random numbers."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from flashrec.runtime import codec
from flashrec.runtime.snapshot import Snapshot, Stateful
from flashrec.runtime.timeline import logger

_NUM_COMPARED = 16  # objects that are compared one by one; the others as one


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

    A `flashrec.runtime.parallel.part.Checker` that looks at the version counters of their tensors, which the snapshot
    has noted.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def check(self, step: int) -> None:
        """Raises RuntimeError that names what was changed too early."""
        if names := self._snapshot.changed_large():
            raise RuntimeError(
                f"step {step} has changed {', '.join(f'state[{name!r}]' for name in names)} before optimizer.step(): "
                "it is too large to be kept, so that could not be undone if the step is done again. Change it after "
                "optimizer.step(), as an average of the weights is"
            )


class Alike:
    """Do replicas register the same? Compared once, in the second step, as `agreement` does for the model.

    A replacement gets the registered state of its source. What each rank counts for itself would then be another's,
    and nobody would notice. Tensors that travel aside (an average of the weights) are not compared.
    """

    name = "registered"

    def __init__(
        self, rank: int, replicas: Callable[[], tuple[int, ...]], objects: Mapping[str, Stateful], device: torch.device
    ) -> None:
        self._rank, self._replicas, self._objects, self._device = rank, replicas, objects, device
        self._step = -1  # in which it is compared; the same on every rank

    def before_vote(self, step: int) -> None:
        if self._step < 0:
            self._step = step + 1
        if step == self._step:  # also when it is done again
            self._compare()

    def settle_for(self, step: int) -> None:
        """Nothing changes with a step."""

    def describe(self) -> int:
        return self._step

    def impose(self, described: int) -> None:
        self._step = described

    def complete(self) -> None:
        """Nothing is owed."""

    def _compare(self) -> None:
        told = torch.zeros(dist.get_world_size(), _NUM_COMPARED, dtype=torch.int64, device=self._device)
        names = sorted(self._objects)
        for number, name in enumerate(names):
            told[self._rank, min(number, _NUM_COMPARED - 1)] += _digest(name, self._objects[name])
        dist.all_reduce(told)
        found = told.tolist()
        mine = found[self._rank]
        for number, name in enumerate(names):
            column = min(number, _NUM_COMPARED - 1)
            if others := [rank for rank in self._replicas() if found[rank][column] != mine[column]]:
                logger.warning(
                    "state[%r] of rank %d is not that of rank %s: a replacement would get another rank's. Register "
                    "what is the same on all replicas, and derive from the step what is not",
                    name,
                    self._rank,
                    ", ".join(map(str, others)),
                )


def _digest(name: str, item: Stateful) -> int:
    data = codec.encode(item.state_dict(), f"state[{name!r}]", [])
    return int.from_bytes(hashlib.sha256(data).digest()[:7], "big")
