"""Nothing may change a parameter between the start of a step and its vote: that could not be undone.

An optimizer that runs inside of the backward, or code that clamps weights in the block, does just that. Each tensor
counts its changes in place, so to look is exact and cheap (0.1 µs a parameter). What goes round that count
(`param.data.add_()`) is not seen.
"""

from __future__ import annotations

from typing import Any

import torch


class Untouched:
    """A `flashrec.runtime.parallel.part.Part` that looks at the parameters of a model."""

    name = "untouched"

    def __init__(self, model: torch.nn.Module) -> None:
        self._params = list(model.parameters())
        self._names = [name for name, _ in model.named_parameters()]
        self._versions: list[int] = []

    def open(self, step: int) -> None:
        self._versions = [param._version for param in self._params]

    def before_vote(self, step: int) -> None:
        """Raises RuntimeError that names a parameter which was changed too early."""
        if [param._version for param in self._params] == self._versions:
            return
        changed = [
            name
            for name, param, version in zip(self._names, self._params, self._versions, strict=True)
            if param._version != version
        ]
        raise RuntimeError(
            f"step {step} has changed {len(changed)} parameters, {changed[0]} for one, before optimizer.step() of the "
            "session's optimizers: if the step is done again, that cannot be undone. Is there an optimizer that steps "
            "inside of the backward, or one that the session does not know? Give it to flashrec.Session(…), call its "
            "step() after the backward, and change weights by hand only after optimizer.step()"
        )

    def settle_for(self, step: int) -> None:
        """The next step looks anew."""

    def describe(self) -> None:
        return None

    def impose(self, described: Any) -> None:
        """Nothing is kept."""

    def complete(self) -> None:
        """Nothing is owed."""
