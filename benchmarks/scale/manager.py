"""The real manager of a job, with simulated agents and a double of Slurm, and the scenario that it goes through.

`python -m benchmarks.scale.manager ORDER FILE` (JSON, see `Order`) appends one JSON line per measurement to FILE. Only
job steps are started is doubled: an agents' step tells the process of `benchmarks.scale.agents` to connect, a workers'
step does nothing, as agents learn from the manager itself whom to expect.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from flashrec.config.load import load_config
from flashrec.core import effects as fx
from flashrec.core import events as e
from flashrec.core.types import Assignment, Phase
from flashrec.manager.app import Manager
from flashrec.manager.request import Request, Shape
from flashrec.manager.steps import StepEnd

SETTINGS = ("recovery.agent_retry_s=0.5", "control.reconnect_s=5")
SETTLE_S = 1.0
LIMIT_S = 120.0


class Order(msgspec.Struct, frozen=True):
    """lose: (nodes, 'reset' or 'silence') in turn, `rounds` times each. steady_s: training whose cost is measured."""

    num_ranks: int
    spares: int
    lose: tuple[tuple[int, str], ...]
    rounds: int = 3
    steady_s: float = 5.0
    ranks_per_node: int = 8
    rendezvous: str = "root"


class Double:
    """A job step that is somebody else's business. See `flashrec.manager.steps.Step`."""

    def __init__(self, name: str, nodes: Sequence[str], start: Any = None) -> None:
        self.name, self.nodes, self.is_forced = name, frozenset(nodes), False
        self._begin, self._ended = start, asyncio.Event()

    async def start(self) -> None:
        if self._begin is not None:
            self._begin()

    async def wait(self) -> StepEnd:
        await self._ended.wait()
        return StepEnd(0, "")

    def abandon(self) -> None:
        self.is_forced = True

    def terminate(self, *, hard: bool = False) -> None:
        self.is_forced = True
        self._ended.set()


