"""What it costs to make an update undoable: `python -m benchmarks.undo`. Prints one line of figures per optimizer.

25 M parameters in matrices of the sizes of a small transformer, on the CPU. `take` is in the way of every step,
`restore` only of a step that was cut.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from flashrec.runtime.undo import Undo

WIDTH, NUM_LAYERS, ROUNDS = 512, 8, 9
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
}


def main() -> None:
    shapes = [(WIDTH, WIDTH)] * 4 + [(WIDTH, 4 * WIDTH)] * 2 + [(WIDTH,)] * 6
    params = [nn.Parameter(torch.randn(shape)) for _ in range(NUM_LAYERS) for shape in shapes]
    for name, make in OPTIMIZERS.items():
        optimizer = make(params)
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
        undo = Undo([optimizer])
        undo.take(0)
        step_ms = median_ms(optimizer.step)
        take_ms = median_ms(functools.partial(undo.take, 1))
        restore_ms = median_ms(undo.restore)
        print(
            f"{name}: parameters={sum(param.numel() for param in params) / 1e6:.1f}M copy_bytes={undo.num_bytes} "
            f"step_ms={step_ms:.1f} take_ms={take_ms:.1f} restore_ms={restore_ms:.1f} "
            f"gb_per_s={undo.num_bytes / take_ms / 1e6:.1f} threads={torch.get_num_threads()}"
        )


def median_ms(run: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    main()
