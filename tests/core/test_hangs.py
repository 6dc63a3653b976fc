"""Hangs: who is found, when, and above all who is not (`tests.core.training` simulates)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import msgspec
import pytest

from flashrec.core.hangs import HangDetector, Hung, Stalled
from flashrec.core.limits import HangLimits
from flashrec.core.stragglers import Stragglers
from flashrec.wire.messages import WorkerBeat
from tests.core.training import Pause, Training

LIMITS = HangLimits()
LONG_S = 1000.0


def found_in(training: Training, seconds: float = LONG_S) -> tuple[float, Hung]:
    """The first finding, and how long after the pause of its rank began."""
    (at, finding), *_ = training.run(seconds, until="found")
    assert isinstance(finding, Hung)
    return at - training.began_at[finding.rank, training.pauses[-1].step], finding


def found_by_hand(quarters: int, tags_at: Callable[[float], list[WorkerBeat]]) -> list[tuple[float, Hung | Stalled]]:
    """Findings, with their time, when every quarter of a second the tags of all ranks are what `tags_at(now)` says."""
    detector, found = HangDetector(HangLimits(first_step_s=5.0)), []
    detector.resumed(0.0)
    for now in (quarter / 4 for quarter in range(quarters)):
        detector.heard(tags_at(now), now)
        found += [(now, finding) for finding in detector.tick(now)]
    return found


@pytest.mark.parametrize("step_s", [0.1, 1.0, 5.0, 30.0])
@pytest.mark.parametrize("where", ["step", "vote"])
def test_a_hang_is_found_within_its_aim(step_s: float, where: str) -> None:
    after_s, hung = found_in(Training(step_s=step_s, pauses=[Pause(2, 8, where=where)]))
    assert (hung.rank, hung.incarnation) == (2, 1)
    assert after_s <= max(LIMITS.floor_s, LIMITS.factor * (step_s + 0.3)) + 0.5
    assert "hangs in step 8" in hung.reason and "3 others wait in collective" in hung.reason


@pytest.mark.parametrize("world", [2, 5])
def test_everybody_but_the_hung_one_is_spared(world: int) -> None:
    found = Training(world=world, pauses=[Pause(0, 10)]).run(100)
    assert [(finding.rank, finding.incarnation) for _, finding in found] == [(0, 1)], "and it is said once"


def test_ranks_of_a_larger_world_are_not_waited_for() -> None:
    """Else nobody would be judged any more after the world has shrunk."""
    training = Training(world=4, pauses=[])
    training.run(10)
    training.ranks = training.ranks[:3]
    training.detector.resumed(training.now, 3)
    training.pauses.append(Pause(1, 14))
    _, hung = found_in(training)
    assert hung.rank == 1


@pytest.mark.parametrize(
    ("state", "said"), [("S", "interpreter's lock"), ("R", "running"), ("D", "driver"), ("T", "stopped")]
)
def test_a_worker_that_says_nothing_is_found_too(state: str, said: str) -> None:
    """The lock of the interpreter is held, or the process is stopped: no heartbeat leaves it."""
    after_s, hung = found_in(Training(pauses=[Pause(1, 10, silent=state)]))
    assert hung.rank == 1 and "says nothing" in hung.reason and said in hung.reason
    assert after_s <= LIMITS.floor_s + 1.0


def test_a_silent_worker_is_found_in_fast_steps_although_its_last_tag_is_old() -> None:
    after_s, hung = found_in(Training(step_s=0.05, pauses=[Pause(1, 50, silent="S")]))
    assert hung.rank == 1 and after_s <= LIMITS.floor_s + 0.75


def test_two_that_hang_together_are_found_together() -> None:
    found = Training(pauses=[Pause(1, 10), Pause(3, 10)]).run(60)
    assert {finding.rank for _, finding in found} == {1, 3}
    assert found[-1][0] - found[0][0] <= 0.5


def test_where_waiting_cannot_be_seen_the_count_of_collectives_tells() -> None:
    """NCCL: a rank waits in its driver, which nobody sees from outside."""
    _, hung = found_in(Training(sees_waiting=False, pauses=[Pause(2, 10)]))
    assert hung.rank == 2


def test_who_waits_in_one_group_is_not_blamed_by_another() -> None:
    """Rank 2 waits for rank 1 in group b, and so has not come to the collective of group a in which rank 0 waits."""

    def tags_at(now: float) -> list[WorkerBeat]:
        said = ((0, True, (5, 3)), (1, False, (4, 2)), (2, True, (4, 3)))
        return [
            WorkerBeat(rank, 1, 7, 6, 6, "step", "", waiting, dict(zip("ab", issued, strict=True)), still_s=now)
            for rank, waiting, issued in said
        ]

    assert [finding.rank for _, finding in found_by_hand(40, tags_at)] == [1]


def test_who_has_waited_for_an_earlier_collective_is_found_when_that_has_come() -> None:
    """In backward: the first bucket still waits for a slow peer when this rank begins to hang before the second."""

    def tags_at(now: float) -> list[WorkerBeat]:
        have_come = now >= 1.0
        late = [
            WorkerBeat(
                rank, 1, 7, 6, 6, "step", "", have_come, {"0": 5 if have_come else 3}, still_s=max(0.0, now - 1.0)
            )
            for rank in (1, 2)
        ]
        return [WorkerBeat(0, 1, 7, 6, 6, "step", "", not have_come, {"0": 4}, still_s=now), *late]

    found = found_by_hand(60, tags_at)
    assert [finding.rank for _, finding in found] == [0]
    assert found[0][0] >= 0.75 + 5.0, "the time in which it was seen waiting does not count"


def test_who_has_come_to_the_collective_is_not_blamed_for_not_waiting_in_it() -> None:
    """The root of a broadcast has sent and gone on; its message was lost, so the others wait."""

    def tags_at(now: float) -> list[WorkerBeat]:
        return [WorkerBeat(rank, 1, 7, 6, 6, "step", "", rank != 1, {"0": 5}, still_s=now) for rank in range(3)]

    assert [type(finding) for _, finding in found_by_hand(280, tags_at)] == [Stalled]


# ---- what is no hang ----------------------------------------------------------------------------------------------


def test_as_long_as_nobody_waits_nobody_is_waited_for() -> None:
    """All compute for long without a collective, and one of them with the interpreter's lock held."""
    detector, found = HangDetector(HangLimits(first_step_s=5.0)), []
    detector.resumed(0.0)
    for quarter in range(120):
        now = quarter / 4
        for rank, silent_s in ((0, 0.0), (1, now), (2, 0.0)):
            tag = WorkerBeat(rank, 1, 7, 6, 6, "step", "", False, {"0": 4}, still_s=now, silent_s=silent_s, process="R")
            detector.heard([tag], now)
        found += detector.tick(now)
    assert found == []


