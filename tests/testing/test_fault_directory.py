"""Records appear once, whole, and whoever waits for one has a limit."""

import json
import threading
import time

import pytest

from flashrec.testing import Armed, Fault, FaultDidNotFire, FaultDirectory, FaultPlan, FaultTimeout, Fired
from flashrec.testing.injector import BLOCKED_S, FaultRaised, Injector

ARMED = Armed("cut", "request", "forward", rank=1, node="n2", pid=7, step=3, mono=5.0, wall="w")
FIRED = Fired("kill", "SIGKILL", "backward", rank=1, node="n2", step=3, mono=6.0, wall="w")


@pytest.fixture
def directory(tmp_path):
    return FaultDirectory(tmp_path / "faults")


def plan_of(directory, *faults, timeout_s=0.05):
    return FaultPlan(str(directory.path), faults, timeout_s)


def test_driver_sees_the_armed_victim(directory):
    assert directory.record_armed(ARMED)
    assert directory.await_armed("cut", timeout_s=1) == ARMED


def test_driver_does_not_wait_for_ever(directory):
    with pytest.raises(FaultTimeout, match=r"no victim came to the place of fault 'cut' within 0.01 s"):
        directory.await_armed("cut", timeout_s=0.01)


def test_fired_is_recorded_with_the_time_of_the_deed(directory):
    directory.record_armed(ARMED)
    directory.mark_fired("cut", mono=9.5)
    assert directory.fired()["cut"].mono == 9.5
    (line,) = (directory.path / "faults.jsonl").read_text().splitlines()
    assert json.loads(line).items() >= {"id": "cut", "place": "forward", "rank": 1, "node": "n2", "mono": 9.5}.items()


def test_second_record_of_a_fault_is_refused(directory):
    assert directory.record_fired(FIRED)
    assert not directory.record_fired(FIRED)
    assert len((directory.path / "faults.jsonl").read_text().splitlines()) == 1
    assert directory.record_armed(ARMED)
    assert not directory.record_armed(ARMED)
    directory.mark_fired("cut", 1.0)
    with pytest.raises(FileExistsError, match="fired already"):
        directory.mark_fired("cut", 2.0)


def test_fault_that_did_not_fire_fails_the_test(directory):
    kill, other = (Fault(name, rank=1, step=3, place="backward", kind="SIGKILL") for name in ("kill", "other"))
    directory.record_fired(FIRED)
    directory.assert_all_fired(plan_of(directory, kill))
    with pytest.raises(FaultDidNotFire, match=r"did not fire: other \(SIGKILL of rank 1, backward\)"):
        directory.assert_all_fired(plan_of(directory, kill, other))


def test_lives_of_a_rank_are_counted(directory):
    assert [directory.begin_life(0), directory.begin_life(1), directory.begin_life(0)] == [0, 0, 1]


def test_fault_happens_only_at_its_rank_place_and_step(directory):
    plan = plan_of(directory, Fault("r", rank=0, step=3, place="forward", kind="raise"))
    injector = Injector(plan, rank=0)
    Injector(plan, rank=1).visit("forward", 3)
    injector.visit("forward", 2)
    injector.visit("backward", 3)
    assert directory.fired() == {}
    with pytest.raises(FaultRaised):
        injector.visit("forward", 3)


def test_redone_step_and_replacement_are_not_hit_again(directory):
    plan = plan_of(directory, Fault("r", rank=0, step=3, place="forward", kind="raise"))
    injector = Injector(plan, rank=0)
    with pytest.raises(FaultRaised):
        injector.visit("forward", 3)
    injector.visit("forward", 3)
    Injector(plan, rank=0).visit("forward", 3)


def test_fault_of_a_later_life_waits_for_it(directory):
    plan = plan_of(directory, Fault("r", rank=0, step=3, place="forward", kind="raise", life=1))
    Injector(plan, rank=0).visit("forward", 3)
    with pytest.raises(FaultRaised):
        Injector(plan, rank=0).visit("forward", 3)


