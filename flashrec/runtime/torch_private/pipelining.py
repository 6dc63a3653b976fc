"""Stages and schedules of torch.distributed.pipelining.

In its first step a pipeline shakes hands: ranks warm their connections up and tell each other the shapes of what they
will send; receive buffers are made from that. What a stage knows afterwards is here called its facts: plain values that
can be noted, sent and put back. Imported only for scripts that have imported pipelining themselves.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

_STAGE_MODULE = "torch.distributed.pipelining.stage"

Facts = dict[str, Any]
Meta = tuple[tuple[int, ...], tuple[int, ...], Any, bool] | None  # shape, stride, dtype, requires grad
_METAS = ("inputs", "outputs", "input_grads", "output_grads")
_STAGE_NAMES = (
    "submod",
    "args_recv_info",
    "grad_recv_info",
    "act_send_info",
    "grad_send_info",
    "_stage_meta",
    "_setup_backward_recv_info",
    "_prepare_forward_infra",
)
_STAGE_CACHES = ("fwd_cache", "bwd_cache", "output_chunks", "backward_state", "dw_runner")
_SCHEDULE_CACHES = (
    "_internal_losses",
    "fwd_recv_ops",
    "bwd_recv_ops",
    "unshard_ops",
    "unsharded_stages",
    "backward_counter",
)
_INFERENCE = ("_fwd_outputs_for_bwd_meta", "_fwd_inputs_for_bwd_meta", "_fwd_kwargs_tensors_for_bwd_meta")


def is_imported() -> bool:
    """True when the script, or a library of its, uses pipelining at all."""
    return _STAGE_MODULE in sys.modules


def needed(schedules: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """(private name, the object that must have it) of these schedules and their stages."""
    for schedule in schedules:
        for name in ("_has_backward", "_n_microbatches", "_internal_losses", *_flags(schedule)):
            yield name, schedule
        for stage in stages(schedule):
            for name in (*_STAGE_NAMES, *_STAGE_CACHES):
                yield name, stage
            for name in _METAS:
                yield name, stage._stage_meta
            if _is_manual(stage):
                for name in ("_setup_forward_recv_info", "_setup_forward_send_info", *_INFERENCE):
                    yield name, stage
    yield "_TensorMeta", _utils()


def stages(schedule: Any) -> list[Any]:
    """The stages of this rank, in the order of the schedule. Raises TypeError when it is no schedule of torch."""
    if hasattr(schedule, "_stages"):
        return list(schedule._stages)
    if hasattr(schedule, "_stage"):
        return [schedule._stage]
    raise TypeError(f"pipeline={type(schedule).__name__}: give the schedule of torch.distributed.pipelining, or a list")


def live_stages() -> list[Any]:
    """Every stage object of this process. Looks at all objects of the interpreter: some 50 ms."""
    base = sys.modules[_STAGE_MODULE]._PipelineStageBase
    return [found for found in gc.get_objects() if issubclass(type(found), base)]


def schedule_facts(schedule: Any) -> Facts:
    forward, backward = _flags(schedule)
    return {"forward": getattr(schedule, forward), "backward": getattr(schedule, backward)}


def stage_facts(stage: Any) -> Facts:
    """What the stage has learned from its neighbours. Raises NotImplementedError for what cannot be noted."""
    return {
        "stage": stage.stage_index,
        "metas": {name: _note_metas(stage, name) for name in _METAS},
        "forward_chunks": len(stage.args_recv_info),
        "backward_chunks": len(stage.grad_recv_info),
        "chunks": stage.chunks,
        "has_backward": bool(stage.has_backward),
    }


def settle_schedule(schedule: Any, facts: Facts) -> None:
    """Forget a step that was cut, and stand where `facts` say."""
    for name in _SCHEDULE_CACHES:
        if hasattr(schedule, name):  # those of a single stage have few of them
            getattr(schedule, name).clear()
    for flag, value in zip(_flags(schedule), (facts["forward"], facts["backward"]), strict=True):
        setattr(schedule, flag, value)


def settle_stage(stage: Any, facts: Facts) -> None:
    """Forget a step that was cut, and know what `facts` say; all buffers are made anew. No communication."""
    for name in _STAGE_CACHES:
        getattr(stage, name).clear()
    stage.args_recv_info.clear()
    stage.grad_recv_info.clear()
    stage.act_send_info, stage.grad_send_info = {}, None
    stage.has_backward, stage.chunks = facts["has_backward"], facts["chunks"]
    for name in _METAS:
        setattr(stage._stage_meta, name, _metas_of(facts["metas"][name]))
    if _is_manual(stage):
        for name in _INFERENCE:
            setattr(stage, name, None)
    if facts["forward_chunks"]:
        _prepare_forward(stage, facts)
    if facts["backward_chunks"]:
        stage._setup_backward_recv_info(facts["backward_chunks"])
        stage.chunks = facts["chunks"]


def _prepare_forward(stage: Any, facts: Facts) -> None:
    if _is_manual(stage):
        stage._setup_forward_recv_info(facts["forward_chunks"], facts["has_backward"])
        stage._setup_forward_send_info()
    else:  # of a traced stage only the number of positional inputs is asked for, the rest is in its graph
        stage._prepare_forward_infra(facts["forward_chunks"], (None,) * len(facts["metas"]["inputs"]))


def _is_manual(stage: Any) -> bool:
    """PipelineStage, which learns shapes from its neighbours; else one that was traced, which knows them."""
    return isinstance(stage, sys.modules[_STAGE_MODULE].PipelineStage)


def _flags(schedule: Any) -> tuple[str, str]:
    kind = "_stages" if hasattr(schedule, "_stages") else "_stage"
    return f"{kind}_forward_initialized", f"{kind}_backward_initialized"


def _note_metas(stage: Any, name: str) -> list[Meta] | None:
    metas: Sequence[Any] | None = getattr(stage._stage_meta, name)
    return None if metas is None else [_note_meta(stage, meta) for meta in metas]


def _note_meta(stage: Any, meta: Any) -> Meta:
    if meta is None:
        return None
    if type(meta) is not _utils()._TensorMeta:
        raise NotImplementedError(
            f"stage {stage.stage_index} of the pipeline exchanges DTensors, which a recovery cannot describe to a "
            "replacement; pass plain tensors between stages: to_local() at the end of one, from_local() in the next"
        )
    return tuple(meta.shape), tuple(meta.stride), meta.dtype, bool(meta.requires_grad)


def _metas_of(noted: list[Meta] | None) -> tuple[Any, ...] | None:
    return None if noted is None else tuple(_meta_of(meta) for meta in noted)


def _meta_of(noted: Meta) -> Any:
    if noted is None:
        return None
    shape, stride, dtype, requires_grad = noted
    return _utils()._TensorMeta(shape=torch.Size(shape), stride=tuple(stride), dtype=dtype, requires_grad=requires_grad)


def _utils() -> Any:
    return sys.modules["torch.distributed.pipelining._utils"]
