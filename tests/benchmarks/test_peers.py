"""The benchmark of peers: what it computes from logs of steps, that faults are seen to fire, what all jobs train."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from benchmarks.peers import __main__ as command
from benchmarks.peers import results, training, trial
from benchmarks.peers.adapters import REFERENCE, all_peers, plain
from benchmarks.peers.job import Cell, Job, JobTrouble, Peer, Processes
from benchmarks.peers.reading import Recovery, StepLine, StepLogs, finals, recovery
from benchmarks.peers.results import BEGIN, END, PAGE, RESULTS, Calm, Results, Row, Run, ratios, table, verdict


def line(step: int, rank: int, began: float, at: float, pid: int = 1) -> StepLine:
    return StepLine(step, rank, began, at, "0x0p+0", pid, "n2")


# ---- what logs say

BEFORE = [line(step, rank, step, step + 0.9) for step in range(7) for rank in (0, 1)]  # steps 0 to 6, a second each


def test_a_step_that_was_in_flight_is_neither_new_nor_done_again() -> None:
    """Rank 0 still finishes step 7, which it had begun; step 8, begun after the fault, waits for the recovery."""
    after = [line(7, 0, 7.0, 8.0), line(7, 1, 9.0, 9.5), line(8, 0, 8.0, 12.0), line(8, 1, 9.6, 12.5)]
    assert recovery([*BEFORE, *after], 7.5, 2) == Recovery(resume_s=2.0, new_s=4.5, whole_s=5.0, redone=1)
    assert recovery([*BEFORE, *after[1:]], 7.5, 2).redone == 0


def test_steps_from_the_checkpoint_on_are_done_again() -> None:
    again = [line(step, rank, 20 + step, 20.9 + step) for step in range(4, 9) for rank in (0, 1)]
    found = recovery([*BEFORE, *again], 7.5, 2)
    assert found == Recovery(resume_s=pytest.approx(17.4), new_s=pytest.approx(20.4), whole_s=found.new_s, redone=3)


def test_who_goes_on_with_fewer_is_whole_later() -> None:
    after = [line(7, 0, 8, 9), line(8, 0, 9, 10), line(9, 0, 10, 11), line(9, 1, 10, 11.5)]
    assert recovery([*BEFORE, *after], 7.5, 2) == Recovery(resume_s=1.5, new_s=1.5, whole_s=4.0, redone=0)


def test_what_did_not_come_is_not_there() -> None:
    assert recovery(BEFORE, 7.5, 2) == Recovery(None, None, None, None)
    assert recovery([*BEFORE, line(5, 0, 8, 9)], 7.5, 2) == Recovery(1.5, None, None, 2)


def test_logs_grow_and_a_torn_line_is_left(tmp_path: Path) -> None:
    logs = StepLogs(tmp_path)
    assert logs.read() == []
    text = msgspec.json.encode(line(3, 1, 0, 1)) + b"\n"
    (tmp_path / "steps-n1-7.jsonl").write_bytes(text + text[:9])
    assert [each.step for each in logs.read()] == [3]
    (tmp_path / "steps-n2-7.jsonl").write_bytes(text)
    with (tmp_path / "steps-n1-7.jsonl").open("ab") as file:
        file.write(text[9:])
    assert len(logs.read()) == 3


# ---- faults


class FakeCluster:
    """One node, whose processes are said to be `found`: outer to inner numbers."""

    def __init__(self, found: dict[int, int]) -> None:
        self._found = found

    def processes(self, node: str) -> dict[int, int]:
        return self._found

    def cut_power(self, node: str) -> float:
        return time.monotonic()


class Quiet(Job):
    def trouble(self) -> str:
        return ""


def test_a_victim_that_is_not_there_is_no_fault() -> None:
    with pytest.raises(trial.DidNotFire, match="no process 5 on n2"):
        trial.kill(FakeCluster({os.getpid(): 4}), line(1, 1, 0, 1, pid=5))  # type: ignore[arg-type]


def test_a_killed_process_has_ended() -> None:
    victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    before = time.monotonic()
    assert before <= trial.kill(FakeCluster({victim.pid: 5}), line(1, 1, 0, 1, pid=5))  # type: ignore[arg-type]
    assert victim.wait() == -9


def test_a_victim_that_lives_was_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)
    monkeypatch.setattr(trial, "FIRE_TIMEOUT_S", 0.01)
    with pytest.raises(trial.DidNotFire, match="rank 1 survived"):
        trial.kill(FakeCluster({os.getpid(): 5}), line(1, 1, 0, 1, pid=5))  # type: ignore[arg-type]


def test_a_node_with_processes_has_not_lost_its_power(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/steps-n2-5.jsonl").write_bytes(msgspec.json.encode(line(7, 1, 0, 1)) + b"\n")
    cell = Cell(FakeCluster({7: 5}), tmp_path, fault_after=7)  # type: ignore[arg-type]
    with pytest.raises(trial.DidNotFire, match="n2 still has processes"):
        trial.inject(cell, Quiet(), StepLogs(cell.out), "node")


def test_a_job_that_ended_is_not_waited_for() -> None:
    class Ended(Quiet):
        def trouble(self) -> str:
            return "rank-0 ended with 1"

    with pytest.raises(JobTrouble, match="the first step: rank-0 ended with 1"):
        trial.wait_for(Ended(), lambda: False, "the first step", 60)


def test_a_job_that_stands_still_is_given_up() -> None:
    class Still(Quiet):
        def logs(self) -> str:
            return "nothing"

    with pytest.raises(JobTrouble, match="the end: not within 0 s"):
        trial.wait_for(Still(), lambda: False, "the end", 0)


# ---- runs of a row


def measured(
    monkeypatch: pytest.MonkeyPatch, outcomes: Sequence[trial.Outcome | Exception], missing: str = ""
) -> results.Cell:
    """A cell of three runs of which these came out, and plain torch's digest is 'same'."""
    queue = iter(outcomes)

    def run(peer: Peer, fault: str | None, kept: Path | None) -> trial.Outcome:
        if fault is None:
            return trial.Outcome(None, ("same", "same"))
        outcome = next(queue)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(trial, "run", run)
    return command.measure(all_peers()[0], "process", argparse.Namespace(repetitions=3, keep=None), {}, missing)


