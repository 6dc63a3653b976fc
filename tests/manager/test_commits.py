"""The manager's answers to `session.may_commit()`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from flashrec.core.membership import Members
from flashrec.manager.commits import CommitDesk
from flashrec.wire import messages as m

LINK: Any = SimpleNamespace(node="n1")


class Job:
    """Generation 2, two ranks in their first lives."""

    def __init__(self, valid_s: float = 5.0) -> None:
        members = Members(("n1", "n2"), 2, 1)
        for slot in members.slots:
            slot.state, slot.incarnation = "up", 1
        self.machine: Any = SimpleNamespace(generation=2, training=2, num_loads=0, members=members)
        self.sent: list[tuple[str, m.CommitAnswered]] = []
        self.control: Any = SimpleNamespace(send=lambda node, message: self.sent.append((node, message)))
        self.notes: list[dict[str, Any]] = []
        self.journal: Any = SimpleNamespace(note=lambda what, **fields: self.notes.append({"what": what, **fields}))
        self.desk = CommitDesk(self, valid_s)

    def ask(self, step: int, *, rank: int = 0, incarnation: int = 1, generation: int = 2) -> m.CommitAnswered | None:
        """The answer, if it came at once."""
        count = len(self.sent)
        self.desk.hear(LINK, m.CommitAsked(rank, incarnation, generation, step, count))
        return self.sent[-1][1] if len(self.sent) > count else None


def play(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 10))


def test_a_current_rank_is_answered_through_its_agent_and_it_is_written_down() -> None:
    job = Job()
    assert job.ask(100) == m.CommitAnswered(0, 1, 0, True, "", 5.0)
    assert job.sent[0][0] == "n1"
    assert job.notes == [{"what": "commit granted", "rank": 0, "incarnation": 1, "generation": 2, "step": 100}]


def test_refusals_say_why() -> None:
    job = Job()
    job.ask(100)
    job.machine.members.slots[1].state = "gone"
    for asked, reason in (
        ({"step": 99}, "step 99 is older than 100"),
        ({"step": 200, "generation": 1}, "generation 1 is superseded by 2"),
        ({"step": 200, "incarnation": 2}, "rank 0 has been replaced"),
        ({"step": 200, "rank": 1}, "rank 1 has been replaced"),
        ({"step": 200, "rank": 7}, "rank 7 has been replaced"),
    ):
        answer = job.ask(**asked)
        assert answer is not None and not answer.granted and reason in answer.reason
        assert job.notes[-1]["what"] == "commit refused" and reason in job.notes[-1]["reason"]


def test_when_all_steps_are_done_an_older_generation_may_write_the_last_checkpoint() -> None:
    job = Job()
    job.machine.members.finish(1)
    answer = job.ask(1000, generation=1)
    assert answer is not None and answer.granted


def test_a_replacement_is_answered_when_its_predecessors_permission_has_run_out() -> None:
    async def scene() -> None:
        job = Job(valid_s=0.2)
        loop = asyncio.get_running_loop()
        job.ask(100)
        began = loop.time()
        slot = job.machine.members.slots[0]
        slot.incarnation = 2
        assert job.ask(200, incarnation=2) is None
        while len(job.sent) < 2:
            await asyncio.sleep(0.005)
        assert job.sent[-1][1].granted and loop.time() - began > 0.15

    play(scene)


def test_a_recovery_that_begins_meanwhile_makes_it_a_no() -> None:
    async def scene() -> None:
        job = Job(valid_s=0.1)
        job.ask(100)
        job.machine.members.slots[0].incarnation = 2
        assert job.ask(200, incarnation=2) is None
        job.machine.generation = job.machine.training = 3
        while len(job.sent) < 2:
            await asyncio.sleep(0.005)
        assert not job.sent[-1][1].granted and "superseded" in job.sent[-1][1].reason

    play(scene)


def test_after_all_ranks_went_back_older_steps_may_be_committed_again() -> None:
    job = Job()
    assert job.ask(100).granted and not job.ask(60).granted
    job.machine.num_loads = 1
    assert job.ask(60).granted and not job.ask(50).granted
