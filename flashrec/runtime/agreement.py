"""Do the ranks that count as replicas of each other hold the same bits? Compared once, in the second step.

Who holds the same is found from meshes and groups, or said by the script. Neither knows of an optimizer that keeps
other state on each rank, nor of parameters that drift apart. A rank that was restored from the wrong one would train on
with wrong numbers, and nobody would notice. So each rank takes a digest of its parameters and optimizer state, all see
all of them, and whoever differs is no replica from then on. The second step, because most optimizer state appears in
the first.

An optimizer that communicates, and of which the script does not say who holds the same as whom, is not trusted until
then: before the comparison its ranks name only themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from flashrec.runtime import shards
from flashrec.runtime.parallel import zero
from flashrec.runtime.timeline import logger

_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Agreement:
    """The replicas of this rank, and their comparison. See `flashrec.runtime.parallel.part.Part`."""

    name = "agreement"

    def __init__(
        self,
        rank: int,
        claimed: tuple[int, ...],
        params: Iterable[torch.Tensor],
        optimizers: list[torch.optim.Optimizer],
        device: torch.device,
        is_trusted: Callable[[], bool],
    ) -> None:
        """claimed: the replicas as found or said. is_trusted: before the comparison, is there no reason to doubt them?
        device: where the vote is."""
        self._rank, self._ranks, self._is_trusted = rank, claimed, is_trusted
        self._params, self._optimizers, self._device = list(params), optimizers, device
        self._step = -1  # in which it is compared; the same on every rank
        self._is_compared = False

    def ranks(self) -> tuple[int, ...]:
        """Ranks that hold the same as this one, itself included, as far as is known now."""
        return self._ranks if self._is_compared or self._is_trusted() else (self._rank,)

    def before_vote(self, step: int) -> None:
        if self._step < 0:
            self._step = step + 1
        if step == self._step:  # also when it is done again
            self._compare()

    def settle_for(self, step: int) -> None:
        """Nothing changes with a step."""

    def describe(self) -> tuple[int, bool, tuple[int, ...]]:
        return self._step, self._is_compared, self._ranks

    def impose(self, described: tuple[int, bool, tuple[int, ...]]) -> None:
        """What this rank has received is what its source holds: so are its replicas."""
        self._step, self._is_compared, self._ranks = described

    def complete(self) -> None:
        """Nothing is owed."""

    def _compare(self) -> None:
        told = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=self._device)
        told[self._rank] = digest(self._params, self._optimizers)
        dist.all_reduce(told)
        found = told.tolist()
        different = [rank for rank in self._ranks if found[rank] != found[self._rank]]
        self._is_compared = True
        if different:
            self._ranks = tuple(rank for rank in self._ranks if rank not in different)
            logger.warning(
                "rank %s should hold the same as rank %d, but its parameters or optimizer state have other bits: it is"
                " not used to restore this rank%s. Does optimizer.step() keep other state on each rank, or does "
                "Session(replicas=…) name the wrong ranks?",
                ", ".join(map(str, different)),
                self._rank,
                "" if len(self._ranks) > 1 else ", whose loss therefore ends the job",
            )


def digest(params: Iterable[torch.Tensor], optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Of all bits of parameters and optimizer state, and of which state there is. Not cryptographic. One pass over the
    memory, on the device where it is."""
    names: list[Any] = []
    sums: dict[torch.device, list[torch.Tensor]] = {}

    def add(name: object, tensor: torch.Tensor) -> None:
        held = shards.local(tensor)
        if type(held) is not torch.Tensor or held.layout is not torch.strided:
            names.append((name, type(held).__name__, tuple(held.shape)))  # quantized or sparse: what it looks like
            return
        bits = _bits(held)
        names.append((name, tuple(bits.shape), bits.device.type))
        sums.setdefault(bits.device, []).append(bits.sum(dtype=torch.int64))

    with torch.no_grad():
        for param in params:
            add("", param)
        for optimizer in optimizers:
            number = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
            for param, entries in zero.state_of(optimizer).items():
                for name, value in entries.items() if isinstance(entries, dict) else ():
                    if isinstance(value, torch.Tensor):
                        add((number.get(id(param)), name), value)
                    elif isinstance(value, int | float | str | None):
                        names.append((number.get(id(param)), name, value))
    totals = [torch.stack(found).tolist() for found in sums.values()]
    return int.from_bytes(hashlib.sha256(repr((names, totals)).encode()).digest()[:7], "big")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    kind = _OF_SIZE[tensor.element_size()]
    return tensor if tensor.dtype == kind else tensor.view(kind)
