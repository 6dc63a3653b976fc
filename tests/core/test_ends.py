"""Ends and waits of the machine: ranks that leave early or late, nodes lost after their work is done, bounded waits."""

from __future__ import annotations

import pytest

from flashrec.core.types import Phase
from tests.core.driver import Driver


def start(*, nodes: str = "n1 n2 n3 n0", active: int = 2, per_node: int = 1, agents: str = "") -> Driver:
    driver = Driver()
    driver.do(f"job {nodes} active={active} per_node={per_node}")
    driver.do(f"agent {agents or nodes}")
    return driver


def train(driver: Driver) -> Driver:
    driver.do("started all")
    driver.do("joined all")
    driver.do("restored all v=0")
    assert driver.machine.phase is Phase.RUNNING
    return driver


def finish_all(driver: Driver) -> None:
    driver.do("finished all v=10")


def test_a_node_lost_after_its_rank_has_left_in_good_order_takes_nothing_with_it() -> None:
    driver = train(start())
    finish_all(driver)
    driver.do("exit 0 farewell=finished")
    assert driver.do("condemn n1") == ["-"], "rank 0 had done everything and was gone"
    assert driver.do("exit 1 farewell=finished")[-1] == "stop 0: all ranks have finished"


def test_a_finish_heard_during_a_recovery_ends_the_recovery() -> None:
    """Rank 0 dies after the final vote; that rank 1 has passed it is heard only after the fence."""
    driver = train(start())
    driver.do("exit 0")
    assert driver.machine.phase is Phase.FENCING
    said = driver.do("finished 1 v=10")
    assert "kill on n1: 0.2 (all steps are done: nobody is restored any more)" in said
    assert "complete g2" in said
    assert driver.machine.next_deadline() is None
    assert driver.do("report 1 v=10") == ["-"], "an answer to the fence moves nothing any more"
    assert driver.machine.next_deadline() is None
    assert driver.do("exit 1 farewell=finished")[-1].startswith("stop 75: all steps were done, but rank 0 ended")


def test_whoever_leaves_during_a_recovery_without_having_finished_ends_the_job() -> None:
    """It would be waited for until a deadline that finds nobody to blame."""
    driver = train(start(active=3))
    driver.do("exit 0")
    driver.do("report 1 2 v=5")
    assert driver.machine.phase is Phase.PLACING
    said = driver.do("exit 1 farewell=orderly")
    assert said[-1].startswith("stop 1: rank 1 left its script before the last step, during a recovery")


def test_an_exception_after_the_last_step_is_not_success() -> None:
    driver = train(start())
    driver.do("exit 0")
    driver.do("report 1 v=5")
    driver.do("started 0")
    driver.do("joined 0")
    driver.do("report 0 invalid")
    driver.do("formed all")
    driver.do("restored all v=5")
    finish_all(driver)
    driver.do("raised 0 step=10 what=DiskFull")
    driver.do("exit 0 farewell=raised")
    assert driver.do("exit 1 farewell=finished")[-1].startswith("stop 1: rank 0 raised an exception after the last")
    assert "DiskFull" in driver.machine.stop_reason


def test_a_script_without_init_may_run_for_ever() -> None:
    driver = start()
    driver.do("started all")
    assert driver.do("wait 700") == ["-"]
    assert driver.machine.next_deadline() is None
    assert driver.do("wait 100000") == ["-"]
    driver.do("joined 0")  # a very slow start: from now on the ordinary limit counts
    assert driver.machine.next_deadline() == driver.now + driver.machine.limits.launch_timeout_s


def test_a_rank_that_never_starts_is_launched_anew() -> None:
    driver = start()
    driver.do("started 0")
    assert any(line.startswith("launch ") for line in driver.do("wait 700"))


def test_nodes_that_come_and_go_do_not_extend_the_wait_for_a_spare() -> None:
    driver = train(start(nodes="n1 n2 n3", active=3))
    driver.do("condemn n1")
    driver.do("condemn n2")
    driver.do("report 2 v=5")
    first = driver.machine.next_deadline()
    for _ in range(3):
        driver.now += 8
        driver.do("agent n1")
        assert driver.machine.next_deadline() == first
        driver.do("condemn n1")
    driver.now = first
    driver.do("wait 0")
    assert driver.machine.phase is Phase.STOPPED
    assert "no spare is left" in driver.machine.stop_reason


def test_a_new_start_takes_any_room_at_once() -> None:
    """Once all were launched, a spare that joins is as good as the lost active node."""
    driver = start(nodes="n1 n2 n3", agents="n1 n2")
    driver.do("condemn n1")
    assert driver.machine.phase is Phase.PLACING
    assert driver.do("agent n3")[0].startswith("launch ")


def test_a_fence_keeps_its_own_limit_when_a_node_comes_back() -> None:
    driver = train(start(nodes="n1 n2", active=2))
    driver.do("condemn n1")
    driver.now += 20
    driver.do("agent n1")
    assert driver.machine.phase is Phase.FENCING
    assert driver.machine.next_deadline() == driver.now + driver.machine.limits.fence_timeout_s


@pytest.mark.parametrize("events", [["exit 0", "report 1 v=5", "condemn n1"], ["exit 0", "stop operator"]])
def test_a_deadline_never_stays_in_the_past(events: list[str]) -> None:
    """A deadline that has passed without effect would be armed again at once, for ever."""
    driver = train(start())
    for event in events:
        driver.do(event)
    for _ in range(50):
        deadline = driver.machine.next_deadline()
        if deadline is None:
            return
        driver.now = max(driver.now, deadline)
        driver.do("wait 0")
        after = driver.machine.next_deadline()
        assert after is None or after > driver.now
    raise AssertionError("the machine never comes to rest")


def test_nobody_is_launched_once_all_steps_are_done() -> None:
    driver = train(start(nodes="n1 n2", active=2))
    driver.do("finished 1 v=10")
    driver.do("condemn n1")
    assert driver.do("agent n1") == ["-"], "its rank would wait for a plan for ever"
    assert driver.do("exit 1 farewell=finished")[-1].startswith("stop 75")