class Fleet:
    """The process with the agents. See `flashrec.manager.steps.Launcher`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    def order(self, **what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")

    async def ask(self, **what: Any) -> dict[str, Any]:
        self.order(**what)
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(await self._process.stdout.readline())
        return answer

    def agents(self, nodes: Sequence[str], launch: int) -> Double:
        return Double(f"agents {launch}", nodes, lambda: self.order(do="start", nodes=list(nodes), launch=launch))

    def workers(self, launch: int, placement: Mapping[str, Sequence[Assignment]]) -> Double:
        return Double(f"workers {launch}", list(placement))

    def job_of(self, node: str) -> int:
        return 0


class Mark(msgspec.Struct, frozen=True):
    """Something that the machine asked for: when, and what the process had used by then."""

    what: str
    at: float
    cpu_s: float


class Measured(Manager):
    """The manager, with the double of Slurm, and a note of when it moved."""

    def __init__(self, order: Order, fleet: Fleet, job_dir: Path) -> None:
        per_node, active = order.ranks_per_node, order.num_ranks // order.ranks_per_node
        request = Request(("simulated",), (), None, None, per_node, load_config(None, list(SETTINGS)), 1)
        nodes = tuple(f"n{number:05d}" for number in range(active + order.spares))
        super().__init__(request, Shape(active, per_node, order.spares), nodes, job_dir, "127.0.0.1", None)
        self._order, self.fleet = order, fleet
        self.marks: list[Mark] = []
        write = self.journal.effect

        def effect(effect: fx.AnyEffect, generation: int) -> None:
            self.note(effect.after if isinstance(effect, fx.ChangePhase) else type(effect).__name__)
            write(effect, generation)

        self.journal.effect = effect  # type: ignore[method-assign]

    def note(self, what: str) -> None:
        self.marks.append(Mark(what, time.monotonic(), time.process_time()))

    def emit_all(self, events: Sequence[e.AnyEvent]) -> None:
        if isinstance(events[0], e.NodeCondemned | e.NodesCondemned):  # these come alone
            self.note("condemned")
        super().emit_all(events)

    def _launcher(self, port: int) -> Any:
        self.fleet.order(
            port=port, secret=self._secret.hex(), ranks_per_node=self._order.ranks_per_node,
            num_ranks=self._order.num_ranks, rendezvous=self._order.rendezvous, logs=str(self.logs),
        )  # fmt: skip
        return self.fleet


class Scenario:
    """Start, train, lose nodes, and say what each took."""

    def __init__(self, order: Order, manager: Measured, results: Path) -> None:
        self._order, self._manager, self._fleet, self._results = order, manager, manager.fleet, results
        self._random = random.Random(1)

    async def play(self) -> None:
        began, cpu_s = time.monotonic(), time.process_time()
        await self._until(lambda: self._machine.phase is Phase.RUNNING)
        joined = time.monotonic()
        await self._quiet()
        self._tell(
            "start", seconds=joined - began, cpu_s=time.process_time() - cpu_s, marks=self._since(began),
            agents=(await self._fleet.ask(do="tell"))["agents"],
        )  # fmt: skip
        await self._train()
        for _ in range(self._order.rounds):
            for count, how in self._order.lose:
                await self._lose(count, how)
        self._manager.emit(e.StopRequested("measured", 0))

    @property
    def _machine(self) -> Any:
        return self._manager.machine

    async def _train(self) -> None:
        before = await self._fleet.ask(do="tell")
        began, cpu_s = time.monotonic(), time.process_time()
        await asyncio.sleep(self._order.steady_s)
        seconds, used_s = time.monotonic() - began, time.process_time() - cpu_s
        counted = await self._fleet.ask(do="tell")
        self._tell(
            "steady", num_agents=len(self._manager.nodes), seconds=seconds, cpu_s=used_s,
            agents_cpu_s=counted["cpu_s"] - before["cpu_s"], agents=counted["agents"], rss_bytes=_rss_bytes(),
            peak_bytes=_peak_bytes(),
        )  # fmt: skip

    async def _lose(self, count: int, how: str) -> None:
        machine, generation = self._machine, self._machine.generation
        victims = self._random.sample(sorted({slot.node for slot in machine.members.slots}), count)
        before = await self._fleet.ask(do="tell")
        began, cpu_s = time.monotonic(), time.process_time()
        lost_at = (await self._fleet.ask(do="lose", nodes=victims, how=how))["lost_at"]
        nobody = set(victims)
        await self._until(
            lambda: (
                machine.phase is Phase.RUNNING
                and machine.generation > generation
                and not nobody & {slot.node for slot in machine.members.slots}
            )
        )
        resumed_cpu_s = time.process_time()
        await asyncio.sleep(0.2)
        counted = await self._fleet.ask(do="tell")
        self._tell(
            "recovery", nodes=count, how=how, lost_at=lost_at, marks=self._since(began), agents=counted["agents"],
            agents_marks=counted["marks"], cpu_s=resumed_cpu_s - cpu_s,
            agents_cpu_s=counted["cpu_s"] - before["cpu_s"],
            generations=machine.generation - generation, peak_bytes=_peak_bytes(),
        )  # fmt: skip
        await self._quiet()

    async def _quiet(self) -> None:
        """Every node has an agent again, and what follows a resume is over."""
        alive = self._manager.detector.state_of
        await self._until(lambda: all(alive(node) == "alive" for node in self._manager.nodes))
        await asyncio.sleep(SETTLE_S)
        while self._manager.journal.num_kept:
            await asyncio.sleep(0.1)

    async def _until(self, condition: Any) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0.02)

    def _since(self, began: float) -> list[Any]:
        marks, self._manager.marks = self._manager.marks, []
        return [msgspec.to_builtins(mark) for mark in marks if mark.at >= began]

    def _tell(self, what: str, **fields: Any) -> None:
        with self._results.open("a") as file:
            file.write(json.dumps({"what": what, "num_ranks": self._order.num_ranks, **fields}) + "\n")


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


async def run(order: Order, folder: Path, results: Path) -> int:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.scale.agents", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        limit=1 << 24,
    )  # fmt: skip
    manager = Measured(order, Fleet(process), folder)
    scenario = asyncio.create_task(Scenario(order, manager, results).play())

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            manager.emit(e.StopRequested(f"the scenario failed: {task.exception()!r}", 1))

    scenario.add_done_callback(ended)
    try:
        code = await manager.run()
    finally:
        scenario.cancel()
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            await process.wait()
    return code


def main() -> None:
    order = msgspec.json.decode(sys.argv[1], type=Order)
    with tempfile.TemporaryDirectory(prefix="flashrec-scale-") as folder:
        sys.exit(asyncio.run(run(order, Path(folder) / "job", Path(sys.argv[2]))))


if __name__ == "__main__":
    main()
