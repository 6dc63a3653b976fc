"""From one world to the next, on one rank: put the state aside, and in the next life take it over.

    old life    plan(hands over) ─► settle at the resume step ─► write the state into the memory of the node ─► the end
    new life    build the model ─► read what is there ─► ranks without it get it from a replica ─► on_resize ─► training

The new life is an ordinary first one: its groups are connected, and its DDP learns its buckets, as in a job that was
started with so many ranks from this state. So its numbers are those of such a job, too.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
import torch.distributed as dist

from flashrec.core import events
from flashrec.runtime import transfer
from flashrec.runtime.errors import RecoveryFailed
from flashrec.runtime.inheritance import Header, put_aside, take_over
from flashrec.runtime.state import State
from flashrec.runtime.stretches import Stretches
from flashrec.runtime.timeline import Moving, Watch, logger
from flashrec.runtime.worker import Worker
from flashrec.transport.paths import state_path


class Handover:
    """rigid: why this rank cannot go on in a world of another size ('': it can). num_on_node: ranks on this node."""

    def __init__(
        self,
        worker: Worker,
        state: State,
        stretches: Stretches,
        replicas: Callable[[], tuple[int, ...]],
        rigid: Callable[[], str],
        device: torch.device,
        num_on_node: int,
    ) -> None:
        self._worker, self._state, self._stretches = worker, state, stretches
        self._replicas, self._rigid, self._device, self._num_on_node = replicas, rigid, device, num_on_node

    # ---- the old life

    def describe(self) -> tuple[int, str]:
        """(unit, rigid) of this rank's report."""
        unit = unit_of(self._worker.rank, self._replicas(), self._worker.env.world_size)
        if why := self._rigid() or self._stretches.rigid():
            return unit, why
        return unit, "" if unit else f"rank {self._worker.rank} is a replica of rank {self._replicas()} only"

    def put_aside(self, v: int, generation: int) -> int:
        """Write the state of step `v`; returns its size in bytes. Raises OSError, CannotEncode."""
        worker, watch = self._worker, Watch()
        holding = transfer.Holding.of(self._state, v, {})
        header = Header(holding.manifest, worker.env.world_size, self._stretches.places(v))
        path = state_path(worker.env.socket, worker.rank, generation)
        size = put_aside(path, header, holding, self._num_on_node)
        worker.timeline.mark("put_aside", generation=generation, bytes=size, ms=watch.ms())
        return size

    # ---- the new life

    def inherit(self) -> int:
        """Take over what the former world has put aside. Returns the step at which it did; does not return when that
        is not enough: then the manager ends this life."""
        header, why = self._take_own()
        told = self._gather(-1 if header is None else header.manifest.v)
        try:
            sources = self._sources(told)
        except RecoveryFailed as err:
            self._give_up(f"{err} ({why})" if why else str(err))
        step = max(told)
        if header is not None:
            self._stretches.begin(step, header.world_size, header.places)
        for target, source in sources.items():
            if source == self._worker.rank:
                self._send(target, step)
        if self._worker.rank in sources:
            self._receive(step, sources[self._worker.rank])
        self._stretches.tell(self._worker.env.world_size)
        return step

    def _take_own(self) -> tuple[Header | None, str]:
        worker, watch = self._worker, Watch()
        if worker.env.former < 0:
            return None, ""
        path = state_path(worker.env.socket, worker.env.former, worker.env.resized)
        try:
            header = take_over(path, self._state)
        except (OSError, RecoveryFailed, ValueError) as err:
            logger.warning("rank %d cannot take over what rank %d has left: %s", worker.rank, worker.env.former, err)
            return None, f"rank {worker.rank}: {err}"
        worker.timeline.mark("inherited", v=header.manifest.v, former=worker.env.former, ms=watch.ms())
        return header, ""

    def _gather(self, v: int) -> list[int]:
        told = torch.full((self._worker.env.world_size,), -1, dtype=torch.int64, device=self._device)
        told[self._worker.rank] = v
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return [int(value) for value in told.tolist()]

    def _sources(self, told: list[int]) -> dict[int, int]:
        """Target -> source, the same on all ranks. Raises RecoveryFailed."""
        held = {v for v in told if v >= 0}
        if len(held) != 1:
            raise RecoveryFailed(f"the steps that were put aside are {sorted(held)}" if held else "nothing is there")
        unit = unit_of(self._worker.rank, self._replicas(), len(told)) or len(told)
        sources = {}
        for target in (rank for rank, v in enumerate(told) if v < 0):
            holders = [rank for rank in range(target % unit, len(told), unit) if told[rank] >= 0]
            if not holders:
                raise RecoveryFailed(f"no rank holds the shard of rank {target}")
            sources[target] = holders[target // unit % len(holders)]
        return sources

    def _send(self, target: int, step: int) -> None:
        worker = self._worker
        address = msgspec.msgpack.decode(self._store(worker.rank, target).get("address"), type=transfer.Address)
        transfer.send(
            address, worker.sockets, worker.secret, transfer.Holding.of(self._state, step, {}),
            worker.limits.transfer_timeout_s, Moving("sending", worker.timeline), source=worker.rank,
            patience_s=worker.limits.resume_timeout_s,
        )  # fmt: skip

    def _receive(self, step: int, source: int) -> None:
        worker, watch = self._worker, Watch()
        with worker.sockets.watch(transfer.listen(worker.control.welcome.address)) as listener:
            address = transfer.Address(worker.control.welcome.address, listener.getsockname()[1])
            self._store(source, worker.rank).set("address", msgspec.msgpack.encode(address))
            listener.settimeout(worker.limits.resume_timeout_s)
            moved = transfer.receive_state(
                listener, worker.sockets, worker.secret, self._state, worker.limits.transfer_timeout_s,
                Moving("receiving", worker.timeline), sources=(source,),
            )  # fmt: skip
        if moved.manifest.v != step:
            raise RecoveryFailed(f"rank {source} sent step {moved.manifest.v}, not {step}")
        worker.timeline.mark("received", v=step, source=source, bytes=moved.num_bytes, ms=watch.ms())

    def _store(self, source: int, target: int):  # type: ignore[no-untyped-def]
        worker = self._worker
        return worker.store(
            f"inherit/{target}", (source, target), worker.env.generation, worker.limits.first_form_timeout_s
        )

    def _give_up(self, reason: str) -> None:
        worker = self._worker
        worker.control.send(
            events.NotInherited(worker.rank, worker.env.incarnation, worker.env.generation, reason[:500])
        )
        worker.board.wait_for_ever(worker.limits.resume_timeout_s)
        raise RecoveryFailed(f"the state of the former world cannot be taken over: {reason}")


def unit_of(rank: int, replicas: tuple[int, ...], world_size: int) -> int:
    """How many consecutive ranks hold one replica, if every replica does so in the same order; 0: they do not."""
    unit = world_size // len(replicas)
    return unit if replicas == tuple(range(rank % unit, world_size, unit)) else 0
