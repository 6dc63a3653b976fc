"""What follows from a run of the checks: counting, our mark, and every rule of the decision, without any I/O."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.admin.health import reason
from flashrec.admin.health.policy import Drain, Keep, Undrain, decide, is_one_too_many, needs_slurm
from flashrec.admin.health.state import OnlyOne, State, advance, read, write
from flashrec.health import Finding, Report, Settings, Status, Verdict
from flashrec.health.verdict import worst
from flashrec.slurm.scheduler import NodeInfo

OURS = reason.write("flashrec-health", "disk: / is read-only")
SETTINGS = Settings(fail_runs=2, ok_runs=3, max_drained=1)


def report(**checks: str) -> Report:
    found = tuple(
        Finding(name, Verdict(name, Status(status), "" if status == "ok" else f"{name} is bad"), 0.1)
        for name, status in checks.items()
    )
    return Report("n1", worst([finding.verdict.status for finding in found]), found)


def node(name: str = "n1", *states: str, reason: str = "", since: float | None = 100.0, **more: Any) -> NodeInfo:
    return NodeInfo(
        name=name, address=name, states=frozenset(states or ("IDLE",)), features=(), active_features=(),
        partitions=(), reason=reason, reason_by="root", comment="", gres="", version="22.05.8", num_cpus=8,
        num_cpus_allocated=more.get("allocated", 0), memory_mb=1, boot_time=None, reason_time=since,
    )  # fmt: skip


def decided(me: NodeInfo, state: State, *others: NodeInfo, settings: Settings = SETTINGS) -> Keep | Drain | Undrain:
    return decide(me, {n.name: n for n in (me, *others)}, state, report(disk="fail", gpu="ok"), settings)


def drained(name: str, since: float | None = 100.0, text: str = OURS) -> NodeInfo:
    return node(name, "IDLE", "DRAIN", reason=text, since=since)


# ---- counting


def counted(*reports: Report, start: State | None = None) -> State:
    state = start or State(may_be_drained=False)
    for one in reports:
        state = advance(state, one, 1.0)
    return state


def test_failures_and_good_runs_count_in_a_row() -> None:
    bad, good = report(disk="fail", gpu="ok"), report(disk="ok", gpu="ok")
    assert counted(bad).fails == 1
    assert counted(bad, bad).fails == 2
    assert counted(bad, good, bad).fails == 1
    assert counted(bad, good).oks == 1
    assert counted(good, good, bad).oks == 0
    assert counted(report(disk="warn")).oks == 1


def test_a_check_that_could_not_look_mends_nothing_and_breaks_nothing() -> None:
    bad, hung = report(disk="fail", gpu="ok"), report(disk="unknown", gpu="ok")
    state = counted(bad, hung)
    assert (state.fails, state.oks) == (1, 0)
    assert counted(bad, hung, bad).fails == 2
    assert counted(report(disk="unknown"), report(disk="unknown")).fails == 0


def test_only_the_culprits_have_to_be_well() -> None:
    """A check that never can look (no clock service here) does not keep a node drained for ever."""
    bad = report(disk="fail", clock="unknown")
    state = counted(bad, report(disk="ok", clock="unknown"), start=State(may_be_drained=True))
    assert (state.oks, state.culprits) == (1, ("disk",))
    state = counted(bad, report(disk="unknown", clock="ok"), start=State(may_be_drained=True))
    assert state.oks == 0
    assert counted(bad, report(clock="unknown"), start=State(may_be_drained=True)).oks == 1  # taken out of the file


def test_all_have_to_be_well_if_it_was_forgotten_which_failed() -> None:
    assert counted(report(disk="ok", clock="unknown"), start=State()).oks == 0
    assert counted(report(disk="ok", clock="warn"), start=State()).oks == 1


def test_the_state_survives_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "deep/state.json"
    assert read(path) == State()
    state = counted(report(disk="fail"))
    write(path, state)
    assert read(path) == state
    assert [entry.name for entry in path.parent.iterdir()] == ["state.json"]
    for broken in (b"", b"{", b'{"fails": "many"}', b"\xff"):
        path.write_bytes(broken)
        assert read(path) == State()
    path.write_bytes(b'{"fails": 1, "of_a_later_release": 2}')
    assert read(path).fails == 1


def test_two_runs_at_once_are_one(tmp_path: Path) -> None:
    first = OnlyOne(tmp_path / "state")
    second = OnlyOne(tmp_path / "state")
    assert first.is_held and not second.is_held
    first.close()
    third = OnlyOne(tmp_path / "state")
    assert third.is_held
    second.close()
    third.close()


# ---- our mark


@given(st.text())
def test_what_we_write_is_ours_and_plain(text: str) -> None:
    written = reason.write("flashrec-health", text)
    assert reason.is_ours("flashrec-health", written)
    assert written.isascii() and written.isprintable() and len(written) < 200
    assert not set(written) & set("'\"|=\\$`;&<>") - set(";")


@pytest.mark.parametrize(
    "edited",
    [
        OURS + " ",
        OURS + " seen, J.",
        OURS.replace("read-only", "read-only, ticket 7"),
        OURS.replace("[", "[0"),
        OURS[:-9],
        "flashrec-health: broken",
        "NHC: " + OURS,
        "bad memory",
        "",
    ],
)
def test_an_edited_reason_is_not_ours(edited: str) -> None:
    assert not reason.is_ours("flashrec-health", edited)


def test_another_prefix_is_not_ours() -> None:
    assert not reason.is_ours("flashrec", OURS)
    assert not reason.bears("flashrec", OURS)
    assert reason.bears("flashrec-health", OURS + " seen, J.")


# ---- the decision


def test_a_healthy_node_asks_slurm_nothing() -> None:
    assert not needs_slurm(State(may_be_drained=False), SETTINGS)
    assert not needs_slurm(State(fails=1, may_be_drained=False), SETTINGS)
    assert needs_slurm(State(fails=2, may_be_drained=False), SETTINGS)
    assert needs_slurm(State(), SETTINGS)


def test_drained_after_enough_failures() -> None:
    assert isinstance(decided(node(), State(fails=1)), Keep)
    decision = decided(node(), State(fails=2))
    assert isinstance(decision, Drain)
    assert decision.reason.startswith("flashrec-health: disk: disk is bad [")


@pytest.mark.parametrize("states", [("ALLOCATED",), ("MIXED",), ("IDLE", "COMPLETING")])
def test_a_busy_node_is_left_alone_unless_told_otherwise(states: tuple[str, ...]) -> None:
    busy = node("n1", *states)
    assert decided(busy, State(fails=9)) == Keep("not drained: the node is busy, and drain_busy = no")
    assert isinstance(decided(busy, State(fails=9), settings=settings(drain_busy="yes")), Drain)


@pytest.mark.parametrize("state", ["DOWN", "FAIL", "MAINT", "REBOOT_ISSUED", "POWERED_DOWN"])
def test_a_node_that_slurm_or_somebody_has_taken_is_left_alone(state: str) -> None:
    decision = decided(node("n1", "IDLE", state), State(fails=9))
    assert decision == Keep(f"not drained: Slurm says {state}")


def test_never_more_than_max_drained() -> None:
    others = [drained("n2"), drained("n3", text="flashrec-health: edited by J."), node("n4", reason=OURS)]
    for allowed, drains in ((0, False), (1, False), (2, False), (3, True)):
        decision = decided(node(), State(fails=2), *others, settings=settings(max_drained=allowed))
        assert isinstance(decision, Drain) is drains, allowed
    foreign = node("n5", "IDLE", "DRAIN", reason="bad memory")
    assert isinstance(decided(node(), State(fails=2), foreign), Drain)


@pytest.mark.parametrize("text", ["bad memory", OURS + " seen, J.", "", "flashrec-health: disk"])
def test_another_ones_drain_is_left_alone(text: str) -> None:
    for state in (State(fails=9), State(oks=9), State(oks=9, must_recount=True)):
        decision = decided(node("n1", "IDLE", "DRAIN", reason=text), state, drained("n0", since=1.0))
        assert isinstance(decision, Keep) and not decision.is_drained


def test_undrained_after_enough_good_runs() -> None:
    me = drained("n1")
    assert decided(me, State(oks=2)).is_drained  # type: ignore[union-attr]
    assert isinstance(decided(me, State(oks=3)), Undrain)
    assert decided(me, State(fails=9)).is_drained  # type: ignore[union-attr]
    busy = node("n1", "ALLOCATED", "DRAIN", reason=OURS)
    assert isinstance(decided(busy, State(oks=3)), Undrain)


def test_one_drained_too_many_is_taken_back_later() -> None:
    """Slurm went away between our drain and the second look."""
    state = State(fails=9, must_recount=True)
    assert isinstance(decided(drained("n1", since=5.0), state, drained("n2", since=4.0)), Undrain)
    assert isinstance(decided(drained("n1", since=5.0), state, drained("n2", since=6.0)), Keep)
    assert isinstance(decided(drained("n1", since=5.0), State(fails=9), drained("n2", since=4.0)), Keep)


def settings(**changes: Any) -> Settings:
    return msgspec.structs.replace(SETTINGS, **changes)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abcdefgh")), unique_by=lambda pair: pair[1], max_size=8),
    st.integers(0, 8),
)
def test_of_many_at_once_exactly_the_first_keep_it(stamps: list[tuple[int, str]], allowed: int) -> None:
    nodes: Mapping[str, NodeInfo] = {name: drained(name, since=float(since)) for since, name in stamps}
    kept = [name for name in nodes if not is_one_too_many(nodes[name], nodes, settings(max_drained=allowed))]
    assert sorted(kept) == sorted(name for _, name in sorted(stamps)[:allowed])


def test_an_unknown_time_is_taken_for_an_earlier_one() -> None:
    nodes = {"n1": drained("n1", since=None), "n2": drained("n2", since=5.0)}
    assert is_one_too_many(nodes["n1"], nodes, SETTINGS) and is_one_too_many(nodes["n2"], nodes, SETTINGS)
