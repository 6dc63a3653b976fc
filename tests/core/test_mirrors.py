"""Mirrors in the decision: who holds whose, what is restored from where, and when everybody goes one step back.

The model below plays the protocol of docs/concepts/mirrors.md, with any interleaving of the ranks, and loses nodes at
any moment: what the decision says then has to be there, and the loss of one node must never be the end.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrec.core.commit import Impossible, decide
from flashrec.core.mirrors import assign_holders, holders
from flashrec.core.types import Plan, Report

# ---- placement


@pytest.mark.parametrize(
    ("nodes", "switches", "expected"),
    [
        ("ab", "", {0: 1, 1: 0}),
        ("aabb", "", {0: 2, 1: 3, 2: 0, 3: 1}),
        ("abab", "", {0: 1, 1: 0, 2: 3, 3: 2}),
        ("aaab", "", {0: 3, 1: 3, 2: 3, 3: 0}),
        ("abbb", "", {0: 1, 1: 0, 2: 0, 3: 0}),
        ("abcd", "", {0: 1, 1: 2, 2: 3, 3: 0}),
        ("abcd", "xxyy", {0: 2, 1: 3, 2: 0, 3: 1}),
        ("abcd", "xyxy", {0: 1, 1: 2, 2: 3, 3: 0}),
        ("abc", "xxy", {0: 1, 1: 2, 2: 0}),
        ("abcd", "xxxx", {0: 1, 1: 2, 2: 3, 3: 0}),
        ("aa", "", {}),
    ],
)
def test_the_holder_is_on_another_node_and_at_another_switch_if_there_is_one(
    nodes: str, switches: str, expected: dict[int, int]
) -> None:
    assert holders(nodes, switches) == expected


@given(st.lists(st.sampled_from("abcde"), min_size=2, max_size=12))
def test_no_holder_shares_the_node_of_its_rank_and_the_work_is_spread(nodes: list[str]) -> None:
    found = holders(nodes)
    assert set(found) == (set(range(len(nodes))) if len(set(nodes)) > 1 else set())
    assert all(nodes[rank] != nodes[holder] for rank, holder in found.items())
    for node in set(nodes):
        loads = [list(found.values()).count(rank) for rank, at in enumerate(nodes) if at == node]
        assert max(loads) - min(loads) <= 1


# ---- the decision

LOST = Report(-1, -1, -1, False, (1,))


def said(v: int, voted: int, passed: int, *, valid: bool = True, keeps: tuple[int, ...] = (), rank: int = 0, **holds):
    return Report(v, voted, passed, valid, (rank,), keeps, {int(r[1:]): steps for r, steps in holds.items()})


TABLE = [
    # what                                     rank 0 and 2 (1 is lost)    resume, forward, sources, mirrored, goes back
    (
        "nobody passed, mirrored",
        [said(7, 6, 6, keeps=(6, 7), r1=(6, 7)), said(7, 7, 6, keeps=(6, 7), rank=2)],
        (7, (), {1: 0}, (1,), ()),
    ),
    (
        "somebody passed: the mirror of the step after",
        [said(8, 7, 7, keeps=(7, 8), r1=(7, 8)), said(7, 7, 6, keeps=(6, 7), rank=2)],
        (8, (2,), {1: 0}, (1,), ()),
    ),
    (
        "the mirror is one step behind",
        [said(8, 7, 7, keeps=(7,), r1=(7,)), said(7, 7, 6, keeps=(6, 7), rank=2)],
        (7, (), {1: 0}, (1,), (0,)),
    ),
    (
        "the step is open, but was not mirrored",
        [said(8, 7, 7, keeps=(7, 8), r1=(7,)), said(8, 7, 7, keeps=(7, 8), rank=2)],
        (7, (), {1: 0}, (1,), (0, 2)),
    ),
    (
        "a torn rank takes its own copy",
        [said(7, 7, 6, keeps=(6, 7), r1=(7,)), said(7, 7, 6, valid=False, keeps=(6, 7), rank=2)],
        (7, (), {1: 0}, (1,), (2,)),
    ),
    (
        "a torn rank, and the others have done the step",
        [said(8, 7, 7, keeps=(7,), r1=(7,)), said(7, 7, 7, valid=False, keeps=(6, 7), rank=2)],
        (7, (), {1: 0}, (1,), (0, 2)),
    ),
]


@pytest.mark.parametrize(("reports", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_table(reports: list[Report], expected: tuple) -> None:
    plan = decide(2, {0: reports[0], 1: LOST, 2: reports[1]})
    assert isinstance(plan, Plan)
    assert (plan.resume_step, plan.roll_forward, plan.sources, plan.mirrored, plan.goes_back) == expected
    assert ("go back" in plan.reason) == (plan.resume_step < max(report.v for report in reports if report.valid))


@pytest.mark.parametrize(
    "reports",
    [
        [said(8, 7, 7, keeps=(7, 8), r1=(6,)), said(8, 7, 7, keeps=(7, 8), rank=2)],  # two steps behind
        [said(8, 7, 7, keeps=(7, 8), r1=(7,)), said(8, 7, 7, keeps=(8,), rank=2)],  # a survivor cannot go back
        [said(8, 7, 7, keeps=(7, 8)), said(8, 7, 7, keeps=(7, 8), rank=2)],  # the holder is lost, too
        [said(8, 7, 7, keeps=(7, 8)), said(8, 7, 7, valid=False, rank=2, r1=(7, 8))],  # a target does not send
    ],
)
def test_what_is_not_there_is_not_guessed(reports: list[Report]) -> None:
    verdict = decide(2, {0: reports[0], 1: LOST, 2: reports[1]})
    assert isinstance(verdict, Impossible) and 1 in verdict.ranks
    assert "no mirror of that step" in verdict.reason


def test_targets_that_several_hold_are_spread_over_them() -> None:
    """As after a recovery that has moved a holder: the former one still has the mirror, too."""
    holding = Report(5, 4, 4, True, (0,), (4, 5), {1: (5,), 2: (5,), 3: (5,)})
    found, without = assign_holders([1, 2, 3, 4], 5, [0, 6, 7], {0: holding, 6: holding, 7: holding})
    assert found == {1: 0, 2: 6, 3: 7} and without == (4,)


def test_a_replica_comes_before_a_mirror() -> None:
    both = (0, 1)
    plan = decide(
        2, {0: Report(7, 6, 6, True, both, (7,)), 1: Report(-1, -1, -1, False, both), 2: said(7, 6, 6, r1=(7,))}
    )
    assert isinstance(plan, Plan) and plan.sources == {1: 0} and not plan.mirrored


def test_without_mirrors_nothing_goes_back() -> None:
    """One that has no gradients is a target, as ever, though it is at the step before."""
    reports = {0: Report(8, 7, 7, True, (0, 1)), 1: Report(7, 6, 6, True, (0, 1)), 2: LOST}
    assert isinstance(decide(2, reports), Impossible)
    del reports[2]
    plan = decide(2, reports)
    assert isinstance(plan, Plan) and (plan.resume_step, plan.sources, plan.goes_back) == (8, {1: 0}, ())


# ---- the protocol, in any order

RANKS_PER_NODE, NODES = 2, 3
WORLD = RANKS_PER_NODE * NODES
NODE_OF = [f"n{rank // RANKS_PER_NODE}" for rank in range(WORLD)]
HOLDER = holders(NODE_OF)
MIRRORED = range(WORLD)


@dataclass
class Rank:
    """v, voted, passed as in a report; kept, held: complete copies; acked: the newest step that its holder has."""

    rank: int
    v: int = 0
    voted: int = -1
    passed: int = -1
    stage: str = "idle"  # idle, open, copied, voted, updating
    kept: list[int] = field(default_factory=list)
    held: dict[int, list[int]] = field(default_factory=dict)
    acked: int = -1
    torn: bool = False

    def report(self) -> Report:
        held = {rank: tuple(steps) for rank, steps in self.held.items()}
        return Report(self.v, self.voted, self.passed, not self.torn, (self.rank,), tuple(self.kept), held)


class Job:
    """Steps of the protocol, one rank at a time. What is in a copy is the step of which it is."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.ranks = {rank: Rank(rank) for rank in range(WORLD)}
        self.committed = 0

    def go_on(self, times: int) -> None:
        for _ in range(times):
            rank = self.ranks[self.chance.randrange(WORLD)]
            getattr(self, rank.stage)(rank)

    def idle(self, rank: Rank) -> None:
        rank.stage = "open"
        rank.kept = [v for v in rank.kept if v != rank.v][-1:]  # the older slot is written over

    def open(self, rank: Rank) -> None:
        rank.kept.append(rank.v)
        rank.stage = "copied"
        at_holder = self.ranks[HOLDER[rank.rank]].held.setdefault(rank.rank, [])
        del at_holder[:-1]  # the incoming slot

    def copied(self, rank: Rank) -> None:
        if rank.acked < rank.v and self.chance.random() < 0.5:
            self.ranks[HOLDER[rank.rank]].held[rank.rank].append(rank.v)
            rank.acked = rank.v
        elif rank.acked == rank.v:
            rank.voted, rank.stage = rank.v, "voted"

    def voted(self, rank: Rank) -> None:
        if all(other.voted >= rank.v for other in self.ranks.values()):
            rank.passed, rank.stage = rank.v, "updating"

    def updating(self, rank: Rank) -> None:
        rank.v, rank.stage = rank.v + 1, "idle"
        self.committed = max(self.committed, rank.v)

    def lose(self, lost: set[int]) -> tuple[Plan | Impossible, dict[int, Report]]:
        """Fence: an update is finished by its rank, or is torn."""
        for rank in self.ranks.values():
            if rank.rank not in lost and rank.stage == "updating":
                if self.chance.random() < 0.2:
                    rank.torn = True
                else:
                    self.updating(rank)
        reports = {
            rank: Report(-1, -1, -1, False, (rank,)) if rank in lost else self.ranks[rank].report()
            for rank in range(WORLD)
        }
        return decide(2, reports), reports

    def carry_out(self, plan: Plan, lost: set[int]) -> None:
        step = plan.resume_step
        for rank in lost:
            self.ranks[rank] = Rank(rank)
        for rank in self.ranks.values():
            rank.v, rank.voted, rank.passed, rank.stage, rank.torn, rank.acked = (
                step,
                step - 1,
                step - 1,
                "idle",
                False,
                -1,
            )
            rank.kept = [v for v in rank.kept if v <= step]
            rank.held = {other: [v for v in steps if v <= step] for other, steps in rank.held.items()}


