"""What a running manager grants, and what it takes for a request at all."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from flashrec.core import events as e
from flashrec.core.limits import PoolLimits
from flashrec.core.machine import Machine
from flashrec.manager import wishes
from flashrec.manager.faulty import report_faulty
from flashrec.manager.wishes import Answer, Ask, Wishes, ask, has_room_without
from tests.support.cluster import wait_for

ID = "0123456789abcdef"


class Job:
    """Plays the manager. objection: what it has against every request."""

    def __init__(self, objection: str = "", problem: str = "") -> None:
        self.objection, self.problem, self.calls = objection, problem, []  # type: ignore[var-annotated]

    def replace_node(self, node: str, reason: str, now: bool) -> str:
        self.calls.append(("replace now" if now else "replace", node, reason))
        return self.objection

    def report_faulty(self, node: str, reason: str) -> str:
        self.calls.append(("report", node, reason))
        return self.problem

    def drop_node(self, node: str, reason: str) -> str:
        self.calls.append(("drop", node, reason))
        return self.objection


def served(job: Job, job_dir: Path, question: Callable[[], object]) -> object:
    """Run `question` in a thread while the manager's side runs."""

    async def both() -> object:
        serving = asyncio.create_task(Wishes(job, job_dir).run())
        while not (job_dir / "requests").exists():
            await asyncio.sleep(0.01)
        try:
            return await asyncio.to_thread(question)
        finally:
            serving.cancel()

    return asyncio.run(both())


def test_replace_is_done_and_answered(tmp_path: Path) -> None:
    job = Job()
    answer = served(job, tmp_path, lambda: ask(tmp_path, Ask("replace", "n1", "slow"), 10))
    assert answer == Answer(True, "node n1 leaves at a step boundary")
    assert job.calls == [("replace", "n1", "replace asked for: slow")]


def test_replace_now_does_not_wait_for_a_boundary(tmp_path: Path) -> None:
    job = Job()
    answer = served(job, tmp_path, lambda: ask(tmp_path, Ask("replace", "n1", now=True), 10))
    assert answer == Answer(True, "node n1 is being replaced")
    assert job.calls == [("replace now", "n1", "replace asked for")]
    assert not list((tmp_path / "requests").iterdir())


def test_a_file_server_that_hangs_does_not_hold_the_manager_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released, reached = threading.Event(), threading.Event()
    was_released = []

    def hang(path: Path) -> bytes:
        reached.set()
        was_released.append(released.wait(5))  # a manager that is held up cannot release it
        raise OSError("stale file handle")

    monkeypatch.setattr(wishes, "_read", hang)

    async def scene() -> None:
        serving = asyncio.create_task(Wishes(Job(), tmp_path).run())
        while not (tmp_path / "requests").exists():
            await asyncio.sleep(0.01)
        (tmp_path / f"requests/{ID}.ask").write_text("{}")
        while not reached.is_set():
            await asyncio.sleep(0.01)
        released.set()
        while not was_released:
            await asyncio.sleep(0.01)
        serving.cancel()

    asyncio.run(scene())
    assert was_released == [True]


def test_drain_replaces_and_reports(tmp_path: Path) -> None:
    job = Job()
    answer = served(job, tmp_path, lambda: ask(tmp_path, Ask("drain", "n1", "xid 79"), 10))
    assert isinstance(answer, Answer) and answer.is_done and "epilog drains it" in answer.said
    assert job.calls[1] == ("report", "n1", "xid 79")


def test_what_could_not_be_reported_is_said(tmp_path: Path) -> None:
    answer = served(Job(problem="not reported: no place"), tmp_path, lambda: ask(tmp_path, Ask("drain", "n1", "x"), 10))
    assert answer == Answer(False, "node n1 leaves at a step boundary; not reported: no place")


def test_an_objection_is_answered_and_nothing_is_reported(tmp_path: Path) -> None:
    job = Job(objection="no spare is free")
    assert served(job, tmp_path, lambda: ask(tmp_path, Ask("drain", "n1", "x"), 10)) == Answer(
        False, "no spare is free"
    )
    assert len(job.calls) == 1


@pytest.mark.parametrize("objection", ["", "node n1 runs ranks"])
def test_drop_is_not_replace(tmp_path: Path, objection: str) -> None:
    job = Job(objection)
    answer = served(job, tmp_path, lambda: ask(tmp_path, Ask("drop", "n1"), 10))
    assert isinstance(answer, Answer) and answer.is_done == (not objection)
    assert job.calls == [("drop", "n1", "drop asked for")]


def test_nobody_answers(tmp_path: Path) -> None:
    (tmp_path / "requests").mkdir()
    with pytest.raises(TimeoutError, match="no answer within"):
        ask(tmp_path, Ask("replace", "n1"), 0.3)
    assert not list((tmp_path / "requests").iterdir()), "a later manager would find it"


def test_the_folder_is_closed_to_others_and_empty_at_first(tmp_path: Path) -> None:
    (tmp_path / "requests").mkdir(mode=0o777)
    (tmp_path / "requests" / f"{ID}.ask").write_bytes(msgspec.json.encode(Ask("replace", "n1")))
    job = Job()

    def is_closed() -> bool:
        wait_for(lambda: not (tmp_path / "requests" / f"{ID}.ask").exists(), "the old request to go")
        return os.stat(tmp_path / "requests").st_mode & 0o777 == 0o700

    assert served(job, tmp_path, is_closed) and job.calls == []


