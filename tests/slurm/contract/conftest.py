"""The cluster and the implementations that the contract suite runs against.

FLASHREC_TEST_SCHEDULERS says which: `cli` (the default), `pyslurm`, or both with a comma; one that is asked for and
does not work is a failure, never a skip.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from flashrec.devcluster.cluster import DevCluster
from flashrec.slurm.cli import CliScheduler
from flashrec.slurm.command import Commands
from flashrec.slurm.pyslurm_client import PyslurmScheduler
from flashrec.slurm.scheduler import Scheduler
from tests.support.cluster import dev_cluster

CALL_TIMEOUT_S = 60.0  # of a test, on a busy machine; the product's own is shorter
NAMES = tuple(os.environ.get("FLASHREC_TEST_SCHEDULERS", "cli").split(","))

Make = Callable[..., Scheduler]
Ask = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with dev_cluster(num_nodes=4, slurmd_timeout_s=3600, features={"n3": "flashspare,rack1"}) as cluster:
        yield cluster


@pytest.fixture
def ask() -> Iterator[Ask]:
    """Run one call to its end; all calls of a test share an event loop."""
    with asyncio.Runner() as runner:
        yield lambda call: runner.run(asyncio.wait_for(call, 2 * CALL_TIMEOUT_S))


@pytest.fixture
def make_cli(cluster: DevCluster) -> Make:
    """A scheduler over Slurm's commands, run on the cluster's login node; `env` is added to theirs."""

    def make(timeout_s: float = CALL_TIMEOUT_S, user: str | None = None, **env: str) -> Scheduler:
        return CliScheduler(Commands(timeout_s, lambda argv: cluster.command(list(argv), cwd="/", user=user, env=env)))

    return make


@pytest.fixture(params=NAMES)
def make(request: pytest.FixtureRequest, cluster: DevCluster, ask: Ask, make_cli: Make) -> Iterator[Make]:
    """A scheduler of each kind that asks from the cluster's login node."""
    made: list[PyslurmScheduler] = []

    def pyslurm(timeout_s: float = CALL_TIMEOUT_S) -> Scheduler:
        made.append(PyslurmScheduler(timeout_s, lambda argv: cluster.command(list(argv), cwd="/")))
        if timeout_s == CALL_TIMEOUT_S:
            ask(made[-1].nodes())
            assert made[-1].uses_pyslurm, "no pyslurm here that matches this Slurm"
        return made[-1]

    yield {"cli": make_cli, "pyslurm": pyslurm}[request.param]
    for scheduler in made:
        ask(scheduler.close())


@pytest.fixture
def scheduler(make: Make) -> Iterator[Scheduler]:
    scheduler = make()
    yield scheduler
    assert getattr(scheduler, "uses_pyslurm", True), "the command line had to take over"
