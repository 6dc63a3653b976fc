"""Placement: in place, whole nodes to one spare, the batch host last, distrusted nodes only at the end."""

from __future__ import annotations

from flashrec.core.placement import NodeRoom, Shortage, place


def room(name: str, preference: int, free: tuple[int, ...] = (0, 1), trusted: bool = True) -> NodeRoom:
    return NodeRoom(name, preference, free, trusted)


def test_a_failed_process_goes_back_to_its_node() -> None:
    assert place({3: "n2"}, [room("n2", 1, (1,)), room("n0", 2)]) == ({"n2": {3: 1}}, None)


def test_the_ranks_of_a_lost_node_move_together_to_the_preferred_spare() -> None:
    rooms = [room("n0", 9), room("n3", 3), room("n4", 4)]
    assert place({0: "n1", 1: "n1"}, rooms) == ({"n3": {0: 0, 1: 1}}, None)


def test_two_lost_nodes_take_two_spares() -> None:
    rooms = [room("n3", 3), room("n0", 9)]
    assert place({0: "n1", 1: "n1", 2: "n2", 3: "n2"}, rooms) == ({"n3": {0: 0, 1: 1}, "n0": {2: 0, 3: 1}}, None)


def test_a_spare_with_too_little_room_is_passed_over() -> None:
    rooms = [room("n3", 3, (1,)), room("n4", 4)]
    assert place({0: "n1", 1: "n1"}, rooms)[0] == {"n4": {0: 0, 1: 1}}


def test_ranks_are_split_only_when_no_node_has_room_for_all() -> None:
    rooms = [room("n3", 3, (1,)), room("n4", 4, (0,))]
    assert place({0: "n1", 1: "n1"}, rooms) == ({"n3": {0: 1}, "n4": {1: 0}}, None)


def test_a_distrusted_node_is_the_last_resort() -> None:
    rooms = [room("n2", 1, (1,), trusted=False), room("n0", 9)]
    assert place({3: "n2"}, rooms)[0] == {"n0": {3: 0}}
    assert place({3: "n2"}, rooms[:1])[0] == {"n2": {3: 1}}


def test_a_shortage_names_the_ranks() -> None:
    assert place({0: "n1", 1: "n1"}, [room("n3", 3, (1,))]) == ({"n3": {0: 1}}, Shortage((1,)))
    assert place({0: "n1"}, []) == ({}, Shortage((0,)))