def test_as_long_as_the_others_move_nobody_is_waited_for() -> None:
    """Two ranks have something to do together before they need the third."""
    detector, found = HangDetector(HangLimits(first_step_s=5.0)), []
    detector.resumed(0.0)
    for quarter in range(120):
        now = quarter / 4
        tags = [WorkerBeat(rank, 1, 7, 6, 6, "step", "", True, {"0": 5, "1": quarter}) for rank in (0, 2)]
        detector.heard([*tags, WorkerBeat(1, 1, 7, 6, 6, "step", "", False, {"0": 4}, still_s=now)], now)
        found += detector.tick(now)
    assert found == []


def test_ordinary_training_has_no_hang() -> None:
    for step_s in (0.1, 1.0, 7.0):
        assert Training(step_s=step_s, between_s=0.3).run(150 if step_s > 0.1 else 30) == []


def test_where_steps_are_long_a_pause_may_be_longer() -> None:
    """Also between two collectives that follow each other at once: a page fault storm, a slow log."""
    assert Training(step_s=5.0, pauses=[Pause(2, 8, 10.0, where="vote")]).run(100) == []


def test_a_slow_first_step_is_no_hang() -> None:
    """One rank compiles its model while the others wait."""
    assert Training(step_s=0.5, pauses=[Pause(1, 0, 200.0), Pause(2, 1, 100.0)]).run(400) == []


