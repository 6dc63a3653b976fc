"""Whose a job directory may be: its default name, flashrec-JOBID, can be guessed by everybody on the cluster."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flashrec.manager.entry import make_job_dir
from flashrec.manager.request import RequestError


def test_a_new_one_can_be_written_to_by_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_job_dir(tmp_path / "a" / "b", is_asked_for=False)
    finally:
        os.umask(before)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o755


def test_one_that_is_there_is_used(tmp_path: Path) -> None:
    make_job_dir(tmp_path, is_asked_for=False)
    make_job_dir(tmp_path, is_asked_for=True)


def test_one_that_somebody_else_has_made_must_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(RequestError, match="was made by another user: choose another one with --job-dir"):
        make_job_dir(tmp_path, is_asked_for=False)
    make_job_dir(tmp_path, is_asked_for=True)


@pytest.mark.parametrize("is_asked_for", [True, False])
def test_what_is_no_directory_is_refused(tmp_path: Path, is_asked_for: bool) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link", "file/below"):
        with pytest.raises(RequestError, match="cannot make the job directory"):
            make_job_dir(tmp_path / name, is_asked_for=is_asked_for)
