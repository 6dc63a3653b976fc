"""What a run of a layout has left, and the comparison of two of them: every loss that was computed on any rank, also by
lives that were lost later and in steps that were redone, and digests of everything a rank holds at the end.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.runtime.attendant import Attendant, Ending
from tests.runtime.layouts import program
from tests.runtime.support import Cluster

TIMEOUT_S = 240.0
Losses = dict[int, dict[int, list[Any]]]  # rank -> step -> what was computed, each time that it was


class Outcome:
    """results: by rank, missing where a rank did not get to its end."""

    def __init__(self, path: Path, world_size: int) -> None:
        self.results: dict[int, dict[str, Any]] = {}
        self.losses: Losses = {}
        for rank in range(world_size):
            if (found := path / f"rank{rank}.json").exists():
                self.results[rank] = json.loads(found.read_text())
            steps = self.losses.setdefault(rank, {})
            if (found := path / f"rank{rank}.losses").exists():
                for line in found.read_text().splitlines():
                    if line.endswith("]"):  # not cut by a kill
                        step, *computed = json.loads(line)
                        steps.setdefault(step, []).append(computed)

    def differences(self, wanted: Outcome, *, is_complete: bool = True) -> list[str]:
        """What differs from the run `wanted`; is_complete: every step and every rank has to be there."""
        found = []
        for rank, steps in wanted.losses.items():
            for step, (right,) in steps.items():
                computed = self.losses[rank].get(step, [])
                found += [f"rank {rank} step {step}: {each} is not {right}" for each in computed if each != right]
                if not computed and is_complete:
                    found.append(f"rank {rank} step {step}: no loss")
        for rank, result in wanted.results.items():
            if rank not in self.results:
                found += [f"rank {rank}: no result"] if is_complete else []
            elif self.results[rank]["digest"] != result["digest"]:
                found.append(f"rank {rank}: other parameters or optimizer state")
            elif self.results[rank]["full"] != result["full"]:
                found.append(f"rank {rank}: other buffers")
        return found


def undisturbed(layout: str, world_size: int, steps: int, cache: Path) -> Outcome:
    """The same run with nothing failing; its files are kept in `cache`, which several processes may share."""
    kept = cache / f"{layout}-{world_size}-{steps}"
    if not kept.exists():
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=cache))
        cluster = Cluster(made / "job", world_size)
        attendant = Attendant(cluster, program.train, {"layout": layout, "steps": steps})
        try:
            attendant.start()
            ending = attendant.run(TIMEOUT_S)
            assert ending is Ending.DONE and not attendant.num_losses, f"{ending}: {attendant.why}\n{cluster.logs()}"
        finally:
            cluster.close()
        try:
            os.rename(made / "job", kept)
        except OSError:
            assert kept.exists()  # another process was faster
    outcome = Outcome(kept, world_size)
    assert all(len(outcome.losses[rank]) == steps for rank in range(world_size)), f"{layout}: losses are missing"
    return outcome
