"""Nothing may change a parameter between the start of a step and its vote: that could not be undone.

An optimizer that runs inside of the backward, or code that clamps weights in the block, does just that. Each tensor
counts its changes in place, so to look is cheap. Fused optimizers do not count, so every `step()` of an optimizer that
the session does not know is looked at, too. What goes round both (`param.data.add_()`) is not seen.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flashrec.runtime.torch_private import optim

_VERSION = operator.attrgetter("_version")
_ADVICE = (
    "if the step is done again, that cannot be undone. Is there an optimizer that steps inside of the backward, or one "
    "that the session does not know? Give it to flashrec.Session(…), call its step() after the backward, and change "
    "weights by hand only after optimizer.step()"
)


class Untouched:
    """A `flashrec.runtime.parallel.part.Part` that looks at the parameters of a model."""

    name = "untouched"

    def __init__(self, model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._known = known = set(map(id, optimizers))
        self._is_open = False
        self._ids = {id(param): name for name, param in model.named_parameters()}
        look = weakref.WeakMethod(self._look_at)  # a hook of the whole process must not keep a model alive
        hook = register_optimizer_step_pre_hook(
            lambda optimizer, *_: None if id(optimizer) in known or not (found := look()) else found(optimizer)
        )
        weakref.finalize(self, hook.remove)
        self._params = list(model.parameters())
        self._names = [name for name, _ in model.named_parameters()]
        self._versions: list[int] = []

    def open(self, step: int) -> None:
        self._is_open = True
        self._versions = list(map(_VERSION, self._params))

    def check(self, step: int) -> None:
        """Raises RuntimeError that names a parameter which was changed too early, or is about to be."""
        self._is_open = False
        if optim.is_in_backward():
            raise RuntimeError(
                "optimizer.step() inside of the backward: the ranks cannot vote for a step that has not all gradients "
                "yet; call it after the backward"
            )
        if list(map(_VERSION, self._params)) == self._versions:
            return
        changed = [
            name
            for name, param, version in zip(self._names, self._params, self._versions, strict=True)
            if param._version != version
        ]
        count = f"{len(changed)} parameters, {changed[0]} for one,"
        raise RuntimeError(f"step {step} has changed {count} before optimizer.step(): {_ADVICE}")

    def settle_for(self, step: int) -> None:
        """The next step looks anew."""
        self._is_open = False

    def describe(self) -> None:
        return None

    def impose(self, described: Any) -> None:
        """Nothing is kept."""

    def complete(self) -> None:
        """Nothing is owed."""

    def _look_at(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._is_open:
            return
        params = (param for group in optimizer.param_groups for param in group["params"])
        name = next((self._ids[id(param)] for param in params if id(param) in self._ids), None)
        if name is not None:
            kind = type(optimizer).__name__
            raise RuntimeError(f"{kind} is about to change {name} before the session's optimizer.step(): {_ADVICE}")
