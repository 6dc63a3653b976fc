"""A whole recovery of a large job: what was measured here, and stated constants for what needs hardware.

    detection ─► control plane ─► replacement starts ─► links ─► state copy ─► half a step is done again

Detection and control plane are measured with simulated agents at that size (between sizes: linear). All else is an
assumption, and all assumptions are in `ASSUMED`: the page shows the same table. The paper's figures are its own, of its
hardware; those of a restart without recovery, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

PAPER = (  # parameters (10^9), devices, seconds: detection, restart, half a step, total
    (7, 32, 6, 88, 3, 97), (7, 960, 6, 92, 3, 101), (70, 80, 4, 84, 2, 90), (70, 800, 9, 92, 10, 111),
    (70, 960, 8, 78, 12, 98), (70, 2880, 11, 90, 19.5, 120.5), (175, 2880, 10, 90, 39.5, 139.5),
    (175, 4800, 7, 116, 24.5, 147.5),
)  # fmt: skip
PAPER_RESTART = ((1824, 231.0), (3936, 801.0), (5472, 1115.0))  # devices, seconds, without recovery


class Assumption(msgspec.Struct, frozen=True):
    """One constant of the model, with what it stands for."""

    value: float
    unit: str
    what: str


ASSUMED = {
    "start": Assumption(
        30.0, "s", "a replacement on a spare: job step, interpreter, torch, CUDA context, model and groups built alone"
    ),
    "links": Assumption(
        2.0, "s", "connecting process groups, the part that does not grow: closing and opening devices"
    ),
    "links_per_rank": Assumption(0.5, "ms", "the same, for each rank: bootstrap rings of the communicators are serial"),
    "state_per_device": Assumption(16.0, "GB", "parameters, master copy and Adam's moments of one device's shard"),
    "bandwidth": Assumption(25.0, "GB/s", "network of one device, 200 Gb/s; each target has its own source"),
    "efficiency": Assumption(0.7, "of that", "as `make bench-restore` measures it against bare TCP"),
    "timeout": Assumption(1800.0, "s", "without recovery: the collective times out (the paper's figure)"),
    "checkpoint_interval": Assumption(1800.0, "s", "without recovery: half of it is computed again"),
}


class Recovery(msgspec.Struct, frozen=True):
    """Seconds of each part."""

    detection: float
    control: float
    start: float
    links: float
    copy: float
    half_step: float

    @property
    def total(self) -> float:
        return self.detection + self.control + self.start + self.links + self.copy + self.half_step


def recovery(devices: int, half_step: float, detection: float, control: float) -> Recovery:
    """One lost node. detection, control: measured."""
    value = {name: one.value for name, one in ASSUMED.items()}
    return Recovery(
        detection,
        control,
        value["start"],
        value["links"] + value["links_per_rank"] * devices / 1000,
        value["state_per_device"] / (value["bandwidth"] * value["efficiency"]),
        half_step,
    )


def without(devices: int) -> float:
    """Time-out, requeue and half a checkpoint interval, in seconds. Restart: the paper's, linear between its sizes."""
    return ASSUMED["timeout"].value + between(PAPER_RESTART, devices) + ASSUMED["checkpoint_interval"].value / 2


def between(points: Sequence[tuple[float, float]], at: float) -> float:
    """Linear between points (in ascending order), and on beyond the last two; below the first: the first."""
    if at <= points[0][0] or len(points) == 1:
        return points[0][1]
    after = next((index for index in range(1, len(points)) if points[index][0] >= at), len(points) - 1)
    (x0, y0), (x1, y1) = points[after - 1], points[after]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def half_step(devices: int) -> float:
    """Of the paper's job of this size, the largest model where there are several."""
    largest = {size: half for _, size, _, _, half, _ in PAPER}
    return between(sorted(largest.items()), devices) if devices <= max(largest) else largest[max(largest)]


def figures(rows: Sequence[tuple[int, float, float]]) -> list[tuple[int, Recovery, float]]:
    """rows: (devices, detection, control) as measured. Return (devices, ours, without recovery) for each."""
    return [
        (devices, recovery(devices, half_step(devices), seen, control), without(devices))
        for devices, seen, control in rows
    ]
