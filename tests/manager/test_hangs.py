"""What the manager does with a hung worker: ask for its stacks, look again, kill, and give up a node that keeps it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from flashrec.config.schema import Hangs
from flashrec.core import events as e
from flashrec.core.types import Phase
from flashrec.manager import hangs as module
from flashrec.manager.excerpt import excerpt
from flashrec.manager.hangs import HangWatch
from flashrec.wire import messages as m
from tests.core.driver import Driver

SPY = """Process 7: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 9 (idle): "flashrec-beat"
    _beat (flashrec/runtime/control.py:120)

Thread 7 (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2806)
    cast (flashrec/runtime/vote.py:34)
    step (/home/me/project/model/train.py:88)
    main (train.py:120)
"""
WRITTEN = """Thread 0x00007f01 (most recent call first):
  File "/opt/flashrec/runtime/control.py", line 120 in _beat

Current thread 0x00007f02 (most recent call first):
  File "/home/me/train.py", line 88 in forward
  File "/home/me/train.py", line 120 in <module>
"""


class Job:
    """Four ranks on two nodes that train; rank 2 is hung once `tick` says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        driver = Driver()
        for line in ("job n1 n2 n3 active=2 per_node=2", "agent n1 n2 n3", "started all", "joined all",
                     "restored all v=0"):  # fmt: skip
            driver.do(line)
        self.driver, self.machine = driver, driver.machine
        assert self.machine.phase is Phase.RUNNING
        self.sent: list[tuple[str, Any]] = []
        self.control: Any = SimpleNamespace(send=lambda node, message: self.sent.append((node, message)))
        self.notes: list[dict[str, Any]] = []
        self.verdicts: list[tuple[Any, ...]] = []
        self.journal: Any = SimpleNamespace(
            note=lambda what, **fields: self.notes.append({"what": what, **fields}),
            verdict=lambda *words: self.verdicts.append(words),
        )
        self.events: list[e.AnyEvent] = []
        self.said: list[str] = []
        monkeypatch.setattr(module, "say", self.said.append)
        self.now = time.monotonic()
        self.watch = HangWatch(self, Hangs(**{"first_step_s": 5.0, "stacks_timeout_s": 0.05} | settings))

    def emit(self, event: e.AnyEvent) -> None:
        self.events.append(event)

    def pass_time(self, seconds: float, hung: int | None = 2, step: int = 0) -> None:
        """Heartbeats of all ranks in step 7; everybody waits for `hung`, from the beginning on."""
        for quarter in range(int(seconds * 4) + 1):
            for rank in range(4):
                is_hung = rank == hung
                self.beat(rank, 4 if is_hung else 5, not is_hung, still_s=quarter / 4, v=7 + step)
            self.watch.look(self.now)
            self.now += 0.25

    def beat(self, rank: int, issued: int, waiting: bool, still_s: float = 0.0, v: int = 7, quiet: str = "") -> None:
        tag = m.WorkerBeat(rank, 1, v, v - 1, v - 1, "step", quiet, waiting, {"0": issued}, still_s)
        self.watch.heard([tag], self.now)

    def of(self, kind: type) -> list[tuple[str, Any]]:
        return [(node, message) for node, message in self.sent if isinstance(message, kind)]

    def answer(self, text: str = SPY, how: str = "py-spy") -> None:
        self.watch.stacks_taken(SimpleNamespace(node="n2"), m.StacksTaken(2, 1, how, text))


def play(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 10))


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def test_a_hung_worker_is_shown_and_then_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        job = Job(monkeypatch)
        job.pass_time(6.0)
        assert job.sent == [("n2", m.StacksAsked(2, 1, 0.05))]
        (verdict,) = job.verdicts
        assert verdict[:2] == ("rank 2", "hung") and verdict[3] == 1
        assert job.watch.note_of(2) == "hung" and job.watch.note_of(1) == ""
        job.answer()
        ((node, kill),) = job.of(m.KillWorkers)
        assert node == "n2" and kill.workers == ((2, 1),)
        assert kill.reason.startswith("hangs in step 7 for ")
        assert "in collective 5 of group 0: distributed/distributed_c10d.py:2806 in all_reduce, from " in kill.reason
        (note,) = job.notes
        assert (note["what"], note["rank"], note["node"], note["how"]) == ("worker hangs", 2, "n2", "py-spy")
        assert note["stacks"] == SPY and note["killed"]
        assert job.said[-1].startswith("rank 2 hangs in step 7") and job.said[-1].endswith("(py-spy); killed")
        job.pass_time(2.0)
        assert len(job.of(m.StacksAsked)) == 1, "once"

    play(scene)