def test_a_run_that_fails_counts_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    good = trial.Outcome(Recovery(1, 2, 3, 0), ("same", "same"))
    other = trial.Outcome(Recovery(1, 4, 3, 0), ("same", "other"))
    cell = measured(monkeypatch, [good, other, JobTrouble("it ended\n\nwhy\nbecause of this")])
    assert [run.equal for run in cell.runs] == [True, False, False]
    assert cell.equality == "1 of 3" and cell.figures("new_s") == [2, 4]
    assert cell.errors == ["it ended … because of this"]


def test_a_fault_that_did_not_fire_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(trial.DidNotFire):
        measured(monkeypatch, [trial.DidNotFire("lives")])


def test_who_is_not_installed_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = measured(monkeypatch, [], missing="no wheel")
    assert cell.errors == ["no wheel"] and len(cell.runs) == 1 and cell.equality == "no"


def test_the_reason_of_pip_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "VENV", tmp_path)
    monkeypatch.setattr(command, "ROOT", tmp_path.parent)
    monkeypatch.setattr(command, "package_version", lambda name: command.NOT_INSTALLED)
    peer = next(peer for peer in all_peers() if peer.package == "torchft-nightly")
    (tmp_path / "torchft-nightly.said").write_text("x\nERROR: No matching distribution\n")
    assert command.missing_of(peer).endswith("ERROR: No matching distribution")


# ---- whole runs


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Peer:
    """Plain torch with this interpreter: the peers' environment is not needed."""
    monkeypatch.setattr(plain, "PEER", dataclasses.replace(plain.PEER, python=Path(sys.executable)))
    return plain.PEER


@pytest.mark.devcluster
@pytest.mark.torch
def test_a_lost_process_is_measured_from_end_to_end(reference: Peer) -> None:
    ours = next(peer for peer in all_peers() if peer.package == "flashrec")
    calm = trial.run(dataclasses.replace(reference, steps=ours.steps), None)
    hit = trial.run(ours, "process")
    assert set(hit.digests) == set(calm.digests) and len(set(calm.digests)) == 1
    assert calm.recovery is None and hit.recovery is not None
    assert hit.recovery.redone == 0 and 0 < hit.recovery.new_s <= hit.recovery.whole_s  # type: ignore[operator]


