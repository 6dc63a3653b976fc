"""What every job of the benchmark trains, and what it writes down. Needs torch alone: scripts of all peers import it.

A small transformer under AdamW with synthetic data. A batch is a function of step and rank, there is no dropout and no
scheduler: nothing has to be restored but parameters, optimizer state and the number of the step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

VOCABULARY, CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 512, 32, 24, 128, 4, 4  # about 100 ms a step on one core
_TURN_POLL_S = 0.002
_TURN_TIMEOUT_S = 300.0


def parse() -> argparse.Namespace:
    """The options of every script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="folder of the logs of steps and of the final digests")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--checkpoints", type=Path, help="folder; none are written without it")
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--turns", default="", help="FOLDER:NAME, where a driver says when to run a block of steps")
    parser.add_argument("--block", type=int, default=0, help="steps of a block")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return options


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, CONTEXT) integers to (batch, CONTEXT, VOCABULARY) logits."""
        hidden = self.embedding(tokens) + self.position
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Of the batch of this step and rank: shuffled copies of one sequence, to be mapped onto their successors."""
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT), generator=generator)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), ((tokens * 7 + 3) % VOCABULARY).flatten())


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all bits of parameters and optimizer state, in the order of the names; wrappers' prefixes do not matter."""
    found = hashlib.sha256()
    tensors = {name.removeprefix("module."): tensor for name, tensor in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"{index:06d}.{key}": value for key, value in state.items()}
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode())
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


class Checkpoints:
    """Every `every` steps, one file, which appears whole or not at all. Does nothing without a folder."""

    def __init__(self, options: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._folder, self._every = options.checkpoints, options.every
        self._model, self._optimizer = model, optimizer

    def load(self) -> int:
        """Return the step to go on with: 0 if there is no checkpoint."""
        try:
            state = torch.load(self._folder / "last.pt")
        except (FileNotFoundError, TypeError):
            return 0
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])

    def save(self, step: int, rank: int) -> None:
        """After `step` steps; by rank 0 alone."""
        if self._folder is None or rank != 0 or step % self._every:
            return
        state = {"step": step, "model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        draft = self._folder / f"{step}.{os.getpid()}.draft"
        torch.save(state, draft)
        draft.replace(self._folder / "last.pt")


class Recorder:
    """One process's log of steps: a line of JSON for each step that it has finished, times in time.monotonic()."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self._options, self._rank = options, rank
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"steps-{socket.gethostname()}-{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._began = 0.0

    def steps(self, start: int) -> Iterator[int]:
        """The numbers of the steps to do."""
        for step in range(start, self._options.steps):
            self.begin(step)
            yield step

    def begin(self, step: int) -> None:
        """A step begins; at the start of a block this waits for the driver."""
        if self._options.turns and step % self._options.block == 0:
            folder, _, name = self._options.turns.partition(":")
            _await(Path(folder) / f"{name}.{step // self._options.block}")
        self._began = time.monotonic()

    def done(self, step: int, loss: float, rank: int | None = None) -> None:
        self._write({
            "step": step, "rank": self._rank if rank is None else rank, "began": self._began, "at": time.monotonic(),
            "loss": loss.hex(), "pid": os.getpid(), "node": socket.gethostname(),
        })  # fmt: skip

    def end_block(self, step: int) -> None:
        """All of this step is over, a checkpoint too; tells the driver if it was the last one of a block."""
        if self._options.turns and (step + 1) % self._options.block == 0:
            folder, _, name = self._options.turns.partition(":")
            (Path(folder) / f"{name}.{step // self._options.block}.{self._rank}").touch()

    def finish(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        text = json.dumps({"rank": self._rank, "steps": self._options.steps, "digest": digest(model, optimizer)})
        draft = self._options.out / f"final-{socket.gethostname()}-{os.getpid()}.draft"
        draft.write_text(text)
        draft.replace(draft.with_suffix(".json"))

    def _write(self, line: Mapping[str, Any]) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")


def _await(path: Path) -> None:
    deadline = time.monotonic() + _TURN_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no turn within {_TURN_TIMEOUT_S:g} s: {path}")
        time.sleep(_TURN_POLL_S)