def test_a_first_step_that_never_ends_is_a_hang() -> None:
    after_s, _ = found_in(Training(pauses=[Pause(1, 0)]))
    assert LIMITS.first_step_s <= after_s <= LIMITS.first_step_s + 5


def test_the_first_steps_of_a_replacement_take_as_long_as_first_steps_took() -> None:
    training = Training(step_s=0.5, pauses=[Pause(rank, 0, 20.0) for rank in range(4)])
    assert training.run(60) == []
    victim = training.ranks[1]
    victim.incarnation, victim.told = 2, None
    training.detector.resumed(training.now)
    training.pauses = [Pause(1, victim.v + 1, 30.0)]
    assert training.run(60) == []
    assert training.began_at[1, training.pauses[0].step], "it took place"


def test_a_replacement_on_a_busy_node_has_time_for_its_first_steps() -> None:
    training = Training(step_s=0.1, pauses=[])
    assert training.run(10) == []
    victim = training.ranks[1]
    victim.incarnation, victim.told = 2, None
    training.detector.resumed(training.now)
    training.pauses = [Pause(1, victim.v + 1, 15.0)]
    assert training.run(20) == []
    assert training.began_at, "it took place"
    training.pauses = [Pause(1, victim.v + 20)]
    after_s, hung = found_in(training)
    assert (hung.rank, hung.incarnation) == (1, 2) and after_s < 4.0, "later steps have less"


def test_a_step_that_is_as_slow_for_all_is_no_hang() -> None:
    """An evaluation inside of the block, without a word, on all ranks: some are done some seconds sooner."""
    pauses = [Pause(rank, 20, 60.0 + 5 * rank) for rank in range(4)]
    assert Training(pauses=pauses).run(200) == []


def test_steps_may_grow() -> None:
    """Longer and longer sequences: each step is measured by what its peers needed."""
    pauses = [Pause(rank, step, 1.4**step + 0.1 * rank) for step in range(14) for rank in range(4)]
    assert Training(step_s=0.1, pauses=pauses).run(500) == []


@pytest.mark.parametrize("silent", ["", "S"])
def test_a_checkpoint_between_steps_has_time(silent: str) -> None:
    """One rank writes, the others wait in the next step's collective."""
    pause = Pause(0, 20, LIMITS.between_s - 5, where="idle", silent=silent)
    training = Training(pauses=[pause])
    assert training.run(600) == []
    assert training.ranks[0].v > 21


def test_one_that_stands_between_steps_for_ever_is_a_hang() -> None:
    after_s, hung = found_in(Training(pauses=[Pause(0, 20, where="idle")]))
    assert LIMITS.between_s <= after_s <= LIMITS.between_s + 2
    assert "between steps" in hung.reason


@pytest.mark.parametrize("silent", ["", "S"])
@pytest.mark.parametrize("where", ["step", "idle"])
def test_quiet_is_no_hang(where: str, silent: str) -> None:
    training = Training(pauses=[Pause(0, 20, 900.0, where=where, quiet="checkpoint", silent=silent)])
    training.run(100)
    assert training.detector.note_of(0) == "quiet: checkpoint"
    assert training.run(900) == []
    assert training.detector.note_of(0) == ""


def test_quiet_of_one_does_not_hide_the_hang_of_another() -> None:
    pauses = [Pause(0, 20, 900.0, where="idle", quiet="checkpoint"), Pause(2, 20)]
    _, hung = found_in(Training(pauses=pauses))
    assert hung.rank == 2


@pytest.mark.parametrize(("bound_s", "found"), [(50.0, True), (0.0, False)])
def test_quiet_has_a_bound_that_can_be_taken_off(bound_s: float, found: bool) -> None:
    limits = HangLimits(quiet_max_s=bound_s)
    training = Training(limits=limits, pauses=[Pause(0, 20, where="idle", quiet="eval")])
    assert bool(training.run(500)) == found