def test_an_agent_that_does_not_answer_does_not_save_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_MARGIN_S", 0.02)

    async def scene() -> None:
        job = Job(monkeypatch)
        job.pass_time(6.0)
        await until(lambda: job.of(m.KillWorkers))
        assert job.notes[0]["how"] == "none"
        job.answer()
        assert len(job.of(m.KillWorkers)) == 1 and job.notes[1]["what"] == "stacks of a silent worker"

    play(scene)


def test_who_moved_while_its_stacks_were_taken_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        job = Job(monkeypatch)
        job.pass_time(6.0)
        job.beat(2, 5, True)
        job.answer()
        assert job.of(m.KillWorkers) == [] and job.notes[0]["what"] == "worker moves again"
        assert "moves again" in job.said[-1]

    play(scene)


def test_a_life_that_is_over_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        job = Job(monkeypatch)
        job.pass_time(6.0)
        job.driver.do("exit 2")
        job.answer()
        assert job.of(m.KillWorkers) == []

    play(scene)


def test_where_killing_is_off_it_is_only_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        job = Job(monkeypatch, kill=False)
        job.pass_time(6.0)
        job.answer()
        assert job.of(m.KillWorkers) == [] and not job.notes[0]["killed"]
        assert "left alone" in job.said[-1]

    play(scene)


def test_while_the_job_recovers_nobody_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        job = Job(monkeypatch)
        job.driver.do("exit 1")
        job.pass_time(20.0)
        assert job.sent == []

    play(scene)


def test_a_process_that_does_not_die_costs_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEATH_TIMEOUT_S", 0.02)

    async def scene() -> None:
        job = Job(monkeypatch)
        job.pass_time(6.0)
        job.answer()
        await until(lambda: job.events)
        (event,) = job.events
        assert isinstance(event, e.NodeCondemned) and (event.node, event.incarnation, event.kind) == ("n2", 1, "link")
        assert "does not end within" in event.reason

        job = Job(monkeypatch)
        job.pass_time(6.0)
        job.answer()
        job.driver.do("exit 2")
        await asyncio.sleep(0.1)
        assert job.events == []

    play(scene)


def test_all_that_wait_in_one_collective_do_the_step_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        for kill in (True, False):
            job = Job(monkeypatch, kill=kill, all_wait_s=10.0)
            job.pass_time(1.0, hung=None, step=-1)
            job.pass_time(20.0, hung=None)
            assert [type(event) for event in job.events] == [e.TrainingStalled] * kill
            assert [words[:2] for words in job.verdicts] == [("all ranks", "stalled")]
            assert job.sent == []

    play(scene)


def test_stragglers_are_reported_when_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        job = Job(monkeypatch, straggler_after_s=15.0)
        for quarter in range(4 * 70):
            for rank in range(4):
                job.beat(rank, quarter, rank != 3 and quarter % 2 == 0, v=quarter)
            job.watch.look(job.now)
            job.now += 0.25
        assert [words[:2] for words in job.verdicts] == [("rank 3", "slow")]
        assert job.watch.note_of(3) == "straggler" and "2.00 times as long" in job.said[-1]
        for quarter in range(4 * 70):
            for rank in range(4):
                job.beat(rank, quarter, quarter % 2 == 0, v=1000 + quarter)
            job.watch.look(job.now)
            job.now += 0.25
        assert [words[:2] for words in job.verdicts[1:]] == [("rank 3", "up to pace")]
        assert job.of(m.KillWorkers) == []

    play(scene)


def test_quiet_time_is_no_measure_of_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        job = Job(monkeypatch, straggler_after_s=15.0)
        for quarter in range(4 * 100):
            for rank in range(4):
                is_quiet = rank == 3 and quarter % 40 < 20  # half of the time, and it waits for nobody in it
                job.beat(rank, quarter, not is_quiet and quarter % 2 == 0, v=quarter, quiet="eval" if is_quiet else "")
            job.watch.look(job.now)
            job.now += 0.25
        assert job.verdicts == []
        job.beat(3, 0, False, v=9999, quiet="eval")
        assert job.watch.note_of(3) == "quiet: eval"

    play(scene)


@pytest.mark.parametrize(
    ("how", "text", "wanted"),
    [
        ("py-spy", SPY, "distributed/distributed_c10d.py:2806 in all_reduce, from model/train.py:88 in step"),
        ("faulthandler", WRITTEN, "me/train.py:88 in forward"),
        ("/proc", "state: D\nwchan: nfs_wait_bit\nsyscall: 0 0x3", "in the kernel, state: D, wchan: nfs_wait_bit"),
        ("none", "(/proc: there is no process 7)\n", ""),
        ("py-spy", "Thread 7 (idle): \"MainThread\"\n", ""),
    ],
)  # fmt: skip
def test_the_line_that_tells_most(how: str, text: str, wanted: str) -> None:
    assert excerpt(how, text) == wanted
