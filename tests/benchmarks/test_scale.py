"""The benchmark of scale: what it computes, and that a small job goes through all of it."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.scale import model
from benchmarks.scale.__main__ import measure, order
from benchmarks.scale.results import END, PAGE, RESULTS, Results, assumptions_table, begin, losses_table, parts, take


def mark(what: str, at: float) -> dict[str, object]:
    return {"what": what, "at": at, "cpu_s": 0.0}


def test_the_parts_of_a_recovery_add_up() -> None:
    """Also of one that was fenced twice: the last phases count."""
    line = {
        "lost_at": 10.0,
        "marks": [
            mark("condemned", 11.5), mark("FENCING", 11.6), mark("condemned", 11.7), mark("FENCING", 11.7),
            mark("PLACING", 12.0), mark("FORMING", 12.5), mark("RESTORING", 13.5), mark("RUNNING", 13.75),
        ],
        "agents_marks": {"plan": [12.6, 12.75], "posted": [12.6, 12.8], "keys": [12.7, 13.0], "resume": [13.8, 14.0]},
    }  # fmt: skip
    found = parts(line)
    whole = ("fence", "place", "form", "restore", "resume")
    assert [found[part] for part in whole] == pytest.approx([0.5, 0.5, 1.0, 0.25, 0.25])
    assert found["control"] == pytest.approx(sum(found[part] for part in whole)) == pytest.approx(2.5)
    assert (found["detection"], found["total"]) == pytest.approx((1.5, 4.0))
    assert (found["plan"], found["keys"]) == pytest.approx((0.25, 0.4))


def test_between_points() -> None:
    points = ((10, 1.0), (20, 3.0), (40, 4.0))
    assert [model.between(points, at) for at in (5, 10, 15, 30, 60)] == pytest.approx([1.0, 1.0, 2.0, 3.5, 5.0])


def test_the_model_adds_what_is_measured_to_what_is_assumed() -> None:
    ours = model.recovery(10_000, half_step=20.0, detection=1.5, control=0.5)
    assert ours.links == pytest.approx(7.0) and ours.copy == pytest.approx(16 / 17.5)
    assert ours.total == pytest.approx(1.5 + 0.5 + 30 + 7.0 + 16 / 17.5 + 20)
    assert model.without(1824) == 1800 + 231 + 900


def test_the_papers_rows_add_up() -> None:
    for _, devices, detection, restart, half, total in model.PAPER:
        assert detection + restart + half == pytest.approx(total, abs=1), devices


@pytest.mark.parametrize("name", ["scale.md", "scale-quiet.md", "scale-model.md", "scale-assumptions.md"])
def test_the_page_has_the_tables_of_the_files(name: str) -> None:
    on_page = PAGE.read_text().partition(begin(name))[2].partition(END)[0].strip()
    assert on_page and on_page == (RESULTS / name).read_text().strip()


def test_the_page_has_the_assumptions_of_the_model() -> None:
    assert assumptions_table().strip() in PAGE.read_text()


@pytest.mark.parametrize("rendezvous", ["root", "mesh"])
def test_a_small_job_goes_through_all_of_it(rendezvous: str) -> None:
    """Real manager, real connections. One lost node costs each agent the same few messages."""
    lose = ((1, "reset"), (1, "silence")) if rendezvous == "root" else ((1, "reset"),)
    results = Results({})
    take(results, measure(msgspec.structs.replace(order(64, 1, 0.5, rendezvous, is_full=False), lose=lose)))
    assert {(loss.nodes, loss.how) for loss in results.losses} == set(lose)
    for loss in results.losses:
        assert min(min(values) for values in loss.seconds.values()) > -0.01, loss
    assert results.quiet[0].beats_per_s > 0 and results.starts[0].devices == 64
    one = next(loss for loss in results.losses if loss.how == "reset")
    if rendezvous == "root":
        # fence, plan, resume, and the keys of ten groups: one of all ranks, eight across nodes, one of the node
        assert one.per_agent["messages in"] <= 13
        assert one.per_agent["messages out"] <= 8
    assert losses_table(results).count("\n") == 2 + len(lose)
