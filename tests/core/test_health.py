"""When a node is sick and when it is well again, look by look."""

from __future__ import annotations

import pytest

from flashrec.core.health import Found, HealthRules, NodeState

RULES = HealthRules(fail_after=3, well_after=2)
OK, WARN = Found("disk", "ok"), Found("disk", "warn", "nearly full")
BAD, BLIND = Found("disk", "fail", "/tmp is read-only"), Found("disk", "unknown", "needs root")


def after(*looks: Found) -> NodeState:
    """The state after looks of one finding each; the node is admitted after the first."""
    state = NodeState(RULES)
    for found in looks:
        state.look([found])
        state.is_admitted = True
    return state


@pytest.mark.parametrize(
    ("looks", "wanted"),
    [
        ((), "unknown"),
        ((BLIND,), "unknown"),
        ((OK,), "well"),
        ((WARN,), "well"),
        ((BAD,), "sick"),  # before it is admitted
        ((OK, BAD), "well"),
        ((OK, BAD, BAD), "well"),
        ((OK, BAD, BAD, BAD), "sick"),
        ((OK, BAD, BAD, OK, BAD, BAD), "well"),  # in a row
        ((OK, BAD, BLIND, BAD, BLIND, BAD), "sick"),  # could not look: neither counts nor clears
        ((OK, BLIND, BLIND, BLIND, BLIND), "well"),
        ((BLIND, BAD), "unknown"),  # the first look was used up by one that saw nothing
        ((BLIND, BAD, BAD, BAD), "sick"),
        ((BAD, OK), "sick"),
        ((BAD, OK, OK), "well"),
        ((BAD, OK, BAD, OK), "sick"),
        ((BAD, OK, BLIND, OK), "well"),
        ((BAD, BLIND, BLIND, BLIND), "sick"),
        ((OK, Found("gpu", "fail", "lost", fail_after=1)), "sick"),
    ],
)
def test_a_row_of_looks(looks: tuple[Found, ...], wanted: str) -> None:
    assert after(*looks).state == wanted


def test_each_check_is_counted_for_itself() -> None:
    state = NodeState(RULES)
    state.look([OK, Found("nic", "ok")])
    state.is_admitted = True
    for name in ("disk", "nic", "disk", "nic"):
        state.look(
            [
                Found("disk", "fail" if name == "disk" else "ok", "x"),
                Found("nic", "fail" if name == "nic" else "ok", "y"),
            ]
        )
    assert state.state == "well", "four failing looks, but never the same check twice in a row"
    for _ in range(3):
        state.look([Found("nic", "fail", "no carrier"), OK])
    assert (state.state, state.reasons) == ("sick", ("nic: no carrier",))
    for _ in range(2):
        state.look([OK])
    assert state.state == "sick", "another check's good looks do not mend it"


def test_reasons_name_check_and_finding() -> None:
    state = NodeState(RULES)
    state.look([BLIND, Found("nic", "unknown", "no sysfs")])
    assert (state.state, state.reasons) == ("unknown", ("disk: needs root", "nic: no sysfs"))
    assert after(BAD).reasons == ("disk: /tmp is read-only",)
    assert after(OK).reasons == ()


def test_doubt_lasts_from_the_first_look_that_differs_to_the_last_that_is_needed() -> None:
    assert not after(OK).is_in_doubt
    assert after(OK, BAD).is_in_doubt
    assert after(OK, BAD, BAD).is_in_doubt
    assert not after(OK, BAD, BAD, BAD).is_in_doubt, "known to be sick: no need to hurry"
    assert not after(OK, BAD, OK).is_in_doubt
    assert after(BAD, OK).is_in_doubt
    assert not after(BAD, OK, OK).is_in_doubt
