"""Nodes from a pool: late and repeated answers, nodes that come twice, the ends of a search."""

from __future__ import annotations

import pytest

from flashrec.core import events as e
from flashrec.core.types import Phase
from tests.core.driver import Driver, snapshot


def searching(*, max_swaps: int = 4) -> Driver:
    """Rank 0 has lost its node; the pool has been asked."""
    driver = Driver()
    for line in (
        f"pool max_swaps={max_swaps} wait_s=60", "job n1 n2 active=2 per_node=1", "agent n1 n2", "started all",
        "joined all", "restored all v=0",
    ):  # fmt: skip
        driver.do(line)
    assert driver.do("condemn n1")[-1].startswith("request 1") == (max_swaps > 0)
    driver.do("report 1 v=4")
    assert driver.machine.phase is Phase.PLACING
    return driver


def recover(driver: Driver, v: int) -> list[str]:
    driver.do(f"report 1 v={v}")
    driver.do("report 0 v=-1 invalid")
    driver.do("formed all")
    said = driver.do(f"restored all v={v}")
    assert driver.machine.phase is Phase.RUNNING
    return said


@pytest.mark.parametrize("again", ["grant 1 p2", "grant 7 p2", "refuse 1", "refuse 1 retry=1", "refuse 7"])
def test_an_answer_to_nothing_changes_nothing(again: str) -> None:
    driver = searching()
    driver.do("grant 1 p1")
    before = snapshot(driver.machine)
    assert driver.do(again) == ["-"]
    assert snapshot(driver.machine) == before


def test_without_a_pool_nothing_is_asked() -> None:
    driver = searching(max_swaps=0)
    assert driver.machine.next_deadline() == driver.now + driver.machine.limits.spare_wait_s


def test_a_node_that_comes_again_is_a_new_life_of_it() -> None:
    """What its former life says is stale, and its agent's number goes on."""
    driver = searching()
    driver.do("grant 1 p1")
    driver.do("agent p1")
    recover(driver, 4)
    driver.do("committed all v=5")
    assert "request 2 (node p1: silent for 2.0 s)" in driver.do("condemn p1")
    driver.do("agent n1")  # is faster
    assert "release 1 p1 (no rank is on it)" in recover(driver, 5)
    driver.do("condemn n1")
    driver.do("grant 3 p1")
    assert driver.machine.handle(e.AgentJoined("p1", 1), driver.now) == [], "a former life"
    rung, launch, *_ = driver.do("agent p1")
    assert rung == "rung pool: rank 0 to node p1: 2 of 4 taken from the pool"
    assert launch.startswith("launch p1[0.")
    assert driver.machine.members.nodes["p1"].incarnation == 2
    assert driver.do("left p1 request=1") == ["-"], "that was another companion job"


def test_a_search_that_ends_with_the_last_step_is_called_off() -> None:
    driver = searching()
    assert "release 1 (withdrawn) (all steps are done)" in driver.do("finished 1 v=5")
    assert driver.do("grant 1 p1") == ["-"]


def test_without_a_pool_the_first_start_waits_for_no_spare() -> None:
    driver = Driver()
    driver.do("job n1 n2 active=2 per_node=1")
    driver.do("agent n1")
    assert driver.do("wait 120")[-1] == "stop 75: no agent on node n2 within 120 s"


def test_at_the_first_start_the_pools_no_is_in_the_last_line() -> None:
    driver = Driver()
    for line in ("pool max_swaps=1", "job n1 n2 active=2 per_node=1", "agent n1", "wait 120"):
        driver.do(line)
    driver.do("refuse 1 no such reservation")
    last = driver.do("wait 0")[-1]
    assert last == "stop 75: no agent on node n2 within 120 s; pool flashspare: no such reservation"


def test_the_lost_node_may_come_back_while_the_pool_is_waited_for() -> None:
    driver = searching()
    driver.now += 45  # longer than spare_wait_s
    assert driver.do("wait 0") == ["-"]
    assert driver.do("agent n1") == [
        "release 1 (withdrawn) (every rank has a node)",
        "rung in place: rank 0 again on node n1: process failure 0 of 3 there",
        "launch n1[0.2+]",
    ]


@pytest.mark.parametrize("answer", [[], ["refuse 1 retry=1"], ["grant 1 p1"]])
def test_a_failure_during_the_search_asks_for_no_second_node(answer: list[str]) -> None:
    driver = Driver()
    for line in ("pool max_swaps=4", "job n1 n2 n3 active=3 per_node=1", "agent n1 n2 n3", "started all",
                 "joined all", "restored all v=0", "condemn n1", *answer):  # fmt: skip
        driver.do(line)
    assert driver.machine.pool.is_waiting
    said = driver.do("exit 1")
    assert driver.machine.generation == 3
    assert not [line for line in said if line.startswith("request")], said


def test_ranks_of_a_node_that_slurm_takes_away_are_replaced() -> None:
    driver = searching()
    driver.do("grant 1 p1")
    driver.do("agent p1")
    recover(driver, 4)
    said = driver.do("left p1 companion job 17 is PREEMPTED")
    assert said[0] == "release 1 p1 (companion job 17 is PREEMPTED)"
    assert "RUNNING -> FENCING  g3: node p1: companion job 17 is PREEMPTED" in said
    assert said[-1].startswith("request 2")
    assert driver.do("condemn p1") == ["-"]


def test_whoever_said_no_may_be_asked_again_at_the_next_loss() -> None:
    driver = searching()
    driver.do("refuse 1 limit reached")
    driver.do("agent n1")
    recover(driver, 4)
    driver.do("committed all v=5")
    assert driver.do("condemn n1")[-1].startswith("request 2")