@pytest.mark.devcluster
@pytest.mark.torch
def test_blocks_take_turns_to_the_end(reference: Peer) -> None:
    ratios, is_equal = trial.pair_up(all_peers()[0], reference, blocks=2, block=3)
    assert len(ratios) == 2 and min(ratios) > 0 and is_equal


@pytest.mark.devcluster
@pytest.mark.torch
def test_who_recovers_nothing_fails_with_a_reason(reference: Peer) -> None:
    with pytest.raises(JobTrouble, match="the end of training: rank-0 ended with 1"):
        trial.run(reference, "process")


# ---- the table


def row(name: str, keeps: str, *new_s: float, error: str = "") -> Row:
    runs = [Run(Recovery(value, value, value, 5), equal=True) for value in new_s]
    runs += [Run(None, False, error)] if error else []
    return Row(name, "1.0", keeps, "best", (results.Cell("process", tuple(runs)),))


TABLE = Results(
    {},
    (
        row("flashrec, a", "memory", 2.0, 4.0, 3.0),
        row("flashrec, b", "memory", 1.0, 2.0),
        row("fast", "memory", 1.2),
        row("slow", "checkpoint", 6.0),
        row("slower", "checkpoint", 15.0, error="it hung"),
    ),
)


def test_ratios_are_to_the_best_of_ours() -> None:
    assert ratios(TABLE, "process") == pytest.approx({"fast": 0.8, "slow": 4.0, "slower": 10.0})
    assert ratios(TABLE, "node") == {}


def test_a_missed_aim_says_by_whom() -> None:
    restarts, peers = verdict(TABLE, "process")
    assert restarts.endswith("missed by slow 4.0") and peers.endswith("missed by fast 0.8")
    kept = Results({}, (TABLE.rows[1], TABLE.rows[4]))
    assert [each.split(": ")[1] for each in verdict(kept, "process")] == ["met, the least is 10.0"] * 2


def test_an_aim_is_for_those_that_were_measured() -> None:
    (only,) = verdict(Results({}, TABLE.rows[:3]), "process")
    assert "every peer" in only
    assert verdict(Results({}, TABLE.rows[:2]), "process") == []


def test_the_table_has_failures_too() -> None:
    text = table(TABLE)
    assert "| flashrec, a | 3 | 3.0 / 4.0 | 3.0 / 4.0 | 3.0 / 4.0 | 5 / 5 | yes |  |" in text
    assert "| slower | 1 of 2 | 15.0 / 15.0 | 15.0 / 15.0 | 15.0 / 15.0 | 5 / 5 | 1 of 2 | 10.0 |" in text
    assert "* slower, process: it hung" in text


def test_overhead_is_the_median_of_neighbours() -> None:
    assert Calm((1.1, 1.3, 1.2)).percent == "20.0 (15.0 to 25.0)"
    assert Calm().percent == "-"


def test_a_row_is_replaced_cell_by_cell() -> None:
    new = row("fast", "memory", 9.0).cells[0]
    found = TABLE.rows[2].with_cell(msgspec.structs.replace(new, fault="node")).with_cell(new)
    assert [cell.fault for cell in found.cells] == ["process", "node"] and found.cells[0].figures("new_s") == [9.0]
    order = [each.name for each in TABLE.rows if each.name != "slow"]
    assert [each.name for each in TABLE.with_row(found, order).rows] == order


def test_results_of_another_machine_are_not_mixed_in(tmp_path: Path) -> None:
    results.save(TABLE, tmp_path, page=None)
    assert results.load(tmp_path / "peers.json", {}) == TABLE
    assert results.load(tmp_path / "peers.json", {"cpus": 3}).rows == ()
    assert (tmp_path / "peers.svg").stat().st_size > 0


def test_the_page_has_the_table_of_the_file() -> None:
    page = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    assert page == (RESULTS / "peers.md").read_text().strip()
    found = msgspec.json.decode((RESULTS / "peers.json").read_bytes(), type=Results)
    assert table(found).strip() == page


# ---- peers and scripts


def test_every_peer_is_told_apart() -> None:
    names = [peer.name for peer in (REFERENCE, *all_peers())]
    assert len(set(names)) == len(names)


