"""Where faults are armed and recorded: files that appear whole or not at all, and that only one process can create.

    <id>.armed      a victim stands at its place and waits (kind `request`): written by the victim
    <id>.fired      the fault has happened: written by the victim just before, or by the driver just after
    faults.jsonl    one line per fired fault, what `flashrec report` reads
    lives/R.K       process K of rank R has begun

`mono` is CLOCK_MONOTONIC of the machine that wrote it, `wall` is UTC in ISO 8601.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from flashrec.testing.plan import FaultPlan

POLL_INTERVAL_S = 0.002


class FaultTimeout(RuntimeError):
    """Somebody waited for a fault and it did not come in time."""


class FaultDidNotFire(AssertionError):
    """The job is over and a fault of the plan has no record: the test proves nothing."""


class Armed(msgspec.Struct, frozen=True):
    """A victim at its place. pid: in the victim's own PID namespace."""

    id: str
    kind: str
    place: str
    rank: int
    node: str
    pid: int
    step: int | None
    mono: float
    wall: str


class Fired(msgspec.Struct, frozen=True):
    """A fault that has happened. mono: when."""

    id: str
    kind: str
    place: str
    rank: int
    node: str
    step: int | None
    mono: float
    wall: str


def wall_now() -> str:
    """UTC now, ISO 8601 with microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


class FaultDirectory:
    """The meeting point of the driver (a test, the demo) and the injectors in the workers."""

    def __init__(self, path: str | Path):
        self.path = Path(path).absolute()
        (self.path / "lives").mkdir(parents=True, exist_ok=True)

    # ---- driver -------------------------------------------------------------------------------------------------

    def write_plan(self, plan: FaultPlan) -> Path:
        """Check the plan and write it here; returns the path to hand to `python -m flashrec.testing.inject`."""
        path = self.path / "plan.json"
        path.write_bytes(msgspec.json.encode(plan.check()))
        return path

    def await_armed(self, fault_id: str, timeout_s: float) -> Armed:
        """Wait until the victim of a `request` stands at its place; raises FaultTimeout."""
        path = self.path / f"{fault_id}.armed"
        self.wait_until(path.exists, timeout_s, f"no victim came to the place of fault {fault_id!r}")
        return msgspec.json.decode(path.read_bytes(), type=Armed)

    def mark_fired(self, fault_id: str, mono: float) -> Fired:
        """Record that a requested fault has been done at `mono`; lets the victim (if it lives) and the holder go on."""
        armed = msgspec.json.decode((self.path / f"{fault_id}.armed").read_bytes(), type=Armed)
        fired = Fired(armed.id, armed.kind, armed.place, armed.rank, armed.node, armed.step, mono, wall_now())
        if not self.record_fired(fired):
            raise FileExistsError(f"fault {fault_id!r} has fired already")
        return fired

    def fired(self) -> dict[str, Fired]:
        """Every fault that has happened, by id."""
        records = (msgspec.json.decode(path.read_bytes(), type=Fired) for path in self.path.glob("*.fired"))
        return {record.id: record for record in sorted(records, key=lambda record: record.mono)}

    def assert_all_fired(self, plan: FaultPlan) -> None:
        """Raise FaultDidNotFire, naming them, if faults of the plan did not happen."""
        missing = [fault for fault in plan.faults if not self.has_fired(fault.id)]
        if missing:
            texts = [f"{fault.id} ({fault.kind} of rank {fault.rank}, {fault.place})" for fault in missing]
            raise FaultDidNotFire(f"did not fire: {', '.join(texts)}")

    # ---- injector -----------------------------------------------------------------------------------------------

    def has_fired(self, fault_id: str) -> bool:
        return (self.path / f"{fault_id}.fired").exists()

    def record_armed(self, armed: Armed) -> bool:
        """False if another process has armed this fault before."""
        return self._create(f"{armed.id}.armed", msgspec.json.encode(armed))

    def record_fired(self, fired: Fired) -> bool:
        """False if this fault has fired before: then nothing may be done."""
        line = msgspec.json.encode(fired)
        if not self._create(f"{fired.id}.fired", line):
            return False
        log = os.open(self.path / "faults.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(log, line + b"\n")  # one write: lines of several processes do not mix
        os.close(log)
        return True

    def begin_life(self, rank: int) -> int:
        """Number of this process among those that have been this rank, from 0."""
        life = 0
        while not self._create(f"lives/{rank}.{life}", b""):
            life += 1
        return life

    def wait_until(self, condition: Callable[[], bool], timeout_s: float, text: str) -> None:
        """Poll until `condition`; raises FaultTimeout with `text` after timeout_s."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise FaultTimeout(f"{text} within {timeout_s:g} s (fault directory {self.path})")
            time.sleep(POLL_INTERVAL_S)

    def _create(self, name: str, content: bytes) -> bool:
        """Create a file with its content in one go; False if it exists. A link is atomic on shared file systems too."""
        path = self.path / name
        draft = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
        draft.write_bytes(content)
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        finally:
            with suppress(FileNotFoundError):
                draft.unlink()
        return True
