"""Who holds whose mirror: every rank tells where it is, and all come to the same answer.

Told again after each recovery, because ranks move: a holder that was on another node may now be on the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flashrec.core.mirrors import holders
from flashrec.runtime.timeline import logger

_MAX_NAME_BYTES = 128
MODES = (True, "all", "process")


@dataclass(frozen=True)
class Places:
    """nodes, switches: of each rank. holder_of: of the ranks that are mirrored."""

    nodes: tuple[str, ...]
    switches: tuple[str, ...]
    holder_of: dict[int, int]

    def held_by(self, rank: int) -> set[int]:
        """Ranks whose mirrors `rank` holds."""
        return {other for other, holder in self.holder_of.items() if holder == rank}


def find(
    node: str, switch: str, replicas: Sequence[int], mode: bool | str, device: torch.device, *, first: bool
) -> Places:
    """Collectives over all ranks. first: at the start a job that cannot be protected is refused, with RuntimeError."""
    nodes = _tell(node, device)
    switches = _tell(switch, device)
    mine = nodes[dist.get_rank()]
    wants = torch.zeros(dist.get_world_size(), dtype=torch.int32, device=device)
    if mode in ("all", "process") or all(nodes[rank] == mine for rank in replicas):
        wants[dist.get_rank()] = 1
    dist.all_reduce(wants)
    wanting = [rank for rank, wanted in enumerate(wants.tolist()) if wanted]
    found = holders([str(rank) for rank in range(len(nodes))] if mode == "process" else nodes, switches)
    if not found and mode == "process":
        raise RuntimeError(
            "Session(mirrors='process') keeps the state of each rank at another one, but there is only one"
        )
    if not found:
        where = f"all ranks are on one node ({mine})" if all(nodes) else "what node the ranks are on is not known"
        if first:
            raise RuntimeError(
                f"Session(mirrors={mode!r}) keeps the state of each rank on another node, but {where}: run on two or "
                "more nodes, or say mirrors='process' if the loss of a process is all that shall be covered"
            )
        logger.warning("mirrors: %s: until that changes they cover the loss of a process, not of the node", where)
        found = holders([str(rank) for rank in range(len(nodes))])
    return Places(nodes, switches, {rank: found[rank] for rank in wanting})


def name_bytes(text: str) -> bytes:
    """A name as all ranks tell it. Of a long one the end: that is where it differs from others."""
    return text.encode()[-_MAX_NAME_BYTES:].ljust(_MAX_NAME_BYTES)


def _tell(text: str, device: torch.device) -> tuple[str, ...]:
    mine = torch.tensor([*name_bytes(text)], dtype=torch.uint8, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return tuple(bytes(row.tolist()).decode(errors="replace").rstrip() for row in every)
