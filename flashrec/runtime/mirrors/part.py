"""Mirrors of one rank, as a `flashrec.runtime.parallel.part.Part`: each state is copied here and at the holder.

    step v begins     its state is copied into the older of our two slots, and sent to the holder
    before its vote   both are done. So whoever passes the vote of v knows that every rank's state of v is in two places
    a fence           nothing that is kept or held changes any more; the report names the steps
    the plan          a holder serves its mirror; who goes back takes its own copy; later steps are forgotten

See docs/concepts/mirrors.md, and `flashrec.core.commit` for what is decided from the reports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from flashrec.core.types import Report
from flashrec.runtime import transfer
from flashrec.runtime.errors import Superseded
from flashrec.runtime.mirrors import placement
from flashrec.runtime.mirrors.copying import Copying
from flashrec.runtime.mirrors.holder import MirrorHolder
from flashrec.runtime.mirrors.shipping import Job, Shipper
from flashrec.runtime.mirrors.slots import Pair
from flashrec.runtime.state import State
from flashrec.runtime.store import TableStore
from flashrec.runtime.timeline import Watch, logger
from flashrec.runtime.worker import Worker
from flashrec.wire import messages as m

_LOOK_INTERVAL_S = 0.2
_NUM_TIMED = 20  # steps over which the waiting is averaged; the first one, which allocates, is not among them


class Mirrors:
    """mode: True, 'all' or 'process'. replicas: who holds the same as this rank, as far as is known now. describe: all
    parts, for the manifest."""

    name = "mirrors"

    def __init__(
        self,
        worker: Worker,
        state: State,
        mode: bool | str,
        replicas: Callable[[], tuple[int, ...]],
        device: torch.device,
    ) -> None:
        """A collective, but not on a rank that joins. Raises ValueError, RuntimeError: why nothing can be mirrored."""
        if mode not in placement.MODES:
            raise ValueError(f"Session(mirrors={mode!r}): say True, 'all' or 'process'")
        self._worker, self._state, self._mode, self._device = worker, state, mode, device
        self._replicas = replicas
        self.describe_all: Callable[[], dict[str, bytes]] = dict
        self._places = placement.Places((), (), {})
        self._own = Pair(is_pinned=device.type == "cuda")
        self._holder: MirrorHolder | None = None
        self._shipper: Shipper | None = None
        self._generation = -1  # for which our address is known
        self._job: Job | None = None
        self._num_bytes, self._num_waits, self._waited_ms = 0, -1, 0.0
        if not worker.env.joins:
            self._place(first=True)
            if worker.rank == 0:
                logger.info("%s", self.line())

    # ---- as a part

    def open(self, step: int) -> None:
        if self._holder is None or self._shipper is None:
            return
        generation = self._worker.progress.generation
        if self._generation != generation:
            self._generation = generation
            self._holder.accept(generation)
            held = self._places.held_by(self._worker.rank)
            if held:
                store = _store(self._worker, self._worker.rank, held, generation)
                store.set("address", msgspec.msgpack.encode(self._holder.address))
        copying = Copying(self._state, step, self.describe_all(), self._own.next())
        is_mirrored = self._worker.rank in self._places.holder_of
        self._job = Job(copying, generation, self._way_to_holder(generation) if is_mirrored else None)
        self._shipper.put(self._job)

    def before_vote(self, step: int) -> None:
        """Return when the state of `step` is kept here and acknowledged by the holder. Raises Superseded, OSError."""
        job = self._job
        if job is None:
            return
        watch = Watch()
        while not job.ended.wait(_LOOK_INTERVAL_S):
            if self._worker.board.announced > job.generation:
                raise Superseded(f"generation {job.generation} is superseded")
        if job.error is not None:
            raise job.error
        self._say(watch.ms())

    def settle_for(self, step: int) -> None:
        """The next step is copied anew."""

    def describe(self) -> None:
        return None

    def impose(self, described: Any) -> None:
        """A replacement finds its holder with the others, see `complete`."""

    def complete(self) -> None:
        """Ranks may be on other nodes than before."""
        self._place(first=False)

    # ---- in a recovery

    def secure(self, step: int) -> None:
        """Before training begins: what it begins with is mirrored, so there is no moment in which it is not."""
        self.open(step)
        self.before_vote(step)

    def freeze(self, report: Report) -> Report:
        """After a fence: from now on nothing changes that is kept or held. Returns the report that names it."""
        if self._holder is None or self._shipper is None:
            return report
        self._holder.freeze()
        self._shipper.cut()
        if self._job is not None:
            self._job.copied.wait()
        return msgspec.structs.replace(report, keeps=self._own.versions(), holds=self._holder.versions())

    def forget_after(self, step: int) -> None:
        """The plan: training goes on at `step`."""
        self._own.forget_after(step)
        if self._holder is not None:
            self._holder.forget_after(step)

    def go_back(self, step: int) -> transfer.Moved:
        """Take the state of `step` from our own copy. Raises KeyError, RuntimeError, LayoutMismatch."""
        return transfer.load(self._own.of(step).holding(), self._state)

    def held(self, rank: int, step: int) -> transfer.Holding:
        """The mirror of a rank, to be sent to its replacement. Raises KeyError, RuntimeError."""
        if self._holder is None:
            raise KeyError(f"rank {self._worker.rank} holds no mirrors")
        return self._holder.of(rank, step).holding()

    # ---- for the user

    def line(self) -> str:
        """What is covered."""
        holder_of = self._places.holder_of
        if not holder_of:
            return "mirrors: none is needed, every rank has a replica on another node"
        rank, holder = next(iter(holder_of.items()))
        covers = "a process" if self._mode == "process" else "a node"
        at = f"rank {rank} ({self._places.nodes[rank]}) at rank {holder} ({self._places.nodes[holder]})"
        return (
            f"mirrors: the state of {len(holder_of)} of {len(self._places.nodes)} ranks is kept in the host memory of "
            f"another one, for example of {at}: the loss of {covers} costs one more step at most"
        )

    def _say(self, waited_ms: float) -> None:
        assert self._holder is not None
        held = self._holder.num_bytes
        if self._own.num_bytes + held > self._num_bytes:
            self._num_bytes = self._own.num_bytes + held
            logger.info(
                "mirrors: %d bytes of host memory on rank %d: %d for two copies of its own state, %d for what it holds",
                self._num_bytes, self._worker.rank, self._own.num_bytes, held,
            )  # fmt: skip
            self._tell(0.0, 0)
        self._num_waits += 1
        self._waited_ms += waited_ms if self._num_waits else 0.0
        if self._num_waits == _NUM_TIMED:
            each = self._waited_ms / _NUM_TIMED
            logger.info("mirrors: %.2f ms per step waited for, over %d steps", each, _NUM_TIMED)
            self._worker.timeline.mark("mirrors", bytes=self._num_bytes, wait_ms=each, steps=_NUM_TIMED)
            self._tell(each, _NUM_TIMED)

    def _tell(self, wait_ms: float, steps: int) -> None:
        """For the report."""
        worker, own = self._worker, self._own.num_bytes
        generation, held = worker.progress.generation, self._num_bytes - own
        worker.control.send(
            m.MirrorsMeasured(worker.rank, worker.env.incarnation, generation, own, held, wait_ms, steps)
        )

    # ---- where

    def _place(self, *, first: bool) -> None:
        env = self._worker.env
        self._places = placement.find(env.node, env.switch, self._replicas(), self._mode, self._device, first=first)
        if self._places.holder_of and self._holder is None:
            self._holder = MirrorHolder(self._worker.control.welcome.address, self._worker.secret)
            board, timeout_s = self._worker.board, self._worker.limits.transfer_timeout_s
            self._shipper = Shipper(
                env.rank, self._worker.secret, timeout_s, lambda generation: board.announced > generation
            )
        if self._holder is not None:
            self._holder.drop_others(self._places.held_by(env.rank))

    def _way_to_holder(self, generation: int) -> Callable[[], transfer.Address]:
        """For the thread, which must not keep a model alive. The holder says where it listens when its step begins."""
        holder = self._places.holder_of[self._worker.rank]
        store = _store(self._worker, holder, self._places.held_by(holder), generation)
        return lambda: msgspec.msgpack.decode(store.get("address"), type=transfer.Address)


def _store(worker: Worker, holder: int, held: set[int], generation: int) -> TableStore:
    return worker.store(f"mirror/{holder}", (holder, *sorted(held)), generation, worker.limits.resume_timeout_s)
