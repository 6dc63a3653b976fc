"""The fabric link of a node whose agent answers: lost, mended, or nothing that we could judge."""

from __future__ import annotations

from flashrec.core.lives import CONTROL, FABRIC
from tests.core.watch import World, all_but, nobody_can_look

NODES = ("n1", "n2", "n3", "n4", "n5")


def cut(*nodes: str) -> World:
    """These have just lost their fabric link."""
    world = World(*NODES, fabric=True)
    world.run(1.0)
    world.silence(*nodes, paths=(FABRIC,))
    world.reaches = all_but(*nodes, path=FABRIC)
    return world


def test_a_lost_link_is_named_as_such_and_the_agent_lives_on() -> None:
    world = cut("n3").run(5.0)
    assert world.states("n3") == [(2.625, "dead")]
    verdict = world.last()
    assert (verdict.kind, verdict.incarnation) == ("link", 1)
    assert verdict.reason == (
        "fabric link lost: no MPI heartbeat for 1.62 s, the control path answers, n1, n4, n5 cannot reach it over the "
        "fabric"
    )
    assert world.detector.state_of("n3") == "alive"
    assert world.detector.is_link_dead("n3")


def test_what_is_known_of_a_link_can_be_asked() -> None:
    world = cut("n3")
    assert world.detector.fabric_of("n3", world.now) == "alive"
    world.run(1.2)
    assert world.detector.fabric_of("n3", world.now) == "suspect"
    world.run(5.0)
    assert [world.detector.fabric_of(node, world.now) for node in ("n1", "n3", "n9")] == ["alive", "dead", "unknown"]


def test_it_is_mended_when_it_is_heard_again_and_may_be_lost_again() -> None:
    world = cut("n3").run(5.0)
    world.speak("n3")
    world.run(5.0)
    assert (world.last().state, world.last().kind) == ("alive", "link")
    assert not world.detector.is_link_dead("n3")
    world.silence("n3", paths=(FABRIC,))
    world.run(5.0)
    assert [state for _, state in world.states("n3", "link")] == ["dead", "alive", "dead"]


def test_when_others_reach_it_over_the_fabric_mpi_is_at_fault_not_the_link() -> None:
    world = cut("n3")
    world.reaches = all_but()
    world.run(10.0)
    assert world.said == []
    ((_, note),) = world.notes
    assert note.node == "n3"
    assert "n1, n4, n5 can reach it over the fabric: MPI is at fault there, not the link" in note.text


def test_mpi_that_hangs_does_not_hide_a_link_that_is_lost_later() -> None:
    world = cut("n3")
    world.reaches = all_but()
    world.run(300.0)
    rounds = {probe.number for _, probe in world.probes}
    assert 12 < len(rounds) < 20, "it is looked at again and again, but not every second for hours"
    world.reaches = all_but("n3", path=FABRIC)
    assert [state for _, state in world.run(31.0).states("n3", "link")] == ["dead"]


def test_who_cannot_look_over_the_fabric_condemns_nobody() -> None:
    """It has no address there, or its datagrams do not pass: then others do not reach each other either."""
    for reaches in (nobody_can_look, lambda by, node, path: path == CONTROL):
        world = cut("n3")
        world.reaches = reaches
        world.run(30.0)
        assert world.said == []
        ((_, note),) = world.notes
        assert "nobody could look over the fabric: nothing is concluded" in note.text


def test_a_session_that_ended_decides_nothing_alone() -> None:
    world = cut("n3")
    world.reaches = all_but()
    world.take(world.detector.fabric_down("n3", 1, "its beater crashed", world.now))
    world.run(5.0)
    assert world.said == []
    assert "(its beater crashed)" in world.notes[0][1].text
    world.take(world.detector.fabric_up("n3", 1, world.now))
    world.speak("n3")
    world.run(5.0)
    assert world.said == [] and len(world.notes) == 1


def test_a_session_that_ended_and_a_node_that_others_do_not_reach_is_a_lost_link() -> None:
    world = cut("n3")
    world.detector.fabric_down("n3", 1, "send: timed out", world.now)
    world.run(5.0)
    assert world.last().kind == "link"
    assert "no MPI heartbeat for 1.62 s (send: timed out)" in world.last().reason


def test_all_silent_at_once_is_our_own_watch() -> None:
    world = cut(*NODES).run(60.0)
    assert world.said == []
    ((at, note),) = world.notes
    assert (at, note.node) == (2.625, "")
    assert "nobody is heard: more likely our own watch, no link is judged" in note.text


