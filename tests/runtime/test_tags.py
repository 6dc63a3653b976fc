"""What a worker says of itself while it stands still: where, why, whether it waits, how many collectives it issued."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import flashrec
from flashrec.runtime import quiet, stacks
from flashrec.runtime.groups import Groups
from flashrec.runtime.progress import Progress
from flashrec.transport import page
from flashrec.transport.paths import page_path, stacks_path
from flashrec.wire import messages as m
from tests.runtime import programs


@pytest.mark.torch
def test_who_stands_still_is_told_from_who_waits(make_cluster, tmp_path: Path) -> None:
    cluster = make_cluster(3)
    cluster.start_all(programs.stand_still, folder=str(tmp_path))
    still = cluster.await_beat(1, lambda beat: beat.where == "step" and beat.v == 3, "stands still in step 3")
    for rank in (0, 2):
        waits = cluster.await_beat(rank, lambda beat: beat.v == 3 and beat.waiting, "waits in step 3")
        assert waits.collectives.keys() == still.collectives.keys() != set()
        assert any(waits.collectives[name] > number for name, number in still.collectives.items())
        assert all(waits.collectives[name] >= number for name, number in still.collectives.items())
    again = cluster.await_beat(1, lambda beat: True, "goes on beating")
    assert again == still and again.waiting is False and again.quiet == ""
    asked = cluster.await_message(m.WorkerHello, rank=1)
    assert asked.stacks_signal == stacks.STACKS_SIGNAL
    os.kill(cluster.processes[1].pid, asked.stacks_signal)
    written = stacks_path(cluster.path / "agent", 1, 1)
    cluster.await_beat(1, lambda beat: "in until_told" in written.read_text(), "has written its stacks")
    assert "Thread" in written.read_text() and "in _beat" in written.read_text(), "of all threads"
    (tmp_path / "in-step").touch()

    cluster.await_beat(1, lambda beat: beat.where == "idle" and beat.v == 6, "stands between steps")
    assert page.read(page_path(cluster.path / "agent", 1, 1)) == ("idle", "")
    (tmp_path / "between").touch()

    cluster.await_beat(1, lambda beat: beat.quiet == "inner", "is quiet")
    (tmp_path / "quiet").touch()
    cluster.await_beat(1, lambda beat: beat.quiet == "outer", "is quiet for the outer reason again")
    assert page.read(page_path(cluster.path / "agent", 1, 1)) == ("idle", "outer")
    (tmp_path / "outer").touch()

    cluster.await_end()
    own = [beat for beat in cluster.heartbeats if beat.rank == 1]
    assert {beat.v for beat in own if beat.quiet == "lock"} == {10}, "said before the lock was held"
    assert own[-1].quiet == ""
    written_meanwhile = next(line for line in cluster.log(1).splitlines() if line.startswith("page"))
    assert "idle" in written_meanwhile and "lock" in written_meanwhile


def test_the_page_says_where_a_rank_is(tmp_path: Path) -> None:
    path = page_path(tmp_path / "n1.sock", 3, 2)
    assert page.read(path) is None, "could not look"
    progress = Progress(rank=3, incarnation=2, generation=1)
    progress.page = page.Page(path)
    assert page.read(path) is None, "nothing was said yet"
    progress.where, progress.v = "optimizer", 7
    assert page.read(path) == ("optimizer", "")
    progress.quiet = "ä" * 100
    progress.where = "idle"
    where, reason = page.read(path) or ("", "")
    assert where == "idle" and 0 < len(reason) < 100 and set(reason) == {"ä"}
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_page_does_not_follow_a_link(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("precious")
    link.symlink_to(victim)
    with pytest.raises(OSError):
        page.Page(link)
    assert stacks.register(link) == 0
    assert victim.read_text() == "precious"


def test_a_handler_of_the_script_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[int] = []
    former = signal.signal(stacks.STACKS_SIGNAL, lambda number, _: heard.append(number))
    try:
        assert stacks.register(tmp_path / "stacks") == 0
        assert "has a handler already" in caplog.text
        signal.raise_signal(stacks.STACKS_SIGNAL)
        assert heard == [stacks.STACKS_SIGNAL] and not (tmp_path / "stacks").exists()
    finally:
        signal.signal(stacks.STACKS_SIGNAL, former)


def test_without_flashrec_run_quiet_does_nothing_but_wants_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.delenv("FLASHREC_SOCKET", raising=False)
    model = torch.nn.Linear(1, 1)
    session = flashrec.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with session.quiet("eval"):
        pass
    with pytest.raises(ValueError, match="say why"), quiet.quiet(None, " "):
        pass


class _Group:
    """A group of which `handle` or its backend may say no."""

    is_alive, backend = True, "gloo"

    def __init__(self, name: str, issued: int | None) -> None:
        self.name, self.handle = name, self
        self._issued = issued

    def _get_sequence_number_for_group(self) -> int:
        if self._issued is None:
            raise RuntimeError("no backend")
        return self._issued


def test_a_group_that_cannot_tell_does_not_end_the_heartbeats() -> None:
    groups = Groups(engine=None, progress=None, is_shadow=False, limits=None)
    groups._groups = {name: _Group(name, issued) for name, issued in (("0", 7), ("1", None), ("2", 3))}
    assert groups.look()[1] == {"0": 7, "2": 3}
    groups._groups["0"]._issued = 8
    with groups._lock:  # the main thread replaces the backends
        assert groups.look()[1] == {"0": 7, "2": 3}, "nobody looks meanwhile"
    assert groups.look()[1] == {"0": 8, "2": 3}


def test_a_replacement_that_builds_alone_has_issued_nothing() -> None:
    groups = Groups(engine=None, progress=None, is_shadow=True, limits=None)
    groups._groups = {"0": _Group("0", 7)}
    assert groups.look() == (None, {})
