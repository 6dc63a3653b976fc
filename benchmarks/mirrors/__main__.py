"""What a mirror costs, apart from training: one rank and its holder on this machine, over loopback.

    python -m benchmarks.mirrors [--mbytes 16 256] [--tensors 300]

For each size: the foreground part at the start of a step, which training waits for; copy, digest, and the time from
the start of the step to the acknowledgement (which overlaps with forward and backward); all against a bare copy.
A step of a real job is measured by `python -m benchmarks.overhead --only fsdp2:2,fsdp2_mirrored:2 --no-write`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from flashrec.runtime.mirrors.copying import Copying
from flashrec.runtime.mirrors.holder import MirrorHolder
from flashrec.runtime.mirrors.shipping import Job, Shipper
from flashrec.runtime.mirrors.slots import Pair, digest_of
from flashrec.runtime.state import State

_SECRET = b"s" * 32
_TIMEOUT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mirrors", description=__doc__)
    parser.add_argument(
        "--mbytes", type=float, nargs="+", default=[1.0, 16.0, 128.0], help="of parameters; Adam adds twice that"
    )
    parser.add_argument("--tensors", type=int, default=100, help="parameters")
    parser.add_argument("--times", type=int, default=7, help="medians over so many steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| state | tensors | foreground | memcpy | copy | digest | begin to acknowledged | host memory |")
    print("|---|---|---|---|---|---|---|---|")
    for mbytes in args.mbytes:
        print(measure(mbytes, args.tensors, args.times), flush=True)


def measure(mbytes: float, num_tensors: int, times: int) -> str:
    """A row of the table, all times in ms."""
    length = int(mbytes * 1e6 / 4 / num_tensors)
    model = nn.ParameterList(nn.Parameter(torch.randn(length)) for _ in range(num_tensors))
    optimizer = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    state, own = State(model, [optimizer], {}, sends_random_state=False), Pair()
    holder, shipper = MirrorHolder("127.0.0.1", _SECRET), Shipper(0, _SECRET, _TIMEOUT_S, lambda generation: False)
    holder.accept(1)
    found: dict[str, list[float]] = {"foreground": [], "acknowledged": [], "copy": []}
    for v in range(times + 2):  # the first two allocate
        began = time.perf_counter()
        copying = Copying(state, v, {}, own.next())
        found["foreground"].append(time.perf_counter() - began)
        job = Job(copying, 1, lambda: holder.address)
        shipper.put(job)
        assert job.ended.wait(_TIMEOUT_S) and job.error is None, job.error
        found["acknowledged"].append(time.perf_counter() - began)
    for v in range(times):
        copying = Copying(state, v, {}, own.next())
        found["copy"].append(_seconds(copying.finish))
    buffer = own.next().buffer
    into = torch.empty_like(buffer)
    found["memcpy"] = [_seconds(lambda: into.copy_(buffer)) for _ in range(times)]
    found["digest"] = [_seconds(lambda: digest_of(b"", buffer)) for _ in range(times)]
    ms = {name: statistics.median(values[-times:]) * 1e3 for name, values in found.items()}
    assert holder.versions()[0][-1] == times + 1
    cells = [f"{ms[name]:.2f} ms" for name in ("foreground", "memcpy", "copy", "digest", "acknowledged")]
    total = own.num_bytes + holder.num_bytes
    return f"| {buffer.numel() / 1e6:.1f} MB | {3 * num_tensors} | {' | '.join(cells)} | {total / 1e6:.1f} MB |"


def _seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
