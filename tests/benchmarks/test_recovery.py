"""The figures of `make bench-recovery`, from lines as the journal has them."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.recovery import results
from benchmarks.recovery.__main__ import gather
from benchmarks.recovery.results import Measured, Results, Row


def event(mono: float, kind: str, rank: int, life: int) -> dict:
    return {"mono": mono, "kind": "event", "event": {"type": kind, "rank": rank, "incarnation": life}}


LINES = [
    event(1.0, "WorkerReported", 1, 1),
    {"mono": 5.0, "kind": "effect", "effect": {"type": "LaunchWorkers", "placement": {
        "n2": [{"rank": 1, "incarnation": 2}], "n3": [{"rank": 2, "incarnation": 5}]}}},
    event(5.1, "WorkerReported", 0, 1),
    event(5.25, "WorkerStarted", 1, 2), event(5.5, "WorkerStarted", 2, 5),
    event(6.0, "WorkerJoined", 1, 2), event(5.75, "WorkerJoined", 2, 5),
    event(6.5, "WorkerReported", 1, 2),
]  # fmt: skip


def test_parts_are_those_of_the_slowest_replacement_and_only_of_replacements() -> None:
    assert results.parts(LINES, 4.0) == {"start": 0.5, "script": 1.0}
    assert results.parts([*LINES, event(7.0, "WorkerReported", 2, 5)], 4.0)["build"] == 2.0
    assert results.parts(LINES, 5.05) == {}, "nothing was launched since"


def row(fault: str, tier: str, *rto_s: float, error: str = "") -> Row:
    phases = {"detect": None, "fence": 0.25, "launch": 0.5}
    return Row(
        fault, tier, [Measured("rank 0", each, phases, {"start": 0.125}) for each in rto_s], error, "2026-11-30", "abc"
    )


MACHINE = {"cpus": 2, "kernel": "6.1", "slurm": "slurm 22.05.8", "python": "3.11.7", "torch": "2.13.0", "nodes": 5}


def test_median_and_worst_stand_in_the_table_and_what_was_not_measured_is_empty() -> None:
    text = results.table(
        Results(MACHINE, [row("SIGKILL", "hot", 0.5, 1.0, 3.0), row("SIGSTOP", "hot", error="no victim")])
    )
    _, _, first, second = text.splitlines()
    assert (
        first
        == "| SIGKILL | hot | 3 | 1.000 / 3.000 |  | 0.250 / 0.250 | 0.500 / 0.500 |  |  |  | 0.125 / 0.125 |  |  |"
    )
    assert second.startswith("| SIGSTOP | hot | 0 (no victim) |  |")


def test_rows_that_are_measured_again_are_replaced_in_order() -> None:
    old = Results(MACHINE, [row("a", "warm", 1.0), row("gone", "warm", 1.0), row("b", "warm", 1.0)])
    new = old.with_rows([row("b", "warm", 2.0), row("a", "hot", 3.0)], [("a", "warm"), ("a", "hot"), ("b", "warm")])
    assert [(each.fault, each.tier, each.rto_s) for each in new.rows] == [
        ("a", "warm", [1.0]), ("a", "hot", [3.0]), ("b", "warm", [2.0]),
    ]  # fmt: skip


def test_runs_can_be_added_and_are_put_together() -> None:
    first = [row("a", "warm", 1.0), row("b", "warm", 2.0)]
    new = results.added([row("a", "warm", 3.0, error="stopped"), row("c", "hot", 4.0)], first)
    assert [(each.fault, each.rto_s, each.error) for each in new] == [("a", [1.0, 3.0], "stopped"), ("c", [4.0], "")]
    rows: list[Row] = []
    gather(iter([row("a", "hot", 1.0), row("b", "hot", 2.0), row("a", "hot", 3.0), row("b", "hot", error="no")]), rows)
    assert [(each.fault, each.rto_s, each.error) for each in rows] == [("a", [1.0, 3.0], ""), ("b", [2.0], "no")]


def test_what_is_kept_belongs_to_one_machine_and_its_versions(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{results.BEGIN}\nold\n{results.END}\nafter\n")
    found = Results(MACHINE, [row("SIGKILL", "hot", 0.5)])
    results.save(found, tmp_path, page)
    assert results.load(MACHINE, tmp_path) == found
    assert results.load(MACHINE | {"torch": "2.14"}, tmp_path).rows == []
    assert results.load(MACHINE, tmp_path / "nowhere").rows == []
    text = page.read_text()
    assert "| SIGKILL | hot | 1 |" in text and "old" not in text and text.endswith("after\n")
    assert "torch 2.13.0; 5 nodes" in text and "Measured 2026-11-30 at commit abc." in text
    assert json.loads((tmp_path / "recovery.json").read_text())["machine"] == MACHINE
    assert (tmp_path / "recovery.svg").stat().st_size > 0