def test_only_who_restarts_from_one_gets_a_checkpoint(tmp_path: Path) -> None:
    cell = Cell(SimpleNamespace(), tmp_path, turns="t:peer", block=5)  # type: ignore[arg-type]
    assert "--checkpoints" not in cell.script("plain")
    words = cell.script("plain", checkpoints=True)
    assert words[words.index("--checkpoints") + 1] == str(tmp_path / "checkpoints")
    assert (tmp_path / "checkpoints").is_dir() and words[words.index("--block") + 1] == "5"


def test_each_process_has_a_session_of_its_own(tmp_path: Path) -> None:
    def popen(argv: list[str], *, node: str, **given: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(argv, **given)

    job = Processes(Cell(SimpleNamespace(popen=popen), tmp_path))  # type: ignore[arg-type]
    for name in ("one", "two"):
        job.start(name, [sys.executable, "-c", "import os; print(os.getsid(0) == os.getpid())"], "n1")
    deadline = time.monotonic() + 60
    while not job.trouble() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (tmp_path / "one.log").read_text() == (tmp_path / "two.log").read_text() == "True\n"
    assert job.trouble().startswith("one ended with 0")
    job.close()


def options(tmp_path: Path, **given: object) -> argparse.Namespace:
    return argparse.Namespace(
        **{"out": tmp_path, "steps": 6, "checkpoints": None, "every": 2, "turns": "", "block": 0} | given
    )


def trained(tmp_path: Path, steps: range, folder: Path | None) -> str:
    """Train alone, from the checkpoint if there is one; the digest."""
    torch.manual_seed(0)
    model = training.Transformer()
    optimizer = training.adamw(model)
    checkpoints = training.Checkpoints(options(tmp_path, checkpoints=folder), model, optimizer)
    assert checkpoints.load() == steps.start
    for step in steps:
        training.loss_of(model, step, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.save(step + 1, 0)
    return training.digest(model, optimizer)


def test_a_restart_from_a_checkpoint_has_the_same_bits(tmp_path: Path) -> None:
    whole = trained(tmp_path, range(4), None)
    trained(tmp_path, range(3), tmp_path)  # the checkpoint is that of two steps
    assert trained(tmp_path, range(2, 4), tmp_path) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


def test_the_digest_sees_one_bit_and_no_wrapper() -> None:
    model = training.Transformer()
    optimizer = training.adamw(model)
    before = training.digest(model, optimizer)
    assert training.digest(_Wrapper(model), optimizer) == before
    with torch.no_grad():
        model.position[0, 0] = 2**-100
    assert training.digest(model, optimizer) != before


class _Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_the_recorder_waits_for_its_turn_and_says_when_it_is_done(tmp_path: Path) -> None:
    turns = tmp_path / "turns"
    turns.mkdir()
    (turns / "peer.0").touch()
    recorder = training.Recorder(options(tmp_path, turns=f"{turns}:peer", block=2), rank=1)
    steps = recorder.steps(0)
    for _ in range(2):
        step = next(steps)
        recorder.done(step, 0.5)
        recorder.end_block(step)
    assert (turns / "peer.0.1").exists() and not (turns / "peer.1.1").exists()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TimeoutError, match="no turn"):
        patch.setattr(training, "_TURN_TIMEOUT_S", 0.0)
        next(steps)
    assert [each.step for each in StepLogs(tmp_path).read()] == [0, 1]


def test_a_final_digest_appears_whole(tmp_path: Path) -> None:
    model = training.Transformer()
    optimizer = training.adamw(model)
    training.Recorder(options(tmp_path), rank=0).finish(model, optimizer)
    (name,) = finals(tmp_path)
    assert json.loads((tmp_path / name).read_text())["steps"] == 6
    assert list(finals(tmp_path).values()) == [training.digest(model, optimizer)]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--faults", "node,flood"], "knows process, node and none, not flood"),
        (["--rows", "torchrum"], "no peer begins with 'torchrum'"),
        (["--repetitions", "0"], "at least 1"),
    ],
)
def test_a_mistyped_word_is_refused(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["peers", *words])
    with pytest.raises(SystemExit):
        command.parse()
    assert says in capsys.readouterr().err
