"""What is to happen: faults as frozen data, read from JSON, refused with a sentence if they cannot work."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

PLACES = {
    "forward": "in the middle of the forward pass",
    "backward": "in the middle of the backward pass: some gradients are there, some are not",
    "in-collective": "blocked in a collective of the backward pass, waiting for `holder`",
    "before-vote": "all gradients are reduced, the vote is not entered: no parameter has changed",
    "in-optimizer": "the vote has passed and half of the parameters are updated",
    "after-optimizer": "the optimizer step is done, nothing after it",
    "join": "a replacement has built its model and is about to create its flashrec.Session (no step)",
}
KINDS = {
    "SIGKILL": "the process is gone at once",
    "SIGSEGV": "the process crashes",
    "SIGSTOP": "the process stands still and stays",
    "hang": "the script stands still; other threads of the process go on",
    "gil": "the script stands still and holds Python's interpreter lock, as an extension can: no thread goes on",
    "exit": "the process ends with exit code 1, without a word",
    "raise": "the script gets a FaultRaised exception",
    "request": "the victim waits there until the driver has done it (power cut, partition, anything)",
}


class PlanError(ValueError):
    """The plan cannot work; the text says which fault and why."""


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One fault: `rank` is hit at `place` of `step`.

    holder: for `in-collective`, another rank that holds its gradients of that step back until the fault has fired, so
    that the victim cannot leave the collective; give one on another node if the whole node is lost.
    life: only the n-th process of this rank (0: the first, 1: its first replacement, ...); None: whichever comes by
    first, for `join` whichever replacement.
    """

    id: str
    rank: int
    place: str
    kind: str
    step: int | None = None
    holder: int | None = None
    life: int | None = None

    def problem(self) -> str:
        """Why this fault cannot work; '' if it can."""
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.id):
            return "id must be letters, digits, - and _ (it becomes a file name)"
        if self.place not in PLACES:
            return f"place {self.place!r} is none of {', '.join(PLACES)}"
        if self.kind not in KINDS:
            return f"kind {self.kind!r} is none of {', '.join(KINDS)}"
        if self.rank < 0:
            return f"rank {self.rank} is negative"
        if self.place == "join":
            return self._problem_of_join()
        if self.step is None or self.step < 0:
            return f"place {self.place!r} needs a step of 0 or more"
        if self.place == "in-collective":
            return self._problem_in_collective()
        return "" if self.holder is None else "holder is only for place 'in-collective'"

    def _problem_of_join(self) -> str:
        if self.step is not None or self.holder is not None:
            return "place 'join' comes before the first step of a replacement: it takes no step and no holder"
        return "place 'join' is for replacements: life starts at 1" if self.life == 0 else ""

    def _problem_in_collective(self) -> str:
        if self.holder is None or self.holder == self.rank or self.holder < 0:
            return "place 'in-collective' needs a holder: another rank, which the victim then waits for"
        if self.kind == "raise":
            return "a process blocked in a collective cannot raise"
        return "a process blocked in a collective stands still already" if self.kind == "hang" else ""


class FaultPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All faults of one job. directory: absolute, seen by driver and workers; timeout_s: limit of every wait."""

    directory: str
    faults: tuple[Fault, ...]
    timeout_s: float = 120.0

    def check(self) -> FaultPlan:
        """Itself; raises PlanError if a fault cannot work."""
        if not Path(self.directory).is_absolute():
            raise PlanError(f"directory {self.directory!r} is not absolute: workers may run elsewhere")
        if self.timeout_s <= 0:
            raise PlanError("timeout_s must be above 0")
        seen: set[str] = set()
        for fault in self.faults:
            problem = fault.problem() or ("two faults have this id" if fault.id in seen else "")
            if problem:
                raise PlanError(f"fault {fault.id!r}: {problem}")
            seen.add(fault.id)
        return self


def load_plan(path: str | Path) -> FaultPlan:
    """Read and check a plan; raises PlanError with the file's name for whatever is wrong with it."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=FaultPlan).check()
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, PlanError) as error:
        raise PlanError(f"{path}: {error}") from error