def check(plan: Plan, reports: dict[int, Report], committed: int) -> None:
    """Everybody has, or gets, the state at the start of the resume step, from somebody who has it."""
    step = plan.resume_step
    assert step >= committed - 2, "more than the open step and one other are lost"
    for rank, report in reports.items():
        if rank in plan.sources:
            source = reports[plan.sources[rank]]
            assert rank in plan.mirrored and step in source.holds[rank] and plan.sources[rank] not in plan.sources
        elif rank in plan.goes_back:
            assert step in report.keeps
        else:
            assert report.valid and (report.v == step or (rank in plan.roll_forward and report.v == step - 1))
            assert report.v in (step, report.voted)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), times=st.integers(0, 250), node=st.integers(0, NODES - 1))
def test_the_loss_of_any_node_at_any_moment_costs_one_more_step_at_most(seed: int, times: int, node: int) -> None:
    job = Job(random.Random(seed))
    for rank in job.ranks.values():  # the first step begins when its state is mirrored everywhere
        rank.kept, rank.acked, rank.stage = [0], 0, "copied"
        job.ranks[HOLDER[rank.rank]].held[rank.rank] = [0]
    for number in range(3):
        job.go_on(times)
        lost = {rank for rank in range(WORLD) if NODE_OF[rank] == f"n{(node + number) % NODES}"}
        verdict, reports = job.lose(lost)
        assert isinstance(verdict, Plan), verdict
        check(verdict, reports, job.committed)
        job.carry_out(verdict, lost)
        job.committed = verdict.resume_step
        job.go_on(40)  # may be too few for all to be mirrored again …
        while any(rank.acked < 0 for rank in job.ranks.values()):  # … which the next loss has to wait for
            job.go_on(10)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32), times=st.integers(0, 250), lost=st.sets(st.integers(0, WORLD - 1), max_size=WORLD - 1)
)
def test_whatever_is_lost_nothing_is_restored_from_what_is_not_there(seed: int, times: int, lost: set[int]) -> None:
    job = Job(random.Random(seed))
    for _ in range(2):
        job.go_on(times)
        verdict, reports = job.lose(lost)
        if isinstance(verdict, Impossible):
            return
        check(verdict, reports, job.committed)
        job.carry_out(verdict, lost)
        job.committed = verdict.resume_step
