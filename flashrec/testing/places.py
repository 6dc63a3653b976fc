"""Where the training script is, seen from torch's own hooks: the only module of this package that imports torch.

    forward           a global forward pre-hook, half way through the module calls of the step
    backward          post-accumulate-grad hooks of the parameters, half way through them
    before-vote       the global optimizer pre-hook: runs before an optimizer's own pre-hooks, where the vote is
    in-optimizer      a pre-hook of that optimizer added last, so after the vote: it updates the first half of the
                      parameters, visits, and leaves the rest to the real update. Same numbers for every optimizer
                      that treats its parameters one by one (SGD, Adam, AdamW, ...)
    after-optimizer   the global optimizer post-hook: runs after an optimizer's own post-hooks
    join, step        flashrec.Session: its constructor, and what its `steps` yields. A script without a Session is
                      counted by its optimizer steps

With several optimizers the first one counts. Global forward hooks switch fused fast paths of some modules off.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flashrec.testing.injector import Injector


class Places:
    """Follows one training script and calls `injector.visit`; `install` once per process, before the script."""

    def __init__(self, injector: Injector):
        self.injector = injector
        self.step: int | None = None
        self._has_session = False
        self._num_forward = self._num_forward_last = self._num_gradients = 0
        self._hooked: set[torch.Tensor] = set()
        self._second_half: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._half_update: Any = None

    def install(self, session_class: Any) -> None:
        """Hook torch, and flashrec.Session unless session_class is None."""
        register_module_forward_pre_hook(self._on_forward)
        register_optimizer_step_pre_hook(self._on_optimizer_begin)
        register_optimizer_step_post_hook(self._on_optimizer_end)
        self.begin_step(0)
        if session_class is not None:
            self._wrap(session_class)

    def _wrap(self, session_class: Any) -> None:
        places, create, steps = self, session_class.__init__, session_class.steps

        def init_and_visit(session: Any, *args: Any, **kwargs: Any) -> None:
            places._has_session, places.step = True, None
            places.injector.visit("join", None)
            create(session, *args, **kwargs)

        def steps_and_follow(session: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
            for step in steps(session, *args, **kwargs):
                places.begin_step(int(step))
                yield step
            places.step = None

        session_class.__init__, session_class.steps = init_and_visit, steps_and_follow

    def begin_step(self, step: int) -> None:
        """A step begins, or begins again."""
        self.step = step
        self._num_forward_last = max(self._num_forward_last, self._num_forward)
        self._num_forward = self._num_gradients = 0

    def _on_forward(self, module: torch.nn.Module, args: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and parameter.is_leaf and parameter not in self._hooked:
                self._hooked.add(parameter)
                parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
        if self.step is None or not torch.is_grad_enabled():
            return
        self._num_forward += 1
        if self._num_forward == self._num_forward_last // 2 + 1:
            self.injector.visit("forward", self.step)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self.step is None:
            return
        self._num_gradients += 1
        if self._num_gradients == 1:
            self.injector.hold(self.step)
            self.injector.watch_collective(self.step)
        if self._num_gradients == max(1, len(self._hooked) // 2):
            self.injector.visit("backward", self.step)

    def _on_optimizer_begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._forget_half_update()
        if self.step is None:
            return
        self.injector.visit("before-vote", self.step)
        if self.injector.due("in-optimizer", self.step):
            self._half_update = optimizer.register_step_pre_hook(self._update_half)

    def _update_half(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Apply the real update to the first half of the parameters, visit, keep the second half for the caller."""
        with_grad = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        first, second = with_grad[: len(with_grad) // 2], with_grad[len(with_grad) // 2 :]
        update = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]  # the step without its hooks
        kept = [(p, p.grad) for p in second]
        try:
            for parameter in second:
                parameter.grad = None
            update(optimizer)
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient
        self.injector.visit("in-optimizer", self.step)
        self._second_half = [(p, p.grad) for p in first]
        for parameter in first:
            parameter.grad = None

    def _on_optimizer_end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._forget_half_update()
        if self.step is None:
            return
        self.injector.visit("after-optimizer", self.step)
        if not self._has_session:
            self.begin_step(self.step + 1)

    def _forget_half_update(self) -> None:
        """Give the first half its gradients back and take our pre-hook off the optimizer."""
        for parameter, gradient in self._second_half:
            parameter.grad = gradient
        self._second_half = []
        if self._half_update is not None:
            self._half_update.remove()
            self._half_update = None


def install(injector: Injector) -> Places:
    """Hook torch and the Session of the running flashrec package.

    The Session is reached through the package as a script does, because this package may not know the runtime.
    """
    places = Places(injector)
    places.install(sys.modules["flashrec"].Session)
    return places
