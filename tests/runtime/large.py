"""A state of 100 MB, so that a transfer takes many pieces, several connections and time; and the memory it took."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flashrec
from tests.runtime import programs
from tests.runtime.layouts import recovery_faults

WIDTH = 1440
STEPS = 5


class Wide(nn.Module):
    """One of its weights is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH).t() / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x) @ self.turned
        return out


def train(out: str, faults: list[tuple[int, int, int, str]] = ()) -> None:
    """Write the losses, the digest of the state, and the peak of memory (bytes) before each step and at the end."""
    programs.start()
    hit = programs.Faults(list(faults))
    recovery_faults.install(hit.visit)
    torch.manual_seed(7)
    model = DistributedDataParallel(Wide(), bucket_cap_mb=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = flashrec.Session(model, optimizer)
    losses, peaks = {}, {}
    for step in session.steps(STEPS):
        peaks[int(step)] = _peak_bytes()
        with step:
            hit.visit(step, "forward")
            loss = model(torch.full((2, WIDTH), 1.0 + int(step))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[int(step)] = float(loss).hex()
    digest = hashlib.sha256()
    for tensor in [*model.parameters(), *(slot for slots in optimizer.state.values() for slot in slots.values())]:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    peaks[STEPS] = _peak_bytes()
    Path(out).write_text(json.dumps({"losses": losses, "digest": digest.hexdigest(), "peaks": peaks}))


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
