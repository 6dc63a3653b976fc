"""The folder of checkpoints: what has a name is whole, and what goes loses its name first."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrec.runtime.checkpoint_folder import ABOUT, CheckpointFolder


def put(folder: CheckpointFolder, step: int) -> None:
    draft = folder.draft(step, token=step)
    (draft / "part").write_text(str(step))
    folder.put_in_place(draft, step, {"world_size": 4})


def test_a_draft_is_no_checkpoint(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "kept", keep=2)
    assert folder.steps() == []
    (folder.draft(7, token=1) / "of a rank that is lost").write_text("half")
    folder.of(8).mkdir()  # of somebody else
    assert folder.steps() == [] and not folder.has(7) and not folder.has(8)
    put(folder, 7)
    assert folder.steps() == [7] and folder.has(7)
    assert {path.name for path in folder.of(7).iterdir()} == {"part", ABOUT}, "nothing of another draft of the step"
    assert folder.about(7)["world_size"] == 4 and folder.about(7)["step"] == 7


def test_the_newest_stay_and_drafts_go(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (5, 10, 123_456_789, 15):
        put(folder, step)
    folder.draft(16, token=1)
    (tmp_path / ".old-00000001").mkdir()
    folder.tidy()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000015", "step-123456789"]


def test_what_is_being_deleted_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    put(folder, 5)
    put(folder, 10)
    monkeypatch.setattr("shutil.rmtree", lambda path, ignore_errors: None)  # ended in the middle of it
    folder.tidy()
    assert folder.steps() == [10]
    assert (tmp_path / ".old-00000005" / ABOUT).exists()


def test_a_second_one_of_the_same_step_does_not_replace_the_first(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    put(folder, 5)
    with pytest.raises(OSError):
        put(folder, 5)
    assert folder.steps() == [5]
