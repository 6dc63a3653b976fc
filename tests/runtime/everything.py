"""A training script with all kinds of state that a step changes."""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import flashrec
from flashrec.runtime import codec
from tests.runtime import programs
from tests.runtime.programs import WIDTH

HIDDEN = 520  # so that the average of the weights is too large to be kept for each step


class Metric:
    """As metrics are: a sum and a list, increased in each step."""

    def __init__(self) -> None:
        self.total, self.values = torch.zeros((), dtype=torch.float64), []

    def update(self, value: torch.Tensor) -> None:
        self.total += value
        self.values.append(value.clone())

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.values = state["total"].clone(), list(state["values"])


def train(out: str, steps: int = 8, faults: list[tuple[int, int, int, str]] = ()) -> None:
    rank = programs.start()
    hit = programs.Faults(list(faults))
    torch.manual_seed(7)
    net = nn.Sequential(
        nn.Linear(WIDTH, HIDDEN),
        nn.Dropout(0.1),
        nn.Linear(HIDDEN, HIDDEN),
        nn.BatchNorm1d(HIDDEN),
        nn.Linear(HIDDEN, 1),
    )
    model = DistributedDataParallel(net)
    momentum = torch.optim.SGD(net[0].parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True)
    fused = torch.optim.AdamW(net[2].parameters(), lr=1e-3, fused=True)
    seldom = torch.optim.Adagrad(net[3].parameters(), lr=0.1)
    last = torch.optim.RMSprop(net[4].parameters(), lr=1e-3, centered=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    state = {
        "restarts": lr_scheduler.CosineAnnealingWarmRestarts(momentum, T_0=2, T_mult=2),
        "lambda": lr_scheduler.LambdaLR(fused, lambda step: 0.9**step),
        "scaler": scaler,
        "ema": ema,
        "metric": Metric(),
        "of-rank": Metric(),
        "of-torch": torch.Generator().manual_seed(11),
        "of-numpy": np.random.default_rng(11),
        "of-python": random.Random(11),
    }
    session = flashrec.Session(model, [momentum, fused, seldom, last], state=state)
    found: dict[int, Any] = {}
    for step in session.steps(steps):
        with step:
            generator = torch.Generator().manual_seed(1000 + 10 * step + rank)
            x = torch.randn(8, WIDTH, generator=generator) + torch.rand((), generator=state["of-torch"])
            loss = F.mse_loss(model(x), torch.full((8, 1), state["of-python"].random()))
            scaler.scale(loss * state["of-numpy"].random()).backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            state["metric"].update(mean)
            state["of-rank"].update(loss.detach())
            drawn = [random.random().hex(), float(np.random.randn()).hex(), float(torch.randn(())).hex()]
            if step == 2:
                next(net.parameters()).grad.fill_(float("inf"))  # one of the optimizers is skipped
            for optimizer in (momentum, fused, seldom, last):
                scaler.unscale_(optimizer)
            hit.visit(step, "before-vote")
            scaler.step(momentum)
            scaler.step(fused)
            if step % 2:
                scaler.step(seldom)
            scaler.step(last)
            hit.visit(step, "after-optimizer")
            scaler.update()
            state["restarts"].step()
            state["lambda"].step()
            ema.update_parameters(net)
            for optimizer in (momentum, fused, seldom, last):
                optimizer.zero_grad()
        if step.is_done:
            rates = [optimizer.param_groups[0]["lr"].hex() for optimizer in (momentum, fused)]
            found[int(step)] = [float(loss).hex(), drawn, rates, scaler.get_scale()]
        hit.visit(step, "between")
    whole = {"model": net.state_dict()} | {
        name: item.state_dict() for name, item in state.items() if hasattr(item, "state_dict") and name != "of-rank"
    }
    for number, optimizer in enumerate((momentum, fused, seldom, last)):
        whole[f"optimizer {number}"] = optimizer.state_dict()
    digests = {name: hashlib.sha256(codec.encode(value, name)).hexdigest() for name, value in whole.items()}
    generators = [
        torch.rand((), generator=state["of-torch"]).item(), state["of-numpy"].random(), state["of-python"].random()
    ]  # fmt: skip
    result = {"steps": found, "digests": digests, "generators": generators, "life": os.environ["FLASHREC_INCARNATION"]}
    Path(out).write_text(json.dumps(result))
