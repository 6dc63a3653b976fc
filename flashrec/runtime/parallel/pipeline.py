"""Pipelines: after a failure every stage must expect the messages that its neighbours will send.

A stage shakes hands with its neighbours in its first step and never again. A replacement that has not done so would
wait for a handshake while its neighbours send activations; and a step that was cut leaves losses, activations and
receive buffers behind, which the next step would take for its own. gloo ends a process whose message has another size.

Therefore each rank notes at every vote, when all ranks have done the same steps of their schedules, what its stages
know (`facts`, see `flashrec.runtime.torch_private.pipelining`). To do step i again it goes back to what it noted at
the vote of step i - 1; to do the first step again, to what was there when the session was made, so that all ranks
shake hands again. The source sends its facts, the target takes them over: all messages are those of an undisturbed run.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flashrec.runtime import shards
from flashrec.runtime.errors import LayoutMismatch
from flashrec.runtime.parallel.replicas import Piece
from flashrec.runtime.torch_private import pipelining as private
from flashrec.runtime.torch_private import versions

_BEFORE_ALL = -1


class Pipelines:
    """The schedules of this rank and their stages. See `flashrec.runtime.parallel.part.Part`."""

    name = "pipeline"

    def __init__(self, model: torch.nn.Module, schedules: Sequence[Any] = ()) -> None:
        """schedules: of torch.distributed.pipelining. Raises RuntimeError when one is missing, or its stages are not in
        `model`."""
        self._model, self._schedules = model, list(schedules)
        by_id = {id(stage): stage for schedule in self._schedules for stage in private.stages(schedule)}
        self._stages = sorted(by_id.values(), key=lambda stage: stage.stage_index)
        if self._schedules:
            versions.require(private.needed(self._schedules))
        self._check_complete()
        self._is_checked = False  # once more in the first step: a stage may have been made after the session
        self._notes = {_BEFORE_ALL: self._note()}  # by the step at whose vote it was true

    def held_by(self) -> Iterator[Piece]:
        """A stage that nothing replicates is on this rank only. See `flashrec.runtime.parallel.replicas.Holder`."""
        replicated = {
            id(param)
            for module in self._model.modules()
            if isinstance(module, DistributedDataParallel)
            for param in module.parameters()
        }
        for stage in self._stages:
            alone = [p for p in stage.submod.parameters() if id(p) not in replicated and not shards.is_dtensor(p)]
            if alone:
                what = f"stage {stage.stage_index} of the pipeline"
                yield Piece(what, (dist.get_rank(),), "it is in no DDP or FSDP module", tuple(alone))

    def open(self, step: int) -> None:
        """Raises RuntimeError for a pipeline that the session was not told of."""
        if not self._is_checked:
            self._check_complete()
            self._is_checked = True

    def before_vote(self, step: int) -> None:
        """Note what the stages know."""
        if self._schedules:
            self._keep_before(step)
            self._notes[step] = self._note()

    def settle_for(self, step: int) -> None:
        """After a fence: every stage and schedule as it was at the vote before `step`. No communication."""
        if self._schedules:
            self._keep_before(step)
            self._settle(self._notes[max(self._notes)])

    def describe(self) -> Any:
        """What the stages know; None without a pipeline."""
        return self._notes[max(self._notes)] if self._schedules else None

    def impose(self, described: Any) -> None:
        """Take over what the same stages of the source know. Raises LayoutMismatch when they are others."""
        if (described is None) != (not self._schedules):
            raise LayoutMismatch("only one of source and target was given Session(pipeline=…)")
        if described is None:
            return
        mine = self._note()
        for what, theirs, ours in (
            ("schedules", len(described["schedules"]), len(mine["schedules"])),
            ("stages", *([facts["stage"] for facts in note["stages"]] for note in (described, mine))),
        ):
            if theirs != ours:
                raise LayoutMismatch(f"the source has the {what} {theirs} of a pipeline, this rank {ours}")
        self._notes = {_BEFORE_ALL: described}
        self._settle(described)

    def complete(self) -> None:
        """Nothing is owed: stages communicate inside a step only."""

    def _note(self) -> dict[str, list[private.Facts]]:
        return {
            "schedules": [private.schedule_facts(schedule) for schedule in self._schedules],
            "stages": [private.stage_facts(stage) for stage in self._stages],
        }

    def _keep_before(self, step: int) -> None:
        """Keep the newest note that is older than `step`."""
        newest = max(noted for noted in self._notes if noted < step)
        self._notes = {newest: self._notes[newest]}

    def _settle(self, note: dict[str, list[private.Facts]]) -> None:
        for schedule, facts in zip(self._schedules, note["schedules"], strict=True):
            private.settle_schedule(schedule, facts)
        for stage, facts in zip(self._stages, note["stages"], strict=True):
            private.settle_stage(stage, facts)

    def _check_complete(self) -> None:
        """Raises RuntimeError unless the stages that were told of and those of the model are the same."""
        modules = set(map(id, self._model.modules()))
        for stage in self._stages:
            if id(stage.submod) not in modules:
                raise RuntimeError(
                    f"the module of pipeline stage {stage.stage_index} is not in the model of the session; "
                    "give it that, or for several stages on one rank nn.ModuleList([stage.submod for stage in stages])"
                )
        if private.is_imported() and self._untold(modules):
            gc.collect()  # a stage that was given up may still lie about
            if stages := self._untold(modules):
                raise RuntimeError(
                    f"the model is stage {', '.join(map(str, stages))} of a pipeline that the session was not told of; "
                    "pass its schedule: flashrec.Session(…, pipeline=schedule)"
                )

    def _untold(self, modules: set[int]) -> list[int]:
        told = set(map(id, self._stages))
        return sorted(
            stage.stage_index
            for stage in private.live_stages()
            if id(stage) not in told and any(id(module) in modules for module in stage.submod.modules())
        )
