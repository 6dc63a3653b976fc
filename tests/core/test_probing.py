"""What other nodes see decides how long silence is borne: sooner, later, or no matter."""

from __future__ import annotations

import pytest

from flashrec.core.lives import CONTROL, FABRIC
from flashrec.core.probing import Round, choose
from tests.core.watch import TIMING, World, all_but, nobody_can_look

NODES = ("n1", "n2", "n3", "n4", "n5")


def test_when_others_cannot_reach_it_either_the_verdict_comes_sooner_but_not_at_once() -> None:
    world = World(*NODES)
    world.silence("n1")
    world.reaches = all_but("n1")
    world.run(5.0)
    assert world.states("n1") == [(1.0, "suspect"), (1.5, "dead")]
    assert "n2, n3, n4 cannot reach it" in world.last().reason
    assert world.last().reason.startswith("silent for 1.50 s")
    assert {v.node for _, v in world.said} == {"n1"}


def test_when_others_reach_it_the_path_is_at_fault_and_the_node_gets_time() -> None:
    world = World(*NODES)
    world.silence("n1")
    world.reaches = all_but()
    world.run(5.5)
    assert world.states("n1") == [(1.0, "suspect")]
    ((_, note),) = world.notes
    assert note.node == "n1"
    assert "n2, n3, n4 can reach it: the path between manager and node is lost; condemned after 6 s" in note.text
    world.run(3.0)
    assert world.states("n1")[1:] == [(6.0, "dead")], "bounded: it cannot be commanded"
    assert "the path between manager and node is lost" in world.last().reason


def test_a_path_that_heals_in_time_costs_nothing() -> None:
    world = World(*NODES)
    world.silence("n1")
    world.reaches = all_but()
    world.run(5.0)
    world.speak("n1", paths=(CONTROL,))
    world.run(10.0)
    assert [state for _, state in world.states("n1")] == ["suspect", "alive"]


def test_a_node_that_dies_while_it_is_given_time_is_condemned_at_the_next_look() -> None:
    world = World(*NODES)
    world.silence("n1")
    world.reaches = all_but()
    world.run(3.0)
    world.reaches = all_but("n1")
    world.run(2.0)
    assert [state for _, state in world.states("n1")] == ["suspect", "dead"]
    assert world.states("n1")[-1][0] <= 4.0
    assert "cannot reach it" in world.last().reason


@pytest.mark.parametrize("reaches", [nobody_can_look, lambda *_: False], ids=["no answer", "they reach nobody at all"])
def test_could_not_look_changes_nothing(reaches) -> None:
    world = World(*NODES)
    world.silence("n1")
    world.reaches = reaches
    world.run(5.0)
    assert world.states("n1") == [(1.0, "suspect"), (2.0, "dead")]
    assert "reach" not in world.last().reason


def test_a_prober_that_is_lost_itself_is_not_waited_for() -> None:
    """Two nodes die one after the other; the second was asked to look at the first and will never answer."""
    world = World(*NODES)
    world.silence("n1")
    world.run(0.75)
    world.silence("n2")
    world.reaches = all_but("n1", "n2")
    world.run(5.0)
    assert {probe.by for at, probe in world.probes if at == 1.0 and probe.node == "n1"} == {"n2", "n3", "n4"}
    assert world.states("n1") == [(1.0, "suspect"), (1.75, "dead")], "n2 counts no more when it is a suspect"
    assert world.states("n2")[-1] == (2.25, "dead")


def test_one_who_reaches_it_weighs_more_than_all_who_do_not() -> None:
    world = World(*NODES)
    world.silence("n1")
    world.reaches = lambda by, node, path: node != "n1" or by == "n4"
    world.run(4.0)
    assert world.states("n1") == [(1.0, "suspect")]


