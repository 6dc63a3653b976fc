"""Random numbers of what loads data, apart from those of the step.

Samplers, data sets and collate functions draw from Python's, numpy's and torch's global generators, or from one that
they hold. What they draw must not depend on when it is drawn, nor move the numbers of the step that asks for the batch.
So all of it happens in a stream of its own: the global generators are seeded for it and put back afterwards.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_MAX_OBJECTS, _MAX_DEPTH, _MAX_ITEMS = 10_000, 6, 100  # how far generators are looked for: not into the samples
_PLAIN = (str, bytes, int, float, complex, bool, type, types.ModuleType, torch.Tensor)
_State = tuple[Any, Any, torch.Tensor]


class Stream:
    """A sequence of random numbers that goes on where it was left: `with stream:` around what draws from it."""

    def __init__(self, seed: int) -> None:
        self._seed: int | None = seed
        self._mine: _State | None = None
        self._theirs: _State | None = None

    def __enter__(self) -> None:
        self._theirs = _state()
        if self._mine is None:
            _seed(self._seed or 0)
        else:
            _set_state(self._mine)

    def __exit__(self, *_: object) -> None:
        self._mine = _state()
        if self._theirs is not None:
            _set_state(self._theirs)


@contextmanager
def drawn_from(seed: int, held: Iterable[Any] = (), *, restore: bool = True) -> Iterator[None]:
    """Global generators, and those in `held`, start from `seed`. restore: put the global ones back at the end."""
    theirs = _state() if restore else None
    _seed(seed)
    seed_each(held, seed)
    try:
        yield
    finally:
        if theirs is not None:
            _set_state(theirs)


def held_by(*roots: Any, depth: int = _MAX_DEPTH) -> list[Any]:
    """Generators that these objects, or what they refer to as attributes, items or closures, hold for themselves.
    depth: 1 for their own attributes only."""
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (random.Random, torch.Generator)
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    found: list[Any] = []
    seen: set[int] = set()
    level = list(roots)
    for _ in range(depth + 1):
        following: list[Any] = []
        for value in level:
            if isinstance(value, _PLAIN) or id(value) in seen or len(seen) > _MAX_OBJECTS:
                continue
            seen.add(id(value))
            if isinstance(value, kinds):
                found.append(value)
            else:
                following += _inside(value)
        level = following
    return found


def seed_each(generators: Iterable[Any], seed: int) -> None:
    """Seed generators of Python, numpy and torch."""
    for generator in generators:
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, random.Random):
            generator.seed(seed)
        elif hasattr(generator, "bit_generator"):
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        else:
            generator.seed(seed & 0xFFFFFFFF)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())[:_MAX_ITEMS]
    if isinstance(value, list | tuple):
        return list(value[:_MAX_ITEMS])
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        return [cell.cell_contents for cell in cells if cell != types.CellType()]
    return list(getattr(value, "__dict__", {}).values())


def _seed(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def _state() -> _State:
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state(legacy=False) if numpy is not None else None
    return random.getstate(), drawn, torch.default_generator.get_state()


def _set_state(state: _State) -> None:
    python, drawn, of_torch = state
    random.setstate(python)
    if drawn is not None:
        sys.modules["numpy"].random.set_state(drawn)
    torch.default_generator.set_state(of_torch)
