"""Cases are drawn from their seed alone, can be written down, and reach everything that can be hit."""

from __future__ import annotations

from tests.chaos.case import SOURCE, After, AtPlace, Case, OnMessage, Together, describe, from_json, to_json
from tests.chaos.draw import STEPS, draw, places_of
from tests.runtime.layouts import recovery_faults
from tests.runtime.layouts.layout import TABLE
from tests.runtime.layouts.program import PLACES

CASES = [draw(5, index, 0, TABLE) for index in range(3000)]


def test_the_same_numbers_give_the_same_case() -> None:
    assert [draw(5, index, 0, TABLE) for index in range(50)] == CASES[:50]
    assert draw(5, 3, 1, TABLE) != CASES[3] != draw(6, 3, 0, TABLE)


def test_a_case_survives_being_written_down() -> None:
    for case in CASES[:200]:
        assert from_json(to_json(case)) == case


def test_every_layout_place_and_kind_is_drawn() -> None:
    faults = [fault for case in CASES for fault in case.faults]
    at = [fault.when for fault in faults if isinstance(fault.when, AtPlace)]
    assert {case.layout for case in CASES} == set(TABLE)
    assert {case.world_size for case in CASES if case.layout == "ddp"} == set(TABLE["ddp"].sizes)
    in_steps = {place for layout in TABLE.values() for place in places_of(layout)}
    assert {*PLACES, "amid-optimizer", "micro-2"} < in_steps
    assert {when.place for when in at} == {*in_steps, *recovery_faults.PLACES, "init", "join"}
    assert {when.step for when in at} == set(range(-1, STEPS))
    assert {type(fault.when) for fault in faults} == {AtPlace, After, OnMessage, Together}
    assert {len(case.faults) for case in CASES} == {1, 2, 3}
    assert any(fault.victim == SOURCE for fault in faults)
    assert {fault.how for fault in faults} == {"kill", "stop"}


def test_victims_are_ranks_and_every_fault_can_be_told() -> None:
    for case in CASES:
        for fault in case.faults:
            assert fault.victim == SOURCE or 0 <= fault.victim < case.world_size
            assert describe(fault)


def test_an_unprotected_layout_is_drawn_seldom() -> None:
    num_unprotected = sum(not TABLE[case.layout].is_protected for case in CASES)
    assert 0 < num_unprotected < len(CASES) / 10


def test_a_case_of_one_rank_more_than_there_is_cannot_be_drawn() -> None:
    assert all(isinstance(case, Case) and case.world_size in TABLE[case.layout].sizes for case in CASES)
