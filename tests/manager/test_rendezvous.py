"""Rendezvous: each node with members gets each key once, and nothing of an older generation."""

from __future__ import annotations

from flashrec.core.ranks import compact
from flashrec.manager.rendezvous import Rendezvous
from flashrec.wire import messages as m

NODES = {0: ("n0",), 1: ("n0",), 2: ("n1",), 3: (), 4: ("n1", "n2")}


def made(generation: int = 1) -> Rendezvous:
    rendezvous = Rendezvous(NODES.__getitem__)
    rendezvous.begin(generation)
    return rendezvous


def key(name: str, *, rank: int = 0, generation: int = 1, members: tuple[int, ...] = (0, 1, 2)) -> m.KeyPosted:
    return m.KeyPosted(rank, 1, generation, "world", name, b"v", members)


def add(generation: int = 1, amount: int = 1, group: str = "world") -> m.CounterAdded:
    return m.CounterAdded(0, 1, generation, group, "c", amount, 5)


def test_one_message_for_all_nodes_with_members() -> None:
    rendezvous = made()
    assert rendezvous.post(key("a")), "the first asks for a flush"
    assert not rendezvous.post(key("b")), "one flush takes both"
    assert rendezvous.flush() == [
        (("n0", "n1"), [m.KeysPushed(1, "world", {"a": b"v", "b": b"v"}, (0, 1, 2))]),
    ]
    assert rendezvous.flush() == []
    assert rendezvous.post(key("c"))


def test_both_lives_of_a_rank_that_moves_get_keys() -> None:
    rendezvous = made()
    rendezvous.post(key("a", rank=0, members=(0, 4)))
    assert [nodes for nodes, _ in rendezvous.flush()] == [("n0", "n1", "n2")]
    rendezvous.post(key("address", rank=4, members=(4, 4)))
    to = m.KeysPushed(1, "world", {"address": b"v"}, (4,))
    assert rendezvous.flush() == [(("n1", "n2"), [to])], "from one life to the other"
    rendezvous.post(key("a", rank=4, members=(4,)))
    assert rendezvous.flush() == [], "a group of one rank"


def test_whoever_lives_nowhere_gets_nothing() -> None:
    rendezvous = made()
    rendezvous.post(key("a", rank=3, members=(3, 3)))
    assert rendezvous.flush() == []


def test_an_older_generation_has_no_effect() -> None:
    rendezvous = made(2)
    assert not rendezvous.post(key("a", generation=1))
    assert not rendezvous.post(key("a", generation=3))
    assert rendezvous.flush() == []
    assert rendezvous.add(add(1)) is None


def test_a_newer_generation_forgets_the_older_one() -> None:
    rendezvous = made()
    rendezvous.post(key("a"))
    assert rendezvous.add(add()) == m.CounterValue(0, 1, 5, 1)
    rendezvous.begin(2)
    assert rendezvous.flush() == []
    assert rendezvous.post(key("b", generation=2)), "the first of its generation"
    assert rendezvous.add(add(2)) == m.CounterValue(0, 1, 5, 1)
    rendezvous.begin(1)
    assert rendezvous.add(add(2)) == m.CounterValue(0, 1, 5, 2), "generations only grow"


def test_counters_of_groups_are_apart() -> None:
    rendezvous = made()
    rendezvous.add(add(amount=3))
    assert rendezvous.add(add(amount=2, group="other")) == m.CounterValue(0, 1, 5, 2)
    assert rendezvous.add(add(amount=2)) == m.CounterValue(0, 1, 5, 5)


def test_keys_of_many_posters_go_together_and_to_each_node_once() -> None:
    """As when every rank of a large group has a key for all others: nodes are looked up once a group."""
    world, asked = compact(tuple(range(400))), []

    def nodes_of(rank: int) -> tuple[str, ...]:
        asked.append(rank)
        return (f"n{rank // 8}",)

    rendezvous = Rendezvous(nodes_of)
    rendezvous.begin(1)
    for _ in range(3):
        for rank in range(400):
            rendezvous.post(m.KeyPosted(rank, 1, 1, "world", f"k{rank}", b"v", world))
        ((nodes, (keys,)),) = rendezvous.flush()
        assert nodes == tuple(f"n{node}" for node in range(50)) and len(keys.items) == 400
    assert len(asked) == 400


def test_where_ranks_are_is_asked_again_when_they_are_launched_or_a_plan_comes() -> None:
    places = {0: ("n0",), 1: ("n1",)}
    rendezvous = Rendezvous(places.__getitem__)
    rendezvous.begin(1)
    rendezvous.post(key("a", members=(0, 1)))
    assert [nodes for nodes, _ in rendezvous.flush()] == [("n0", "n1")]
    places[1] = ("n2",)
    rendezvous.begin(1)
    rendezvous.post(key("a", members=(0, 1)))
    assert [nodes for nodes, _ in rendezvous.flush()] == [("n0", "n2")]


def test_groups_with_the_same_nodes_are_sent_together() -> None:
    rendezvous = made()
    for group, members in (("a", (0, 2)), ("b", (1, 2)), ("c", (0, 1))):
        rendezvous.post(m.KeyPosted(members[0], 1, 1, group, "k", b"v", members))
    assert [(nodes, [keys.group for keys in sent]) for nodes, sent in rendezvous.flush()] == [
        (("n0", "n1"), ["a", "b"]),
        (("n0",), ["c"]),
    ]