def test_a_folder_that_is_none_of_ours_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "requests").symlink_to(tmp_path / "elsewhere")
    asyncio.run(asyncio.wait_for(Wishes(Job(), tmp_path).run(), 5))


def test_a_folder_that_was_put_in_its_place_is_not_used(tmp_path: Path) -> None:
    """A colleague who may write to the job directory would have our manager write over any file of ours."""
    requests, away, mine = tmp_path / "requests", tmp_path / "away", tmp_path / "mine"

    def exchange() -> Answer:
        wait_for(lambda: requests.stat().st_mode & 0o777 == 0o700, "the manager to hold the folder")
        (tmp_path / "theirs").mkdir()
        (tmp_path / "theirs" / f"{ID}.ask").write_bytes(b"x")
        (tmp_path / "theirs" / f"{ID}.new").symlink_to(mine)
        requests.rename(away)
        (tmp_path / "theirs").rename(requests)
        away.with_suffix(".d").mkdir()
        (away.with_suffix(".d") / "requests").symlink_to(away)
        return ask(away.with_suffix(".d"), Ask("replace", "n1"), 10)

    mine.write_text("mine")
    requests.mkdir(mode=0o750)
    assert served(Job(), tmp_path, exchange) == Answer(True, "node n1 leaves at a step boundary")
    assert mine.read_text() == "mine" and (requests / f"{ID}.ask").exists()


def forged_link(path: Path) -> None:
    target = path.with_name("target")
    target.write_bytes(msgspec.json.encode(Ask("replace", "n1")))
    path.symlink_to(target)


FORGERIES: list[Callable[[Path], object]] = [
    forged_link,
    os.mkfifo,
    lambda path: path.write_bytes(msgspec.json.encode(Ask("replace", "n1")) + b" " * 5000),
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(b"[]"),
    lambda path: path.write_bytes(b'{"verb": "stop", "node": "n1"}'),
    lambda path: path.write_bytes(b'{"verb": "replace", "node": 7}'),
    lambda path: path.write_bytes(b'{"verb": "replace", "node": "n1", "sudo": true}'),
]


@pytest.mark.parametrize("forge", FORGERIES)
def test_what_is_no_request_is_answered_and_ignored(tmp_path: Path, forge: Callable[[Path], object]) -> None:
    job = Job()
    path = tmp_path / "requests" / f"{ID}.ask"

    def answer() -> bytes:
        forge(path)
        wait_for(path.with_suffix(".answer").exists, "an answer")
        return path.with_suffix(".answer").read_bytes()

    assert b"cannot read the request" in served(job, tmp_path, answer) and job.calls == []  # type: ignore[operator]


# ---- is there room elsewhere?


def machine(*, nodes: int, active: int, swaps: int = 0) -> Machine:
    made = Machine(pool=PoolLimits(swaps, 10.0))
    names = tuple(f"n{index}" for index in range(nodes))
    made.handle(e.JobStarted(names, active, 2), 0.0)
    for name in names:
        made.handle(e.AgentJoined(name, 1), 1.0)
    return made


def test_room_is_a_spare_or_a_pool_that_may_be_asked() -> None:
    assert has_room_without("n0", machine(nodes=3, active=2))
    assert not has_room_without("n0", machine(nodes=2, active=2))
    assert has_room_without("n0", machine(nodes=2, active=2, swaps=1))
    assert has_room_without("n2", machine(nodes=3, active=2)), "the spare itself: nothing has to move"


def test_a_free_place_on_the_node_itself_is_no_room() -> None:
    made = machine(nodes=2, active=2)
    made.members.slots[1].state = "unplaced"
    assert not has_room_without("n0", made)


def test_a_spare_that_is_to_leave_is_no_room() -> None:
    made = machine(nodes=3, active=2)
    made.handle(e.NodeLeaving("n2", "sick", "health"), 2.0)
    assert not has_room_without("n0", made)


def test_a_dead_spare_is_no_room() -> None:
    made = machine(nodes=3, active=2)
    made.handle(e.NodeCondemned("n2", 1, "gone"), 2.0)
    assert not has_room_without("n0", made)


# ---- the report for root

ENVIRON = {"SLURMD_NODENAME": "n1", "SLURM_CLUSTER_NAME": "c"}


def test_reports_are_lines_of_printable_text(tmp_path: Path) -> None:
    folder = tmp_path / "c/n1/7/report"
    folder.mkdir(parents=True)
    assert report_faulty(7, "n2", "a\nn3 b\x1b", ENVIRON, tmp_path) == ""
    assert report_faulty(7, "n4", "x" * 200, ENVIRON, tmp_path) == ""
    assert (folder / "faulty").read_text() == "n2 a?n3 b?\nn4 " + "x" * 100 + "\n"
    for index in range(100):
        said = report_faulty(7, f"n{index}", "x" * 100, ENVIRON, tmp_path)
    assert "full" in said and (folder / "faulty").stat().st_size <= 4096


def test_why_it_could_not_be_reported(tmp_path: Path) -> None:
    assert "does not call flashrec-prolog" in report_faulty(7, "n2", "x", ENVIRON, tmp_path)
    assert "does not run on a node" in report_faulty(None, "n2", "x", ENVIRON, tmp_path)
    assert "does not run on a node" in report_faulty(7, "n2", "x", {}, tmp_path)
