"""The training script that runs any layout, with faults at named places, and what it leaves to be compared."""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import flashrec
from flashrec.runtime.limits import Limits
from tests.runtime import programs
from tests.runtime.layouts import mirror_faults, recovery_faults
from tests.runtime.layouts.layout import TABLE, Setup

PLACES = ("forward", "backward", "after-backward", "before-vote", "in-optimizer", "after-optimizer", "between")


def train(
    out: str,
    layout: str,
    steps: int = 6,
    faults: list[tuple[int, int, int, str]] = (),
    limits: dict[str, float] | None = None,
) -> None:
    """faults: (rank, life, step, place), place one of PLACES, `micro-<n>` (after the n-th forward of a micro-batch), or
    one of `recovery_faults.PLACES` (then the step is -1) or of `mirror_faults.PLACES`, with `stop-` before it for
    SIGSTOP. Each loss is written when it is known, so that those are kept which a life that dies has computed, or which
    belong to a step that is cut."""
    programs.start(Limits(**(programs.LIMITS.__dict__ | (limits or {}))))
    hit = programs.Faults(list(faults))
    recovery_faults.install(hit.visit)
    mirror_faults.install(hit.visit)
    hit.visit(-1, "init")
    setup = TABLE[layout].build()
    setup.optimizers[-1].register_step_post_hook(lambda *_: hit.visit(where[0], "end-of-optimizer"))  # before it votes
    session = flashrec.Session(setup.model, setup.optimizers, state=setup.state, **setup.session)
    where = [0]
    setup.watched.register_post_accumulate_grad_hook(lambda _: hit.visit(where[0], "backward"))
    setup.optimizers[0].register_step_pre_hook(lambda *_: hit.visit(where[0], "in-optimizer"))  # after the session's
    if setup.between_collectives is not None:
        setup.between_collectives.append(lambda: hit.visit(where[0], "amid-optimizer"))
    done = [0]  # micro-batches of this step
    if setup.micro is not None:
        setup.micro.register_forward_hook(lambda *_: hit.visit(where[0], f"micro-{_count(done)}"))
    hit.visit(-1, "join")
    losses: dict[int, str] = {}
    redone = 0
    kept = Path(out).with_suffix(".losses").open("a", buffering=1)
    for step in session.steps(steps):
        with step:
            where[0], done[0] = int(step), 0
            hit.visit(step, "forward")
            loss = setup.run(int(step))
            hit.visit(step, "after-backward")
            drawn = [random.random().hex(), float(torch.rand(())).hex()]
            kept.write(json.dumps([int(step), float(loss).hex(), drawn]) + "\n")
            setup.clip()
            hit.visit(step, "before-vote")
            for optimizer in setup.optimizers:
                optimizer.step()
            hit.visit(step, "after-optimizer")
            for item in setup.state.values():
                if isinstance(item, torch.optim.lr_scheduler.LRScheduler):
                    item.step()
            for optimizer in setup.optimizers:
                optimizer.zero_grad()
        if step.is_done:
            losses[int(step)] = [float(loss).hex(), drawn]
        else:
            redone += 1
        hit.visit(step, "between")
    hit.visit(steps, "after-loop")
    result: dict[str, Any] = {
        "losses": losses,
        "redone": redone,
        "digest": digest(setup, with_buffers=False),
        "full": digest(setup),
        "bytes": sum(local(tensor).nbytes for tensor in tensors(setup).values()),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }
    Path(out).write_text(json.dumps(result))


def _count(number: list[int]) -> int:
    number[0] += 1
    return number[0]


def tensors(setup: Setup, *, with_buffers: bool = True) -> dict[str, torch.Tensor]:
    """Everything this rank holds of the state, by name."""
    found = dict(setup.model.named_parameters()) | (dict(setup.model.named_buffers()) if with_buffers else {})
    for i, optimizer in enumerate(setup.optimizers):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        index = {id(param): j for j, param in enumerate(params)}
        for param, slots in getattr(optimizer, "optim", optimizer).state.items():  # of ZeRO the inner one
            for name, slot in slots.items():
                if isinstance(slot, torch.Tensor):
                    found[f"optimizer {i} parameter {index.get(id(param), param)} {name}"] = slot
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def digest(setup: Setup, *, with_buffers: bool = True) -> str:
    found = hashlib.sha256()
    for name, tensor in tensors(setup, with_buffers=with_buffers).items():
        found.update(name.encode())
        found.update(local(tensor.detach()).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
