"""Runs an example unchanged and writes down what it leaves, in the form that examples/gpt/compare.py reads.

    python tests/integrations/observe.py OUT train.py --steps 8

Losses are the lines `step N rank R loss X` that the script prints (nine digits: every bit of a float32); the digest is
over the parameters and the state of its optimizers, as they are when it has ended.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any, TextIO

LINE = re.compile(r"step (\d+) rank (\d+) loss (\S+)")


class Tee:
    """stdout of a rank. A replacement appends to what was there: the last line of a step counts."""

    def __init__(self, inner: TextIO, path: Path) -> None:
        self._inner, self._losses, self._line = inner, path.open("a", buffering=1), ""
        self.last_step = -1

    def write(self, text: str) -> int:
        self._line += text
        *lines, self._line = self._line.split("\n")
        for line in lines:
            if found := LINE.fullmatch(line):
                step, loss = int(found[1]), float(found[3]).hex()
                self.last_step = step
                self._losses.write(json.dumps({"step": step, "loss": loss, "mean": loss}) + "\n")
        return self._inner.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def digest_of(optimizers: list[Any]) -> str:
    """sha256 over the parts of this rank."""
    digest = hashlib.sha256()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            digest.update(repr(sorted((k, v) for k, v in group.items() if k != "params")).encode())
            for parameter in group["params"]:
                slots = optimizer.state.get(parameter, {})
                for name, value in [("parameter", parameter), *sorted(slots.items())]:
                    digest.update(name.encode())
                    digest.update(bytes_of(value))
    return digest.hexdigest()


def bytes_of(value: Any) -> bytes:
    import torch

    if not isinstance(value, torch.Tensor):
        return repr(value).encode()
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def main() -> None:
    out, script, *arguments = sys.argv[1:]
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    torch.set_num_threads(1)
    optimizers: list[Any] = []
    register_optimizer_step_post_hook(
        lambda optimizer, args, kwargs: None if optimizer in optimizers else optimizers.append(optimizer)
    )
    rank, folder = int(os.environ["RANK"]), Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    tee = sys.stdout = Tee(sys.stdout, folder / f"rank-{rank}.jsonl")  # type: ignore[assignment]
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).absolute().parent)
    runpy.run_path(script, run_name="__main__")
    assert optimizers, "the script has made no optimizer step"
    final = {"rank": rank, "steps": tee.last_step + 1, "digest": digest_of(optimizers)}
    path = folder / f"final-{rank}.json"
    path.with_suffix(".tmp").write_text(json.dumps(final))
    path.with_suffix(".tmp").replace(path)


if __name__ == "__main__":
    main()
