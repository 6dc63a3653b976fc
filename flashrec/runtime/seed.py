"""Random numbers that a replacement can have, too.

The state of a dead rank's generators is gone with it. So at the start of every step each rank seeds Python's, numpy's
and torch's generators from (seed, step, rank). Dropout and augmentation then have the same bits whether a step is
done for the first time, done again, or done by a replacement. Without `flashrec run` the same is done, so that the
numbers do not depend on how the script was started.
"""

from __future__ import annotations

import random
import sys

import torch

_MASK = (1 << 64) - 1


def mix(seed: int, step: int, rank: int) -> int:
    """A 63-bit seed from three numbers: splitmix64 (Steele, Lea, Flood 2014) applied to each in turn."""
    value = 0
    for part in (seed, step, rank):
        value = (value + part + 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value >> 1


def seed_all(seed: int, step: int, rank: int) -> None:
    """Seed every generator that this process has loaded."""
    value = mix(seed, step, rank)
    random.seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(value)


def state() -> dict[str, object]:
    """State of every generator, encodable by `codec`; for Session(seed=None)."""
    found: dict[str, object] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        found["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_state(found: dict[str, object]) -> None:
    """Put back what `state` returned."""
    random.setstate(found["python"])  # type: ignore[arg-type]
    torch.set_rng_state(found["torch"])  # type: ignore[arg-type]
    if "numpy" in found and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(found["numpy"])
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"])  # type: ignore[arg-type]
