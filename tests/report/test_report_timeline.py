"""Figures of a recovery against journals whose figures are known; what the journal does not say stays unknown."""

import pytest

from flashrec.report.records import read_faults, read_journal
from flashrec.report.text import details, mirrors
from flashrec.report.timeline import Mirrored, Recovery, Timeline, build_timeline

from .journals import Writer, fault, wall


def timeline_of(content: bytes, faults: bytes = b"") -> Timeline:
    journal = read_journal(content)
    return build_timeline(journal, read_faults(faults, journal))


def only_recovery(writer: Writer, faults: bytes = b"") -> Recovery:
    (recovery,) = timeline_of(writer.content, faults).recoveries
    return recovery


def marks_of(recovery: Recovery) -> dict[str, float]:
    return {mark.name: round(mark.after_s, 6) for mark in recovery.marks}


def rounded(durations: dict[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else round(value, 6) for name, value in durations.items()}


def test_lost_node_from_fault_to_first_step():
    recovery = only_recovery(Writer().start().node_dies(10.0), fault(8.0))
    assert (recovery.outcome, recovery.rto_from) == ("recovered", "fault")
    assert recovery.rto_s == pytest.approx(2.0 + 2.2 + 0.4 + 0.2)
    assert rounded(recovery.durations) == {
        "detect": 2.0, "fence": 0.2, "launch": 2.0, "form": 0.1, "restore": 0.3, "first_step": 0.2,
    }  # fmt: skip
    assert marks_of(recovery) == {
        "fault": 0.0, "suspected": 1.0, "detected": 2.0, "placed": 2.01, "fenced": 2.2, "launched": 4.2, "formed": 4.3,
        "restored": 4.6, "resumed": 4.6, "first step": 4.8,
    }  # fmt: skip
    assert recovery.launched == ("rank 0 on n3",)
    assert recovery.reasons == ("node n1 silent for 2.0 s",)
    assert (recovery.resume_step, recovery.steps_redone, recovery.moved_bytes) == (7, 1, 5_000_000)


def test_durations_add_up_to_the_recovery_time():
    recovery = only_recovery(Writer().start().node_dies(10.0), fault(8.0))
    assert sum(recovery.durations.values()) == pytest.approx(recovery.rto_s)


def test_without_a_known_fault_time_counts_from_detection():
    recovery = only_recovery(Writer().start().node_dies(10.0))
    assert (recovery.rto_from, recovery.durations["detect"]) == ("detection", None)
    assert recovery.rto_s == pytest.approx(2.8)
    assert "fault" not in marks_of(recovery)


def test_fault_after_detection_is_not_its_cause():
    recovery = only_recovery(Writer().start().node_dies(10.0), fault(10.5))
    assert (recovery.rto_from, len(recovery.faults)) == ("detection", 1)


def test_first_step_is_that_of_the_last_rank_and_unknown_until_then():
    writer = Writer().start().node_dies(10.0)
    writer.lines.pop()
    recovery = only_recovery(writer, fault(8.0))
    assert recovery.outcome == "recovered"
    assert (recovery.rto_s, recovery.durations["first_step"]) == (None, None)


def test_journal_that_ends_in_a_recovery_invents_no_figures():
    writer = Writer().start().node_dies(10.0)
    while writer.lines[-1].get("to") != "FORMING":
        writer.lines.pop()
    recovery = only_recovery(writer, fault(8.0))
    assert recovery.outcome == "unfinished"
    assert (recovery.rto_s, recovery.steps_redone, recovery.resume_step, recovery.moved_bytes) == (None,) * 4
    assert recovery.durations["detect"] == pytest.approx(2.0)
    assert recovery.durations["restore"] is None


def test_job_that_stops_in_a_recovery():
    writer = Writer().start()
    writer.event(10.0, "NodeCondemned", node="n1", incarnation=1, reason="gone")
    writer.move(10.0, "RUNNING", "FENCING", "node n1 gone")
    writer.move(10.3, "FENCING", "STOPPED", "no spare left for rank 0")
    writer.line(10.4, "note", what="job over", exit_code=75)
    timeline = timeline_of(writer.content)
    assert (timeline.outcome, timeline.exit_code) == ("no spare left for rank 0", 75)
    assert timeline.recoveries[0].outcome == "stopped"
    assert timeline.recoveries[0].rto_s is None


@pytest.mark.parametrize(
    ("reports", "resume_step", "redone"),
    [
        ([(7, True), (7, True)], 7, 1),  # nobody passed: all redo step 7
        ([(7, True), (7, True)], 8, 0),  # somebody passed: all roll forward
        ([(8, True), (7, True)], 8, 1),  # one is already in step 8, the other rolls forward
        ([(7, False)], 7, None),  # joiners know nothing
        ([], 7, None),
    ],
)
def test_steps_redone(reports, resume_step, redone):
    writer = Writer().start()
    writer.move(10.0, "RUNNING", "FENCING", "x")
    for rank, (v, valid) in enumerate(reports):
        writer.report(10.1, rank, v, valid)
    writer.move(10.2, "FENCING", "PLACING")
    writer.plan(10.3, resume_step)
    writer.move(10.3, "PLACING", "FORMING")
    writer.forms_and_resumes(10.3)
    assert only_recovery(writer).steps_redone == redone


def test_no_step_is_redone_when_all_have_paused():
    writer = Writer().start()
    writer.move(10.0, "RUNNING", "FENCING", "rank 1 move at a step boundary (node n1: Slurm says DRAIN)")
    writer.report(10.1, 0, 7, True)
    writer.move(10.2, "FENCING", "PLACING")
    writer.line(10.3, "effect", effect={"type": "PublishPlan", "plan": {
        "generation": 2, "resume_step": 7, "roll_forward": [], "sources": {"1": 0}, "reason": "", "at_boundary": True,
    }})  # fmt: skip
    writer.move(10.3, "PLACING", "FORMING")
    writer.forms_and_resumes(10.3)
    assert only_recovery(writer).steps_redone == 0


def test_rungs_of_the_ladder_are_shown_and_steps_lost_with_a_checkpoint():
    writer = Writer().start()
    writer.move(10.0, "RUNNING", "FENCING", "node n1 is lost")
    writer.effect(10.1, "TakeRung", rung="spare", ranks=[0], reason="rank 0 to spare node n3", steps_lost=0)
    writer.report(10.2, 1, 7)
    writer.move(10.3, "FENCING", "PLACING")
    writer.effect(11.0, "TakeRung", rung="checkpoint", ranks=[], reason="all ranks start again", steps_lost=2)
    writer.generation += 1
    writer.move(11.0, "PLACING", "PLACING")
    writer.move(11.1, "PLACING", "FORMING")
    writer.move(12.0, "FORMING", "RESTORING")
    for rank in (0, 1):
        writer.event(12.1, "WorkerRestored", rank=rank, generation=writer.generation, v=5)
    writer.move(12.2, "RESTORING", "RUNNING")
    recovery = only_recovery(writer)
    assert [rung.rung for rung in recovery.rungs] == ["spare", "checkpoint"]
    assert (recovery.outcome, recovery.resume_step, recovery.steps_redone) == ("recovered", 5, 2)
    assert ("rung", "checkpoint: all ranks start again") in details(recovery)


def test_second_failure_inside_belongs_to_the_same_recovery():
    writer = Writer().start()
    writer.event(10.0, "WorkerExited", rank=0, incarnation=1, reason="killed by SIGKILL")
    writer.move(10.0, "RUNNING", "FENCING", "rank 0 killed by SIGKILL")
    writer.launch(10.0, "n1", 0)
    writer.report(10.1, 1, 7)
    writer.move(10.1, "FENCING", "PLACING")
    writer.event(11.0, "NodeCondemned", node="n1", incarnation=1, reason="node n1 silent")
    writer.move(11.0, "PLACING", "FENCING", "node n1 silent")
    writer.launch(11.0, "n3", 0)
    writer.report(11.2, 1, 7)
    writer.move(11.2, "FENCING", "PLACING")
    writer.report(12.2, 0, 0, valid=False)
    writer.plan(12.2, 7)
    writer.move(12.2, "PLACING", "FORMING")
    writer.forms_and_resumes(12.2)
    recovery = only_recovery(writer, fault(9.9) + fault(10.5, id="second"))
    assert recovery.generations == (2, 3)
    assert recovery.reasons == ("rank 0 killed by SIGKILL", "node n1 silent")
    assert [fault.id for fault in recovery.faults] == ["cut", "second"]
    assert recovery.durations["fence"] == pytest.approx(0.1 + 0.2)
    assert recovery.durations["launch"] == pytest.approx(0.9 + 1.0)
    assert recovery.rto_s == pytest.approx(sum(recovery.durations.values()))
    assert marks_of(recovery)["launched"] == pytest.approx(2.3)


def test_faults_go_to_the_recovery_they_caused():
    writer = Writer().start().node_dies(10.0).node_dies(30.0)
    first, second = timeline_of(writer.content, fault(8.0) + fault(29.0, id="later")).recoveries
    assert ([f.id for f in first.faults], [f.id for f in second.faults]) == (["cut"], ["later"])
    assert (first.number, second.number, second.durations["detect"]) == (1, 2, pytest.approx(1.0))


def test_late_speech_of_an_older_generation_is_not_counted():
    writer = Writer().start().node_dies(10.0)
    resumed = next(i for i, line in enumerate(writer.lines) if line.get("reason") == "all restored")
    stale = writer.lines[-1] | {"mono": 10.5, "event": writer.lines[-1]["event"] | {"generation": 1}}
    writer.lines.insert(resumed, stale)
    assert only_recovery(writer, fault(8.0)).rto_s == pytest.approx(4.8)


def test_doubt_about_another_node_is_not_the_detection():
    writer = Writer().start()
    writer.line(9.0, "verdict", subject="node n2", state="suspect", reason="late")
    writer.event(10.0, "WorkerExited", rank=0, incarnation=1, reason="killed by SIGKILL")
    writer.move(10.0, "RUNNING", "FENCING", "rank 0 killed by SIGKILL")
    assert marks_of(only_recovery(writer, fault(8.0)))["detected"] == 2.0


def test_launch_after_the_recovery_does_not_belong_to_it():
    writer = Writer().start().node_dies(10.0)
    writer.launch(20.0, "n2", 5)
    recovery = only_recovery(writer, fault(8.0))
    assert recovery.launched == ("rank 0 on n3",)
    assert marks_of(recovery)["placed"] == 2.01


def test_fault_of_a_machine_with_another_clock_is_placed_by_wall_time():
    recovery = only_recovery(Writer().start().node_dies(10.0), fault(123456.0, wall=wall(8.0)))
    assert recovery.durations["detect"] == pytest.approx(2.0)


def test_suspicion_that_was_taken_back_is_no_mark():
    writer = Writer().start()
    writer.line(5.0, "verdict", subject="node n1", state="suspect", reason="late")
    writer.line(5.1, "verdict", subject="node n1", state="alive", reason="heard again")
    writer.line(10.0, "verdict", subject="node n1", state="dead", reason="connection reset")
    writer.event(10.0, "NodeCondemned", node="n1", incarnation=1, reason="connection reset")
    writer.move(10.0, "RUNNING", "FENCING", "node n1: connection reset")
    assert "suspected" not in marks_of(only_recovery(writer))


def test_dead_spare_earlier_is_not_the_detection():
    writer = Writer().start()
    writer.line(5.0, "verdict", subject="node n3", state="dead", reason="silent")
    writer.event(5.0, "NodeCondemned", node="n3", incarnation=1, reason="silent")
    recovery = only_recovery(writer.node_dies(10.0), fault(8.0))
    assert recovery.durations["detect"] == pytest.approx(2.0)


def test_job_without_failure_has_no_recovery():
    timeline = timeline_of(Writer().start().content)
    assert timeline.recoveries == ()
    assert (timeline.job_id, timeline.start_s, timeline.phase) == (4711, pytest.approx(2.0), "RUNNING")


def test_start_that_needed_two_tries_is_no_recovery():
    writer = Writer()
    writer.line(1.0, "note", what="job started", job_id="local")
    writer.move(2.0, "PLACING", "FENCING", "node n1 did not start")
    writer.move(2.1, "FENCING", "PLACING")
    assert timeline_of(writer.content).recoveries == ()


def test_torn_last_line_is_a_crash_and_other_bad_lines_are_counted():
    content = Writer().start().node_dies(10.0).content
    first, _, rest = content.partition(b"\n")
    journal = read_journal(first + b"\n{garbage\n" + rest + b'{"seq": 99, "mo')
    assert (journal.is_torn, journal.unreadable) == (True, (2,))
    assert len(build_timeline(journal).recoveries) == 1


def test_unknown_kinds_and_fields_are_passed_over():
    writer = Writer().start()
    writer.line(5.0, "omen", bird="owl", event_of_day=3)
    writer.event(5.1, "SomethingNew", rank=1)
    writer.effect(5.2, "DoSomethingNew")
    assert only_recovery(writer.node_dies(10.0), fault(8.0)).rto_s == pytest.approx(4.8)


def test_empty_journal_is_no_crash():
    timeline = timeline_of(b"")
    assert (timeline.recoveries, timeline.start_s, timeline.phase) == ((), None, None)


def test_a_node_from_the_pool_is_shown_with_its_job_and_the_time_to_get_it():
    writer = Writer().start()
    writer.node_dies(10.0)
    at = next(i for i, line in enumerate(writer.lines) if line.get("effect", {}).get("type") == "LaunchWorkers")
    later = writer.lines[at:]
    del writer.lines[at:]
    writer.effect(10.01, "RequestNode", request=4, avoid=[], reason="node n1 is lost")
    writer.event(10.02, "NodeRefused", request=4, reason="pool p: no node free: 1 of 1 in use", may_retry=True)
    writer.line(10.5, "note", what="companion granted", request=4, node="n3", companion=17)
    writer.event(10.51, "NodeGranted", request=4, node="n3")
    writer.lines += later
    for number, line in enumerate(writer.lines, 1):
        line["seq"] = number
    recovery = only_recovery(writer)
    (answer,) = recovery.from_pool
    assert (answer.node, answer.companion, round(answer.allocate_s, 6)) == ("n3", 17, 0.5)
    assert dict(details(recovery))["from the pool"] == (
        "n3 (companion job 17), allocated in 0.500 s; pool p: no node free: 1 of 1 in use"
    )
    assert sum(value or 0 for value in recovery.durations.values()) == pytest.approx(recovery.rto_s)


def test_what_the_pool_did_not_give_is_shown_with_its_answer():
    writer = Writer().start()
    writer.line(10.0, "event", generation=1, phase="RUNNING", event={"type": "NodeCondemned", "node": "n1"})
    writer.move(10.0, "RUNNING", "FENCING", "node n1")
    writer.effect(10.0, "RequestNode", request=1, avoid=[], reason="node n1")
    writer.event(10.1, "NodeRefused", request=1, reason="pool p: limit reached", may_retry=False)
    writer.effect(10.1, "RequestNode", request=2, avoid=[], reason="node n1")
    writer.move(40.0, "FENCING", "STOPPED", "no spare")
    recovery = only_recovery(writer)
    assert [(a.node, a.allocate_s, a.said) for a in recovery.from_pool] == [
        (None, None, "pool p: limit reached"), (None, None, ""),
    ]  # fmt: skip
    assert [text for label, text in details(recovery) if label == "from the pool"] == [
        "pool p: limit reached", "no answer",
    ]  # fmt: skip


def test_stragglers_are_listed_when_they_became_so():
    writer = Writer().start()
    for mono, state in ((10.0, "slow"), (20.0, "up to pace"), (30.0, "hung")):
        writer.line(mono, "verdict", subject="rank 3", state=state, reason=f"because {state}", generation=1)
    assert timeline_of(writer.content).stragglers == ("rank 3: because slow",)


def test_what_mirrors_cost_is_the_last_word_of_each_rank_and_the_worst_one_stands_for_all():
    writer = Writer().start()
    assert timeline_of(writer.content).mirrors == () and mirrors(()) == ""
    for rank, own, held, wait_ms, steps in ((1, 100, 50, 0.0, 0), (0, 4000, 2000, 0.0, 0), (1, 100, 50, 0.5, 20)):
        cost = {"own_bytes": own, "held_bytes": held, "wait_ms": wait_ms, "steps": steps}
        writer.line(10.0, "note", what="mirrors", rank=rank, generation=1, **cost)
    found = timeline_of(writer.content).mirrors
    assert found == (Mirrored(0, 4000, 2000, None), Mirrored(1, 100, 50, 0.5))
    assert mirrors(found) == (
        "on 2 ranks, up to 6.0 kB of host memory (rank 0: 4.0 kB of its own, 2.0 kB held for others), waited for: "
        "0.50 ms per step (rank 1)"
    )
    writer.line(11.0, "note", what="mirrors", rank=1, generation=1, own_bytes=200, held_bytes=50, wait_ms=0.0, steps=0)
    assert timeline_of(writer.content).mirrors[1] == Mirrored(1, 200, 50, 0.5), "more memory, the time as before"
    assert mirrors(found[:1]).endswith("waited for: unknown")