def test_in_a_world_of_one_nobody_waits() -> None:
    assert Training(world=1, pauses=[Pause(0, 10)]).run(LONG_S) == []


def test_a_straggler_is_no_hang() -> None:
    assert Training(paces={3: 2.5}).run(300) == []


def test_who_is_only_slow_gets_through_in_the_end() -> None:
    """A rank that needs long for one step in every life: found hung, replaced, and given more time."""
    training = Training(pauses=[Pause(1, 10, 40.0)])
    waited = []
    for life in range(2, 6):
        found = training.run(60, until="found")
        if not found:
            break
        waited.append(found[0][0] - training.began_at[1, 10])
        rank = training.ranks[1]
        rank.incarnation, rank.told, rank.pause, rank.busy_until = life, None, training.pauses[0], training.now + 40.0
        training.began_at[1, 10] = training.now
        training.detector.resumed(training.now)
    assert training.ranks[1].v > 11, waited
    assert len(waited) >= 1 and all(b > 2 * a for a, b in itertools.pairwise(waited))


# ---- doubts about ourselves ---------------------------------------------------------------------------------------


def test_a_worker_whose_agent_is_not_heard_is_not_judged() -> None:
    training = Training(pauses=[Pause(2, 10)])
    training.run(10.2)
    training.deaf = {2}
    assert training.run(100) == []


def test_when_most_say_nothing_nobody_is_blamed() -> None:
    pauses = [Pause(rank, 10, silent="S") for rank in (0, 1, 2)]
    assert Training(pauses=pauses).run(200) == []


def test_a_manager_that_slept_blames_nobody() -> None:
    """Heartbeats of half a minute are read in one go: each says, on its agent's clock, how long its worker stood."""
    training = Training(step_s=0.3)
    training.run(30)
    training.now += 30  # nobody was heard, nothing was judged; training went on all the while
    for rank in training.ranks:
        rank.changed_at, rank.heard_at = training.now, training.now
        training._next_beat = training._next_tick = training.now
    training.ranks[2].issued -= 1  # its newest tag is still in the queue
    training.ranks[2].waits, training.ranks[2].where, training.ranks[2].busy_until = False, "step", training.now + 0.1
    assert training.run(60) == []


def test_a_new_generation_starts_all_clocks_anew() -> None:
    """A recovery took long, and no tag has changed in it."""
    detector, found = HangDetector(HangLimits(first_step_s=5.0)), []
    for quarter in range(400, 440):
        now = quarter / 4
        if quarter == 400:
            detector.resumed(now)
        for rank in range(3):
            tag = WorkerBeat(rank, 1, 7, 6, 6, "step", "", rank != 1, {"0": 4 if rank == 1 else 5}, still_s=now)
            detector.heard([tag], now)
        found += [(now, finding.rank) for finding in detector.tick(now)]
    ((at, rank),) = found
    assert rank == 1 and 5.0 <= at - 100.0 <= 6.0


def test_a_former_life_has_no_voice() -> None:
    detector = HangDetector(LIMITS)
    detector.heard([WorkerBeat(1, 2, 7, 6, 6, "idle", "checkpoint"), WorkerBeat(1, 1, 7, 6, 6, "step")], 5.0)
    assert detector.note_of(1) == "quiet: checkpoint"


def test_one_that_moves_again_was_not_hung() -> None:
    training = Training(pauses=[Pause(2, 10, 3.6)])
    found = training.run(60, until="found")
    assert found and training.detector.is_hung(2, 1)
    assert not training.detector.is_hung(2, 2) and not training.detector.is_hung(1, 1)
    training.run(5)
    assert not training.detector.is_hung(2, 1)


# ---- nobody to blame ----------------------------------------------------------------------------------------------


