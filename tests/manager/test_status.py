"""What `flashrec status` is given: with a pool also where each node came from, and the pool's last word."""

from __future__ import annotations

import pytest

from flashrec.cli.status import headline
from flashrec.core.detection import Detector
from flashrec.core.hangs import FRESH_S
from flashrec.core.limits import Timing
from flashrec.manager.pace import MAX_SHARE, rest_s
from flashrec.manager.status import snapshot
from flashrec.manager.welcome import MAX_TAG_INTERVAL_S, tags_every
from tests.core.driver import Driver
from tests.core.test_scale import Job


def driver_with_a_pool_node() -> Driver:
    driver = Driver()
    for line in (
        "pool max_swaps=2", "job n1 n2 active=2 per_node=1", "agent n1 n2", "started all", "joined all",
        "restored all v=0", "condemn n1", "grant 1 p1", "agent p1",
    ):  # fmt: skip
        driver.do(line)
    return driver


def test_a_node_from_the_pool_is_shown_with_its_companion_job() -> None:
    machine = driver_with_a_pool_node().machine
    shown = snapshot(7, machine, Detector(Timing()), {}, {"p1": 12}.get)
    assert {node["node"]: node["companion_job"] for node in shown["nodes"]} == {"n1": None, "n2": None, "p1": 12}
    assert shown["pool"] == "1 taken so far"
    assert headline(shown, 0.0).endswith("pool: 1 taken so far")


def test_what_the_pool_said_is_shown_and_a_node_that_was_given_back_is_not() -> None:
    driver = driver_with_a_pool_node()
    driver.do("left p1 companion job 12 is CANCELLED")
    driver.do("refuse 2 retry=1")
    shown = snapshot(7, driver.machine, Detector(Timing()), {}, {}.get)
    assert [node["node"] for node in shown["nodes"]] == ["n1", "n2"]
    assert shown["pool"] == "1 taken so far; waiting for 1 more; pool flashspare: no node free: 1 of 1 in use"


def test_without_a_pool_nothing_is_said_of_one() -> None:
    shown = snapshot(7, driver_with_a_pool_node().machine, Detector(Timing()), {})
    assert "pool" not in shown and "companion_job" not in shown["nodes"][0]


def test_where_links_are_watched_they_are_shown() -> None:
    machine = driver_with_a_pool_node().machine
    assert "fabric" not in snapshot(7, machine, Detector(Timing()), {})["nodes"][0]
    shown = snapshot(7, machine, Detector(Timing()), {}, fabric_of={"n1": "dead", "n2": "alive", "p1": "unknown"}.get)
    assert [node["fabric"] for node in shown["nodes"]] == ["dead", "alive", "unknown"]


def test_a_large_job_is_shown_with_a_few_looks_at_each_rank() -> None:
    job = Job(64)
    job.start()
    before = job.slots.looks
    shown = snapshot(7, job.machine, Detector(Timing()), {})
    assert job.slots.looks - before <= 4 * len(job.slots)
    assert [node["ranks"] for node in shown["nodes"]][:2] == [[*range(8)], [*range(8, 16)]]


def test_what_is_looked_at_for_our_own_sake_does_not_cost_much() -> None:
    assert rest_s(1.0, 0.001) == 1.0
    assert rest_s(1.0, 0.2) == pytest.approx(0.2 / MAX_SHARE - 0.2)


def test_tags_come_less_often_in_a_large_job_but_often_enough_to_judge_hangs() -> None:
    assert [tags_every(ranks, 0.25) for ranks in (8, 1000, 1001, 3000, 10_000, 32_768)] == [1, 1, 2, 3, 4, 4]
    assert tags_every(32_768, 0.75) == 1 and tags_every(32_768, 2.0) == 1
    assert MAX_TAG_INTERVAL_S < FRESH_S
