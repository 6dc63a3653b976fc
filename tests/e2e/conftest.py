"""Fixtures of the whole-job tests: local jobs that always end, and the undisturbed run they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashrec.devcluster.cluster import DevCluster
from tests.e2e.cluster_job import NodeJob
from tests.e2e.support import LocalJob
from tests.support.cluster import free_all, shared_folder


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


# ---- jobs on a dev cluster: the module that uses these has a fixture `cluster` of scope module


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with shared_folder() as folder:
        yield folder


@pytest.fixture
def node_job(cluster: DevCluster, folder: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., NodeJob]]:
    """Start jobs; afterwards they are cancelled, every node is healed, and Slurm has freed all of them."""
    jobs: list[NodeJob] = []

    def start(**options: object) -> NodeJob:
        name = f"{request.node.name.replace('[', '-').replace(']', '')}-{len(jobs)}"
        jobs.append(NodeJob(cluster, folder, name, **options))  # type: ignore[arg-type]
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()
    free_all(cluster)


@pytest.fixture(scope="module")
def undisturbed_job(cluster: DevCluster, folder: Path) -> Callable[..., Path]:
    """The numbers of a job that lost nothing, by (world size, steps)."""
    known: dict[tuple[int, int], Path] = {}

    def run(ranks: int, steps: int) -> Path:
        if (ranks, steps) not in known:
            job = NodeJob(cluster, folder, f"undisturbed-{ranks}-{steps}", nodes=ranks + 1, spares=1, steps=steps)
            try:
                job.finish(None)
            finally:
                job.close()
            known[ranks, steps] = job.out
        return known[ranks, steps]

    return run
