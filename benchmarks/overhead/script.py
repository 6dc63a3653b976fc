"""The script of both jobs: a layout's model, and a sleep that stands for what an accelerator computes.

plain: torch alone; no name of flashrec's is imported by the script and no variable of its is set. Otherwise the same
statements stand inside `with step:`, under a control plane. Both do a block of steps when it is their turn.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.runtime.layouts import plain_ddp
from tests.runtime.layouts.layout import TABLE

WITHOUT_BUFFERS = "ddp-no-buffers"

_POLL_S = 0.001
_TIMEOUT_S = 300.0
# To the end of the process: torch may hang when a DDP is let go while a gloo thread waits for the interpreter's lock.
_kept: list[object] = []


def main(
    out: str, layout: str, turns: str, pad_s: float, blocks: int, steps: int, timed_steps: int, plain: bool,
    rendezvous: str,
) -> None:  # fmt: skip
    """Write the seconds of each step of each block, and for the guarded job when its parts began and ended."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    torch.set_num_threads(1)
    if plain:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        for name in [name for name in os.environ if name.startswith("FLASHREC_")]:
            del os.environ[name]
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    else:
        import flashrec

        flashrec.init()
        dist.init_process_group("gloo")
    setup = plain_ddp.without_buffers() if layout == WITHOUT_BUFFERS else TABLE[layout].build()
    _kept.append(setup)
    clock = _Clock(Path(turns), "plain" if plain else "guarded", steps)

    def work(step: int) -> None:
        time.sleep(pad_s)
        setup.run(step)
        setup.clip()
        for optimizer in setup.optimizers:
            optimizer.step()
        for item in setup.state.values():
            if isinstance(item, torch.optim.lr_scheduler.LRScheduler):
                item.step()
        for optimizer in setup.optimizers:
            optimizer.zero_grad()

    parts: dict[str, list[tuple[float, float]]] = {}
    if plain:
        for step in range(blocks * steps):
            clock.begin(step)
            work(step)
            clock.end(step)
    else:
        session = flashrec.Session(setup.model, setup.optimizers, state=setup.state, **setup.session)
        for step in session.steps(blocks * steps + timed_steps):
            number = int(step)
            if number < blocks * steps:
                clock.begin(number)
            elif number == blocks * steps:
                parts = _time_parts()
            with step:
                work(number)
            if number < blocks * steps:
                clock.end(number)
    Path(out).write_text(json.dumps({"blocks": clock.blocks, "parts": parts}))
    dist.destroy_process_group()


class _Clock:
    """Waits for its turn before each block, times every step, says when the block is over."""

    def __init__(self, turns: Path, name: str, steps: int) -> None:
        self._turns, self._name, self._steps = turns, name, steps
        self._began = 0.0
        self.blocks: list[list[float]] = []

    def begin(self, step: int) -> None:
        if step % self._steps == 0:
            block = len(self.blocks)
            self.blocks.append([])
            deadline = time.monotonic() + _TIMEOUT_S
            while not (self._turns / f"{self._name}.{block}").exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"block {block} of {self._name} was never its turn")
                time.sleep(_POLL_S)
            self._began = time.perf_counter()

    def end(self, step: int) -> None:
        now = time.perf_counter()
        self.blocks[-1].append(now - self._began)
        self._began = now
        if len(self.blocks[-1]) == self._steps:
            (self._turns / f"{self._name}.{len(self.blocks) - 1}.{os.environ['RANK']}").touch()


def _time_parts() -> dict[str, list[tuple[float, float]]]:
    """From now on, begin and end of each call of what `with step:` adds, in seconds of the machine's clock."""
    from flashrec.runtime import step as guard
    from flashrec.runtime.parallel.part import Parts
    from flashrec.runtime.snapshot import Snapshot
    from flashrec.runtime.vote import Vote

    found: dict[str, list[tuple[float, float]]] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        calls = found[name] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                calls.append((began, time.perf_counter()))

        return run

    Vote.cast = timed("vote", Vote.cast)  # type: ignore[method-assign]
    Snapshot.take = timed("snapshot", Snapshot.take)  # type: ignore[method-assign]
    Parts.before_vote = timed("parts", Parts.before_vote)  # type: ignore[method-assign]
    guard.seed_all = timed("seeding", guard.seed_all)  # type: ignore[attr-defined]
    guard.StepGuard.enter = timed("enter", guard.StepGuard.enter)  # type: ignore[method-assign]
    guard.StepGuard._pass_vote = timed("agreeing", guard.StepGuard._pass_vote)  # type: ignore[method-assign]
    guard.StepGuard.leave = timed("leave", guard.StepGuard.leave)  # type: ignore[method-assign]
    return found