def test_all_wait_in_one_collective() -> None:
    training = Training(lost_collective=31)
    ((at, finding),) = training.run(300)
    assert isinstance(finding, Stalled)
    assert "all ranks wait in collective 31 of group 0" in finding.reason
    assert LIMITS.all_wait_s <= at - training.ranks[0].changed_at <= LIMITS.all_wait_s + 1


def test_where_waiting_cannot_be_seen_all_may_as_well_compute() -> None:
    assert Training(sees_waiting=False, lost_collective=31).run(300) == []


def test_an_evaluation_of_all_ranks_is_not_a_stall() -> None:
    pauses = [Pause(rank, 20, 500.0, where=where) for rank, where in enumerate(("idle",) * 4)]
    assert Training(pauses=pauses).run(700) == []


def test_the_recent_step_is_a_high_percentile() -> None:
    training = Training(step_s=1.0, pauses=[Pause(rank, 30, 10.0) for rank in range(4)])
    training.run(4.5)
    assert training.detector.step_s() is None or training.detector.step_s() < 2
    training.run(120)
    assert 1.0 <= training.detector.step_s() <= 1.6, "one slow step does not count"


def test_steps_with_a_quiet_rank_are_no_measure() -> None:
    pauses = [Pause(0, step, 20.0, where="idle", quiet="checkpoint") for step in range(5, 100, 3)]
    training = Training(step_s=1.0, pauses=pauses)
    training.run(200)
    assert len(training.began_at) > 5 and training.detector.step_s() <= 1.6


def test_where_one_is_quiet_all_may_wait() -> None:
    """A long collective of an evaluation."""

    def tags_at(now: float) -> list[WorkerBeat]:
        quiet = {1: "eval"}
        return [WorkerBeat(n, 1, 7, 6, 6, "step", quiet.get(n, ""), True, {"0": 5}, still_s=now) for n in range(3)]

    assert found_by_hand(800, tags_at) == []


@pytest.mark.parametrize("key", ["floor_s", "factor", "between_s", "quiet_max_s", "straggler_factor"])
def test_limits_are_finite_and_not_negative(key: str) -> None:
    for value in (-1, math.inf, math.nan):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({key: value}, HangLimits)


def test_nothing_is_known_of_a_rank_that_was_never_heard() -> None:
    detector = HangDetector(LIMITS)
    assert detector.tick(5.0) == [] and detector.note_of(3) == "" and not detector.is_hung(3, 1)


@pytest.mark.parametrize(("tags_late_s", "is_found"), [(0.0, True), (0.75, False)])
def test_a_tag_may_be_old_where_tags_come_rarely(tags_late_s: float, is_found: bool) -> None:
    """Tags come once a second. Rank 1 needs just less than its patience for a step: it has gone on when it seems to
    stand still. The first case shows that the second one would find it without that allowance."""
    detector, found = HangDetector(HangLimits(first_step_s=2.25), tags_late_s), []
    detector.resumed(0.0)
    for now in (quarter / 4 for quarter in range(40)):
        if now % 1.0 == 0.0:
            still_s = now % 2.2  # rank 1 moves at 2.2, 4.4, 6.6; its peer waits for it
            steps = int(now / 2.2)
            detector.heard(
                [
                    WorkerBeat(0, 1, steps, steps, steps, "step", "", True, {"0": 2 * steps + 1}, still_s=still_s),
                    WorkerBeat(1, 1, steps, steps, steps, "step", "", False, {"0": 2 * steps}, still_s=still_s),
                ],
                now,
            )
        found += detector.tick(now)
    assert bool(found) is is_found


def test_stragglers_are_told_from_as_many_heartbeats_when_fewer_are_seen() -> None:
    watch = Stragglers(LIMITS, tags_every=4)
    assert watch.tick(0.0) == []
    for now in range(1, int(4 * LIMITS.straggler_after_s)):
        for rank in range(3):
            watch.seen(rank, 1, waiting=rank > 0 and now % 2 == 0)
        assert watch.tick(float(now)) == [] and watch._ranks[0].num_seen == now, "the window is still open"
