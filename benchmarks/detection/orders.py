"""Faults that come one by one while a training script runs: `python -m benchmarks.detection.orders DIR -- train.py …`.

As `flashrec.testing.inject`, with the same hooks and records, but nothing is planned by step: the driver puts an order
for a rank into the fault directory, and the worker that has this rank carries it out at the place it names, in whatever
step it is. One kind more than the plan's: `oom`, memory until the kernel ends the process; it stamps a file before each
bite, so that the last stamp is when the kernel struck.
"""

from __future__ import annotations

import mmap
import runpy
import struct
import sys
import time
from pathlib import Path

import msgspec

from flashrec.testing import Fault, FaultDirectory, FaultPlan
from flashrec.testing.injector import Injector

HANG_S = 600.0  # a hang that nobody ends fails the script then
BITE_BYTES = 2**20
_STAMP = struct.Struct("=d")


class Orders:
    """The driver's side of one fault directory."""

    def __init__(self, faults: FaultDirectory) -> None:
        self.faults = faults
        (faults.path / "orders").mkdir(exist_ok=True)

    def give(self, order: Fault) -> None:
        """To the worker of that rank; replaces an order that it has not carried out."""
        path = order_path(self.faults, order.rank)
        draft = path.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode(order))
        draft.replace(path)


def order_path(faults: FaultDirectory, rank: int) -> Path:
    return faults.path / "orders" / f"{rank}.json"


def stamp_path(faults: FaultDirectory, fault_id: str) -> Path:
    return faults.path / f"{fault_id}.stamp"


def last_stamp(faults: FaultDirectory, fault_id: str) -> float:
    """When an `oom` took its last bite."""
    return float(_STAMP.unpack(stamp_path(faults, fault_id).read_bytes())[0])


class OrderedInjector(Injector):
    """The worker's side: what is due is what was ordered."""

    def due(self, place: str, step: int | None) -> list[Fault]:
        try:
            order = msgspec.json.decode(order_path(self.directory, self.rank).read_bytes(), type=Fault)
        except FileNotFoundError:
            return []
        return [order] if order.place == place and not self.directory.has_fired(order.id) else []

    def _strike(self, fault: Fault) -> None:
        if fault.kind == "oom":
            eat(stamp_path(self.directory, fault.id))
        super()._strike(fault)


def eat(stamp: Path) -> None:
    """Take memory for ever. The limit is the caller's to set; without one this would take the machine's."""
    stamp.write_bytes(_STAMP.pack(0.0))
    with stamp.open("r+b") as file:
        page = mmap.mmap(file.fileno(), _STAMP.size)
    taken = []
    while True:
        _STAMP.pack_into(page, 0, time.monotonic())
        taken.append(b"x" * BITE_BYTES)


def main() -> None:
    directory, dashes, *command = sys.argv[1:]
    if dashes != "--" or not command:
        sys.exit("usage: python -m benchmarks.detection.orders DIR -- train.py [ARGUMENT...]")
    from flashrec.testing import places

    plan = FaultPlan(directory, (), timeout_s=HANG_S)
    places.install(OrderedInjector(plan))
    sys.argv = command
    sys.path[0] = str(Path(command[0]).absolute().parent)
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main()