def test_suspects_are_not_asked_and_the_same_are_asked_for_the_same() -> None:
    world = World(*NODES)
    world.silence("n1", "n3")
    world.run(1.0)
    asked = {(probe.by, probe.node) for _, probe in world.probes}
    assert {(by, "n1") for by in ("n2", "n4", "n5")} <= asked
    assert {(by, "n3") for by in ("n4", "n5", "n2")} <= asked
    assert not {by for by, _ in asked} & {"n1", "n3"}


def test_the_managers_own_node_is_no_witness_but_shows_that_others_can_look() -> None:
    world = World("n1", "n2", "n0", home="n0")
    world.silence("n1")
    world.reaches = all_but("n1")
    world.run(3.0)
    assert {(probe.by, probe.node) for _, probe in world.probes} == {("n2", "n1"), ("n2", "n0")}
    assert world.states("n1")[-1] == (1.5, "dead")


def test_alone_with_its_managers_node_nobody_is_asked() -> None:
    world = World("n1", "n0", home="n0")
    world.silence("n1")
    world.run(3.0)
    assert world.probes == []
    assert world.states("n1") == [(1.0, "suspect"), (2.0, "dead")]


def test_many_silent_are_doubted_whatever_others_see() -> None:
    """They may be on our side of a split."""
    world = World(*NODES)
    world.silence("n1", "n2", "n3")
    world.reaches = all_but("n1", "n2", "n3")
    world.run(12.0)
    assert {t for t, v in world.said if v.state == "dead"} == {10.0}


def test_no_more_is_asked_once_the_silence_is_over() -> None:
    world = World(*NODES)
    world.silence("n1")
    world.run(1.25)
    world.speak("n1", paths=(CONTROL,))
    asked = len(world.run(0.25).probes)
    assert len(world.run(5.0).probes) == asked


@pytest.mark.parametrize("lost", [("n1",), ()], ids=["not reached", "reached"])
def test_what_was_found_in_one_silence_does_not_count_in_the_next(lost: tuple[str, ...]) -> None:
    world = World(*NODES)
    world.silence("n1")
    world.reaches = all_but(*lost)
    world.run(1.375)
    world.speak("n1", paths=(CONTROL,))
    world.tick()
    world.silence("n1")
    world.reaches = nobody_can_look
    world.run(5.0)
    assert world.states("n1") == [(1.0, "suspect"), (1.5, "alive"), (2.5, "suspect"), (3.5, "dead")]


def test_an_answer_of_another_round_or_of_a_stranger_does_not_count() -> None:
    world = World(*NODES)
    world.silence("n1")
    world.run(1.0)
    (number,) = {probe.number for _, probe in world.probes}
    for by in ("n2", "n3", "n4"):
        world.detector.probed(number + 1, by, "n1", True)
        world.detector.probed(number, by, "n5", True)
    world.detector.probed(number, "n5", "n1", True)  # was not asked
    world.run(4.0)
    assert world.states("n1")[-1] == (2.0, "dead")


def test_mpi_heartbeats_show_that_only_the_control_network_is_lost() -> None:
    """The job goes on over the fabric meanwhile; but its workers end with the lease, so it is replaced before."""
    world = World(*NODES, fabric=True)
    world.silence("n1", paths=(CONTROL,))
    world.reaches = all_but("n1", path=CONTROL)
    world.run(8.0)
    assert world.states("n1") == [(1.0, "suspect"), (6.0, "dead")]
    assert world.last().kind == "lost"
    assert "MPI heartbeats still come: the control network is lost" in world.last().reason
    assert "MPI heartbeats still come" in world.said[0][1].reason


def test_silence_on_both_paths_is_no_slower_than_on_one() -> None:
    world = World(*NODES, fabric=True)
    world.run(1.0)
    world.silence("n1")
    world.reaches = all_but("n1")
    world.run(5.0)
    assert world.states("n1") == [(2.0, "suspect"), (2.5, "dead")]
    assert {v.kind for _, v in world.said} == {"lost"}


# ---- blame -------------------------------------------------------------------------------------------------------