def test_nobody_who_is_heard_is_our_own_watch_too() -> None:
    """Two nodes: not many, but all."""
    world = World("n1", "n2", fabric=True)
    world.silence("n1", "n2", paths=(FABRIC,))
    world.run(10.0)
    assert world.said == [] and world.probes == []
    assert [note.node for _, note in world.notes] == [""]


def test_many_silent_at_once_are_doubted_while_it_lasts_and_it_is_said_once_each_time() -> None:
    world = cut("n1", "n2", "n3").run(20.0)
    assert world.said == [] and len(world.notes) == 1
    assert "only n4, n5 is heard" in world.notes[0][1].text
    world.speak("n1", "n2")
    world.run(3.0)
    assert [(v.node, v.kind, v.state) for _, v in world.said] == [("n3", "link", "dead")]
    world.silence("n1", "n2", "n5", paths=(FABRIC,))
    world.run(5.0)
    assert len(world.said) == 1 and len(world.notes) == 2


def test_two_links_at_once_are_two_verdicts() -> None:
    world = cut("n2", "n3").run(5.0)
    assert [(v.node, v.kind, v.state) for _, v in world.said] == [("n2", "link", "dead"), ("n3", "link", "dead")]
    assert {probe.by for _, probe in world.probes} == {"n1", "n4", "n5"}, "who is not heard there is not asked"


def test_our_own_outage_blames_nobody() -> None:
    """The hub was respawned: all sessions ended, and come back one after the other."""
    world = World(*NODES, fabric=True)
    world.reaches = all_but("n1", path=FABRIC)
    world.run(1.0)
    world.silence(*NODES, paths=(FABRIC,))
    for node in NODES:
        world.detector.fabric_down(node, 1, "the hub hangs", world.now)
    world.run(1.5)
    world.detector.blind(FABRIC, world.now, "the hub hangs")
    world.speak("n2", "n3", "n4", "n5")
    for node in ("n2", "n3", "n4", "n5"):
        world.detector.fabric_up(node, 1, world.now)
    world.run(1.5)
    assert world.said == [] and world.notes == [], "n1 has its full time, too"
    world.run(2.0)
    assert [(v.node, v.kind) for _, v in world.said] == [("n1", "link")]


def test_a_link_is_no_matter_for_a_node_that_was_never_heard_there() -> None:
    world = World(*NODES, fabric=False)
    for node in NODES[1:]:
        world.detector.fabric_up(node, 1, 0.0)
    world.beats[FABRIC] = set(NODES[1:])
    world.reaches = all_but("n1", path=FABRIC)
    world.run(10.0)
    assert world.said == [] and world.notes == [] and world.probes == []


def test_a_link_is_judged_only_while_the_control_path_answers() -> None:
    """Others reach the node on the control network, we do not: it cannot be told to kill its workers."""
    world = cut("n3")
    world.silence("n3")
    world.run(10.0)
    assert [(v.state, v.kind) for _, v in world.said] == [("suspect", "lost"), ("dead", "lost")]
    assert world.states("n3")[-1][0] == 7.0


def test_a_node_with_a_lost_link_can_die() -> None:
    world = cut("n3").run(5.0)
    world.silence("n3")
    world.reaches = all_but("n3")
    world.run(5.0)
    assert [(v.state, v.kind) for _, v in world.said] == [("dead", "link"), ("suspect", "lost"), ("dead", "lost")]
    assert world.detector.heard("n3", 1, world.now, FABRIC) == [], "a dead life is not mended"


def test_a_lost_link_outlives_the_agent() -> None:
    world = cut("n3").run(5.0)
    world.take(world.detector.disconnected("n3", 1, "killed"))
    world.detector.joined("n3", 2, world.now)
    world.incarnations["n3"] = 2
    world.run(1.0)
    verdict = world.last()
    assert (verdict.incarnation, verdict.state, verdict.kind) == (2, "dead", "link")
    assert "in its former life" in verdict.reason
    world.speak("n3")
    world.run(1.0)
    assert (world.last().incarnation, world.last().state, world.last().kind) == (2, "alive", "link")


def test_a_node_whose_link_was_lost_and_that_has_left_begins_afresh() -> None:
    world = cut("n3").run(5.0)
    world.take(world.detector.left("n3"))
    world.detector.joined("n3", 2, world.now)
    assert not world.detector.is_link_dead("n3")


def test_it_takes_somebody_else_to_see_that_it_is_the_link() -> None:
    """Two nodes: who does not reach whom cannot be told."""
    world = World("n1", "n2", fabric=True)
    world.silence("n2", paths=(FABRIC,))
    world.reaches = all_but("n2", path=FABRIC)
    world.run(10.0)
    assert world.said == []
    assert "nobody could look" in world.notes[0][1].text
