"""The harness of the detection benchmark: what it reads and reckons, and that a fault that did not fire is told."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.detection import __main__ as bench
from benchmarks.detection import orders, reading, results, rows
from benchmarks.detection.memory import MemoryGroup, NoMemoryGroup
from benchmarks.detection.reading import Alarms
from benchmarks.detection.results import Injection, Results, RowResult
from flashrec.testing import Fault, FaultDirectory, FaultPlan
from flashrec.testing.injector import FaultRaised
from tests.support.cluster import wait_for


def verdict(mono: float, subject: str, state: str, reason: str = "silent") -> dict[str, Any]:
    return {"kind": "verdict", "mono": mono, "subject": subject, "state": state, "reason": reason}


def phase(mono: float, to: str) -> dict[str, Any]:
    return {"kind": "phase", "mono": mono, "to": to, "reason": "because"}


def exited(mono: float, rank: int) -> dict[str, Any]:
    event = {"type": "WorkerExited", "rank": rank, "incarnation": 1, "reason": "killed"}
    return {"kind": "event", "mono": mono, "event": event}


JOURNAL = [
    verdict(5.0, "node n1", "dead", "an earlier one"),
    phase(9.0, "RUNNING"),
    verdict(11.0, "node n1", "suspect"),
    verdict(11.5, "node n2", "dead", "another node"),
    exited(11.6, 0),
    verdict(12.0, "node n1", "dead"),
    phase(12.1, "FENCING"),
    phase(14.0, "RUNNING"),
]


# ---- reading


def test_the_verdict_is_the_first_that_meets_the_fault() -> None:
    seen = reading.sight(JOURNAL, 10.0, reading.is_condemned("n1"))
    assert seen == reading.Sighting(2.0, 4.0, "silent")
    assert reading.sight(JOURNAL, 10.0, reading.is_worker_lost(0)).verdict_s == pytest.approx(1.6)
    assert reading.sight(JOURNAL, 10.0, reading.is_worker_lost(0)).reason == "killed"
    assert reading.sight(JOURNAL, 10.0, reading.is_condemned("n3")) == reading.Sighting(None, None, "")
    assert reading.sight(JOURNAL[:-1], 10.0, reading.is_condemned("n1")).resume_s is None


def test_a_lost_link_is_a_verdict_on_its_node() -> None:
    lines = [verdict(11.0, "fabric link of node n1", "dead")]
    assert reading.sight(lines, 10.0, reading.is_condemned("n1")).verdict_s == 1.0


def test_a_hung_worker_is_seen_when_it_is_found_and_not_when_it_is_gone() -> None:
    lines = [verdict(11.0, "rank 1", "slow"), verdict(12.0, "rank 1", "hung"), exited(13.0, 1)]
    assert reading.sight(lines, 10.0, reading.is_worker_lost(1)).verdict_s == 2.0
    assert reading.alarms(lines[:1], 10.0) == Alarms(), "a straggler is reported, not condemned"
    assert len(reading.alarms(lines[:2], 10.0).false_verdicts) == 1


def test_a_planned_swap_begins_with_the_news_that_the_node_leaves() -> None:
    leaving = {"kind": "event", "mono": 11.0, "event": {"type": "NodeLeaving", "node": "n1", "reason": "drain"}}
    assert reading.sight([leaving], 10.0, reading.is_leaving("n1")).reason == "drain"
    assert reading.sight([leaving], 10.0, reading.is_leaving("n2")).verdict_s is None


def test_suspicion_is_no_false_alarm_and_everything_more_is() -> None:
    doubts = [verdict(11, "node n1", "suspect"), verdict(12, "node n1", "alive")]
    assert reading.alarms(doubts, 10.0) == Alarms(1, 1, ())
    assert reading.alarms(JOURNAL, 13.0) == Alarms(0, 0, ())
    assert len(reading.alarms([verdict(11, "node n1", "dead")], 10.0).false_verdicts) == 1
    assert len(reading.alarms([exited(11, 0)], 10.0).false_verdicts) == 1
    assert len(reading.alarms([phase(11, "FENCING")], 10.0).false_verdicts) == 1
    assert Alarms(1, 1, ("a",)).plus(Alarms(1, 0, ("b",))) == Alarms(2, 1, ("a", "b"))


def test_a_torn_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    tail = reading.JournalTail(path)
    assert tail.read() == []
    path.write_text('{"seq": 1}\n{"se')
    assert tail.read() == [{"seq": 1}]
    with path.open("a") as file:
        file.write('q": 2}\n')
    assert tail.read() == [{"seq": 1}, {"seq": 2}]


# ---- results


def row_of(*verdicts_s: float | None, **changes: Any) -> RowResult:
    injections = tuple(Injection("n1", seconds, seconds and seconds + 1) for seconds in verdicts_s)
    return RowResult(**{"name": "power cut", "expects": "verdict", "aim_s": 2.0, "injections": injections, **changes})


def test_a_row_is_met_only_if_all_of_it_is() -> None:
    assert row_of(1.0, 2.0).is_good
    assert not row_of(1.0, 2.1).is_good, "the worst counts"
    assert not row_of(1.0, None).is_good, "one was not seen"
    assert not row_of().is_good, "nothing was measured"
    assert not row_of(1.0, error="did not fire").is_good
    assert row_of(None, expects="nothing").is_good
    assert not row_of(None, expects="nothing", false_verdicts=("n1: silent",)).is_good


def test_the_table_has_median_and_worst_and_the_paper() -> None:
    text = results.table([row_of(1.0, 1.2, 1.9, None), row_of(None, name="loss", expects="nothing", suspected=2)])
    assert "| power cut | 4 | 1.2 / 1.9; 1 not seen | 2.2 / 2.9 | ≤ 2 | no |" in text
    assert "| loss | 1 | 0 verdicts (2 suspected, 0 refuted) | - | no verdict | yes |" in text
    assert "*4 to 11*" in text


def test_a_row_measured_again_takes_its_place_and_another_machine_starts_anew(tmp_path: Path) -> None:
    first, second = row_of(1.0), row_of(1.0, name="partition")
    found, order = Results({"cpus": 2}), ["partition", "power cut"]
    for row in (first, second, row_of(1.5)):
        found = found.with_row(row, order)
    assert [(row.name, row.verdicts_s) for row in found.rows] == [("partition", [1.0]), ("power cut", [1.5])]
    assert [row.name for row in found.with_row(first, ["power cut"]).rows] == ["power cut"], "no row of that name now"
    results.save(tmp_path / "x.json", found)
    assert results.load(tmp_path / "x.json", {"cpus": 2}) == found
    assert results.load(tmp_path / "x.json", {"cpus": 4}).rows == ()


def test_the_page_shows_the_results_that_are_kept() -> None:
    kept = results.table(msgspec.json.decode(bench.KEPT.read_bytes(), type=Results).rows)
    assert kept in bench.PAGE.read_text() and kept == bench.KEPT.with_suffix(".md").read_text()


def test_a_page_takes_a_new_table_for_the_old(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{results.BEGIN}\n\nold\n{results.END}\nafter\n")
    results.put_into(page, "new\n")
    assert page.read_text() == f"before\n{results.BEGIN}\n\nnew\n\n{results.END}\nafter\n"


# ---- rows and jobs


class CalmJob:
    """Stands in for a job in which nothing ever happens."""

    step_s = 0.5

    def __init__(self, folder: Path) -> None:
        self.faults = FaultDirectory(folder)
        self.orders = orders.Orders(self.faults)
        self.tail = reading.JournalTail(folder / "journal.jsonl")

    def await_settled(self) -> None: ...

    def assert_running(self) -> None: ...

    def a_rank(self, number: int) -> int:
        return 1


@pytest.fixture
def calm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CalmJob:
    monkeypatch.setattr(rows, "FIRE_TIMEOUT_S", 0.02)
    monkeypatch.setattr(bench, "AFTER_S", 0.0)
    monkeypatch.setattr(bench.random, "uniform", lambda *_: 0.0)
    return CalmJob(tmp_path)


def measured(row: rows.Row, job: CalmJob, wanted: int = 2) -> RowResult:
    @contextlib.contextmanager
    def start() -> Iterator[Any]:
        yield job

    return bench.measure_row(row, wanted, start)


def test_an_order_that_nobody_carries_out_fails_the_row(calm: CalmJob) -> None:
    result = measured(rows.Row("process exits", "process", rows.ordered("exit")), calm)
    assert "DidNotFire: exit of rank 1" in result.error and not result.is_good and result.injections == ()


@pytest.mark.parametrize("kind", ["node", "nothing"])
def test_a_fault_that_was_not_seen_to_happen_fails_the_row(kind: Any, calm: CalmJob) -> None:
    mended = []

    def check_fired() -> None:
        raise rows.DidNotFire("no packet was dropped")

    def inject(job: Any, number: int) -> rows.Struck:
        never = reading.is_condemned("n1")
        return rows.Struck(0.0, "n1", never, lambda: mended.append(number), check_fired)

    result = measured(rows.Row("loss", kind, inject, limit_s=0.01), calm)
    assert result.error == "DidNotFire: no packet was dropped" and not result.is_good
    assert mended == [0], "mended all the same"


def test_a_verdict_that_does_not_come_is_counted(calm: CalmJob) -> None:
    never = reading.is_condemned("n1")
    row = rows.Row("cut", "node", lambda job, number: rows.Struck(0.0, "n1", never), limit_s=0.01)
    assert measured(row, calm).num_missed == 2


def test_a_hang_may_take_three_seconds_or_three_steps(calm: CalmJob) -> None:
    row = rows.Row("hang", "hang", rows.ordered("hang"))
    assert (row.aim_s(0.5), row.aim_s(2.0)) == (3.0, 6.0)


# ---- the worker's side


def test_an_order_is_carried_out_once_at_its_place(tmp_path: Path) -> None:
    faults = FaultDirectory(tmp_path)
    injector = orders.OrderedInjector(FaultPlan(str(tmp_path), ()), rank=0)
    injector.visit("forward", 1)
    orders.Orders(faults).give(Fault("a", 0, "forward", "raise", step=0))
    injector.visit("backward", 2)
    assert not faults.has_fired("a")
    with pytest.raises(FaultRaised):
        injector.visit("forward", 3)
    assert faults.fired()["a"].mono > 0
    injector.visit("forward", 4)
    assert injector.due("forward", 4) == [], "hooks that prepare a fault are not set again"


def test_the_kernel_ends_what_eats_up_its_memory(tmp_path: Path) -> None:
    """Where we may make a memory cgroup; elsewhere we are told why not."""
    script = (
        "import sys; from pathlib import Path; from benchmarks.detection.orders import eat;"
        "input(); eat(Path(sys.argv[1]))"
    )
    stamp = tmp_path / "a.stamp"
    try:
        with MemoryGroup.find(32 * 2**20) as group:
            eater = subprocess.Popen([sys.executable, "-c", script, str(stamp)], stdin=subprocess.PIPE)
            group.take(eater.pid)
            eater.communicate(b"\n", timeout=60)
            assert (eater.returncode, group.num_killed()) == (-9, 1)
    except NoMemoryGroup as reason:
        assert str(reason)
        return
    faults = FaultDirectory(tmp_path)
    assert orders.last_stamp(faults, "a") > 0


def test_rows_have_names_of_their_own_and_a_wrong_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    names = [row.name for row in rows.all_rows(Path("/"))]
    assert len(set(names)) == len(names)
    with pytest.raises(SystemExit), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bench", "--rows", "no such"])
        bench.parse()
    assert "the rows are: process exits" in capsys.readouterr().err


def test_busy_loops_use_the_cpu_and_end() -> None:
    from benchmarks.detection.quiet import Machine, busy_cores

    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before, load = children.read_text(), Machine()
    with busy_cores(1):
        wait_for(lambda: load.busy_share() > 0.5 / (os.cpu_count() or 1), "a busy core")
    assert children.read_text() == before


def test_quiet_time_counts_only_if_it_was_bad() -> None:
    from benchmarks.detection.quiet import why_nothing_was_measured as why

    bad = {
        "cpus_busy": 0.99,
        "connect_median_s": 0.1,
        "delay_ms": [50, 50],
        "stop_s": 1,
        "agents_stopped": 3,
        "steps": 9,
    }
    assert why(bad) == ""
    assert "CPUs" in why(bad | {"cpus_busy": 0.3})
    assert "not slow" in why(bad | {"connect_median_s": 0.001})
    assert "no agent" in why(bad | {"agents_stopped": 0})
    assert "no step" in why(bad | {"steps": 0})
    assert json.dumps(bad)