def test_several_who_blame_a_node_have_it_looked_at_now() -> None:
    world = World(*NODES)
    world.run(1.0)
    world.silence("n1")
    world.run(0.25)
    assert world.detector.blamed("n1", "n2", world.now) == []
    (verdict,) = world.detector.blamed("n1", "n3", world.now)
    assert (verdict.state, verdict.reason) == ("suspect", "workers on n2, n3 lost their connections to it")
    world.reaches = all_but("n1")
    world.run(0.125)
    assert {probe.node for _, probe in world.probes} >= {"n1"}
    assert world.run(5.0).states("n1") == [(2.5, "dead")], "not before the silence itself is enough"


def test_blame_condemns_nobody() -> None:
    world = World(*NODES)
    for by in ("n2", "n3", "n4", "n5"):
        world.take(world.detector.blamed("n1", by, world.now))
    world.run(20.0)
    assert [state for _, state in world.states("n1")] == ["suspect", "alive"], "its next heartbeat refutes it"


def test_blame_that_was_refuted_does_not_count_again() -> None:
    world = World(*NODES)
    for by in ("n2", "n3"):
        world.take(world.detector.blamed("n1", by, world.now))
    world.run(0.25)
    assert world.detector.blamed("n1", "n4", world.now) == []
    assert [state for _, state in world.states("n1")] == ["suspect", "alive"]


@pytest.mark.parametrize(
    "blames",
    [
        [("n2", 0.0)],
        [("n2", 0.0), ("n2", 0.5)],
        [("n2", 0.0), ("n3", TIMING.blame_window_s)],
        [("n1", 0.0), ("n2", 0.0)],
        [("n2", 0.0), ("n9", 0.0)],
    ],
    ids=["one", "the same again", "long ago", "itself", "a stranger"],
)
def test_blame_of_one_does_not_count(blames: list[tuple[str, float]]) -> None:
    world = World(*NODES)
    assert [v for by, at in blames for v in world.detector.blamed("n1", by, at)] == []


# ---- the parts ---------------------------------------------------------------------------------------------------


def test_a_failure_counts_only_with_a_reference() -> None:
    def conclude(*answers: tuple[str, str, bool | None], fit: tuple[str, ...] = ("a", "b")) -> str:
        looks = Round(1, "x", {"a": "b", "b": "a"}, 0.0)
        for answer in answers:
            looks.hear(*answer)
        return looks.conclusion(frozenset(fit))

    failed = [("a", "x", False), ("b", "x", False)]
    assert conclude() == conclude(*failed) == ""
    assert conclude(*failed, ("a", "b", True), ("b", "a", True)) == "failed"
    assert conclude(*failed, ("a", "b", False), ("b", "a", False)) == ""
    assert conclude(*failed, ("a", "b", None), ("b", "a", True)) == "failed"
    assert conclude(*failed, ("a", "b", True)) == "", "b may still say more"
    assert conclude(*failed, ("a", "b", True), fit=("a",)) == "failed"
    unable = [("a", "x", False), ("a", "b", True), ("b", "x", None), ("b", "a", None)]
    assert conclude(*unable) == "failed"
    assert conclude(*unable, fit=("b",)) == "", "a is doubtful itself"
    assert conclude(("a", "x", True)) == "reached"
    assert conclude(("a", "x", False), ("a", "x", True)) == "", "the first answer stays"


def test_neighbours_are_chosen() -> None:
    fit = ["n1", "n2", "n4", "n5"]
    assert choose("n3", fit, 2) == {"n4": "n5", "n5": "n1"}
    assert choose("n5", fit, 3, no_witness="n2") == {"n1": "n2", "n4": "n1"}
    assert choose("n2", fit, 3) == {"n4": "n5", "n5": "n1", "n1": "n4"}
    assert choose("n5", ["n1", "n5"], 3) == {"n1": ""}
    assert choose("n5", fit, 0) == {}


def test_paths_have_their_names() -> None:
    assert (CONTROL, FABRIC) == ("control", "fabric"), "as on the wire and in the journal"
