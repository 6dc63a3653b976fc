"""Which ranks hold the same shards as this one: found from what torch knows, and said once at the start.

Each piece of the state has its own holders: a parameter inside of DDP the ranks of its group, a DTensor those that
differ from us in replicated mesh dimensions only, any other parameter this rank alone. A source must hold all pieces
of its target, so the replicas of a rank are those in which all pieces agree. Optimizer state goes with its parameter,
and buffers are taken from the source as they are. What else narrows it (an optimizer that shards its own state, an
expert, a stage) is told by a `Part` that is a `Holder`, too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flashrec.runtime import shards
from flashrec.runtime.timeline import Timeline

logger = logging.getLogger("flashrec.runtime")
_MAX_REASON_BYTES = 192
_LOST = "losing one sends all ranks back to a checkpoint (session.checkpoint), or ends the job with exit code 75"
_HINT = "use HSDP or DDP over several replicas, or Session(replicas=…) if you know better"


@dataclass(frozen=True)
class Piece:
    """Part of the state of this rank. ranks: all that hold the same bytes of it at every step, this one included.

    tensors: parameters it stands for, which are then not judged by how torch holds them; (): something beside them.
    """

    what: str  # "parameter layers.0.weight", "the shard of ZeroRedundancyOptimizer"
    ranks: tuple[int, ...]
    why: str  # "DDP over 4 ranks"
    tensors: tuple[torch.Tensor, ...] = ()


@runtime_checkable
class Holder(Protocol):
    """A `Part` that knows who holds some pieces."""

    def held_by(self) -> Iterable[Piece]:
        """Asked once, when the session is created. No communication."""


@dataclass(frozen=True)
class Replicas:
    """ranks: that hold what this rank holds, itself included. why: what makes it so, for the user."""

    ranks: tuple[int, ...]
    why: str

    @property
    def is_protected(self) -> bool:
        return len(self.ranks) > 1


def find(model: torch.nn.Module, rank: int, holders: Iterable[Holder] = ()) -> Replicas:
    """The replicas of this rank. Parameters must be registered as they are kept: FSDP modules sharded."""
    pieces = [piece for holder in holders for piece in holder.held_by()]
    told = {id(tensor) for piece in pieces for tensor in piece.tensors}
    ddp = _ddp_groups(model)
    pieces += [_judge(name, param, ddp, rank) for name, param in model.named_parameters() if id(param) not in told]
    if not pieces:
        return Replicas((rank,), "the model has no parameters")
    common = set(pieces[0].ranks).intersection(*(piece.ranks for piece in pieces)) | {rank}
    if len(common) > 1:
        tightest = (piece.why for piece in pieces if set(piece.ranks) == common)
        return Replicas(tuple(sorted(common)), next(tightest, "; ".join(dict.fromkeys(piece.why for piece in pieces))))
    alone = next((piece for piece in pieces if len(piece.ranks) <= 1), None)
    if alone is not None:
        return Replicas((rank,), f"{alone.what} exists once: {alone.why}")
    narrow = min(pieces, key=lambda piece: len(piece.ranks))
    other = next(piece for piece in pieces if not set(narrow.ranks) & set(piece.ranks) - {rank})
    return Replicas((rank,), f"no rank holds both {narrow.what} ({narrow.why}) and {other.what} ({other.why})")


def announce(found: Replicas, timeline: Timeline, device: torch.device, *, is_mirrored: bool = False) -> None:
    """One line on rank 0 for the whole job. A collective over all ranks: not for a rank that builds alone."""
    told = _gather(found, device)
    if dist.get_rank() == 0:
        num_protected = sum(count > 1 for count, _ in told)
        timeline.mark("protection", protected=num_protected, ranks=len(told))
        is_well = is_mirrored or num_protected == len(told)
        logger.log(logging.INFO if is_well else logging.WARNING, "%s", line(told, is_mirrored=is_mirrored))


def line(told: Sequence[tuple[int, str]], *, is_mirrored: bool = False) -> str:
    """told: (number of replicas, why) of each rank. is_mirrored: what the others have instead is said in a line of its
    own."""
    alone = [rank for rank, (count, _) in enumerate(told) if count < 2]
    kept = [rank for rank, (count, _) in enumerate(told) if count >= 2]
    texts = []
    if kept:
        counts = sorted({told[rank][0] for rank in kept})
        copies = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        texts.append(f"protected: {len(kept)} of {len(told)} ranks, {copies} replicas each ({told[kept[0]][1]})")
    if alone and is_mirrored:
        texts.append(f"without a replica: rank {_spans(alone)}, because {told[alone[0]][1]}; mirrored instead")
    elif alone:
        texts.append(f"not protected: rank {_spans(alone)}, because {told[alone[0]][1]}; {_LOST}; {_HINT}")
    return "; ".join(texts)


def _judge(name: str, param: torch.Tensor, ddp: Mapping[int, tuple[int, ...]], rank: int) -> Piece:
    what, held = f"parameter {name}", {rank}
    reasons = []
    if id(param) in ddp:
        held.update(ddp[id(param)])
        reasons.append(f"DDP over {len(ddp[id(param)])} ranks")
    if shards.is_dtensor(param):
        held.update(shards.holders(param))
        reasons.append(shards.spread_over(param))
    return Piece(what, tuple(sorted(held)), " and ".join(reasons) or "it is in no DDP or FSDP module")


def _ddp_groups(model: torch.nn.Module) -> dict[int, tuple[int, ...]]:
    """Parameter id -> ranks of the group of the DDP around it; parameters that DDP was told to ignore are not in it."""
    found: dict[int, tuple[int, ...]] = {}
    for ddp in model.modules():
        if isinstance(ddp, DistributedDataParallel):
            ranks = tuple(dist.get_process_group_ranks(ddp.process_group))
            for name, param in ddp.module.named_parameters():
                if name not in ddp.parameters_to_ignore:
                    found[id(param)] = ranks
    return found


def _gather(found: Replicas, device: torch.device) -> list[tuple[int, str]]:
    text = found.why.encode()[:_MAX_REASON_BYTES].ljust(_MAX_REASON_BYTES)
    mine = torch.tensor([*len(found.ranks).to_bytes(4, "big"), *text], dtype=torch.uint8, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    rows = [bytes(row.tolist()) for row in every]
    return [(int.from_bytes(row[:4], "big"), row[4:].decode(errors="ignore").rstrip()) for row in rows]


def _spans(ranks: Sequence[int]) -> str:
    """0-3, 5"""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return ", ".join("-".join(map(str, span)) for span in spans)