def test_join_hits_replacements_only(directory):
    plan = plan_of(directory, Fault("j", rank=0, place="join", kind="raise"))
    Injector(plan, rank=0).visit("join", None)
    with pytest.raises(FaultRaised):
        Injector(plan, rank=0).visit("join", None)


def test_requesting_victim_does_not_wait_for_ever(directory):
    injector = Injector(plan_of(directory, Fault("cut", rank=0, step=1, place="forward", kind="request")), rank=0)
    with pytest.raises(FaultTimeout, match="rank 0 stands at forward and nobody performed fault 'cut'"):
        injector.visit("forward", 1)
    assert directory.await_armed("cut", 0.01).step == 1


def test_request_is_armed_once_even_if_it_was_never_performed(directory):
    plan = plan_of(directory, Fault("cut", rank=0, step=1, place="forward", kind="request"))
    with pytest.raises(FaultTimeout):
        Injector(plan, rank=0).visit("forward", 1)
    Injector(plan, rank=0).visit("forward", 1)


def test_holder_holds_only_the_step_of_the_fault_and_not_for_ever(directory):
    fault = Fault("kill", rank=1, step=3, place="in-collective", kind="SIGKILL", holder=0)
    injector = Injector(plan_of(directory, fault), rank=0)
    injector.hold(2)
    with pytest.raises(FaultTimeout, match="rank 0 holds step 3 back and fault 'kill' did not fire"):
        injector.hold(3)
    directory.record_fired(FIRED)
    injector.hold(3)


def test_fault_that_another_process_has_claimed_is_not_done(directory):
    fault = Fault("r", rank=0, step=3, place="forward", kind="raise")
    injector = Injector(plan_of(directory, fault), rank=0)
    assert injector.due("forward", 3) == [fault]
    directory.record_fired(Fired("r", "raise", "forward", rank=0, node="n1", step=3, mono=6.0, wall="w"))
    injector.perform(fault)  # it was due a moment ago, and then the other one was faster
    assert injector.due("forward", 3) == []


@pytest.mark.parametrize("pause_s", [0.0, 0.01])
def test_thread_counts_as_blocked_only_when_it_really_rests(directory, pause_s):
    """Computing, or sleeping for moments, is not being blocked in a collective."""
    fired_at, rests = [], threading.Event()

    class Watching(Injector):
        def perform(self, fault):
            fired_at.append(time.monotonic())
            rests.set()

    fault = Fault("c", rank=0, step=1, place="in-collective", kind="SIGKILL", holder=1)
    injector = Watching(plan_of(directory, fault), rank=0)
    injector.watch_collective(1)
    busy_until = time.monotonic() + 0.4
    while time.monotonic() < busy_until:
        time.sleep(pause_s) if pause_s else sum(range(1000))
    assert rests.wait(10)
    assert fired_at[0] >= busy_until + BLOCKED_S / 2


def test_nothing_is_watched_in_other_steps(directory):
    fault = Fault("c", rank=0, step=1, place="in-collective", kind="SIGKILL", holder=1)
    before = threading.active_count()
    Injector(plan_of(directory, fault), rank=0).watch_collective(2)
    assert threading.active_count() == before


@pytest.mark.parametrize(("kind", "goes_on"), [("hang", True), ("gil", False)])
def test_who_stands_still_lets_other_threads_go_on_or_not(directory, kind, goes_on):
    fault, beats, over = Fault("h", rank=0, step=1, place="forward", kind=kind), [], threading.Event()

    def beat():
        while not over.wait(0.005):
            beats.append(time.monotonic())

    plan = FaultPlan(str(directory.path), (fault,), timeout_s=0.4)
    thread = threading.Thread(target=beat)
    thread.start()
    began = time.monotonic()
    with pytest.raises(FaultTimeout, match=r"stands still at forward .* nobody ended it within 0\.4 s"):
        Injector(plan, rank=0).visit("forward", 1)
    ended = time.monotonic()
    over.set()
    thread.join()
    assert ended - began >= 0.39
    assert directory.has_fired("h")
    during = [beat for beat in beats if began + 0.1 < beat < began + 0.35]
    assert bool(during) == goes_on
