"""Fixtures of the whole-job tests: local jobs that always end, and the undisturbed run they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.support import LocalJob


@pytest.fixture
def local_job(tmp_path: Path) -> Iterator[Callable[..., LocalJob]]:
    """Start local jobs; whatever happens, none outlives the test."""
    jobs: list[LocalJob] = []

    def start(**options: object) -> LocalJob:
        jobs.append(LocalJob(tmp_path / f"job{len(jobs)}", **options))  # type: ignore[arg-type]
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The numbers of a run that lost nothing: 4 ranks, so many steps; each is computed once a session."""
    known: dict[int, Path] = {}

    def run(steps: int = 10) -> Path:
        if steps not in known:
            job = LocalJob(tmp_path_factory.mktemp("undisturbed"), steps=steps)
            try:
                assert job.wait() == 0, job.output()
            finally:
                job.close()
            known[steps] = job.out
        return known[steps]

    return run
