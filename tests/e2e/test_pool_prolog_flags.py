"""Where an administrator uses prolog flags, jobs begin and end in other steps: both ends of a companion job again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashrec.devcluster.cluster import DevCluster
from tests.e2e.test_pool_job import (
    calm,
    make_pool,
    pool_job,
    pytestmark,
    test_a_job_that_is_ended_gives_its_node_back,
    test_a_lost_node_is_replaced_from_the_pool,
)
from tests.support.cluster import dev_cluster

__all__ = [
    "calm",
    "pool_job",
    "pytestmark",
    "test_a_job_that_is_ended_gives_its_node_back",
    "test_a_lost_node_is_replaced_from_the_pool",
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    """Node n4 is the pool."""
    flags = ("PrologFlags=Alloc,Contain", "Prolog=/bin/true")
    with dev_cluster(num_nodes=5, slurmd_timeout_s=3600, extra_conf=flags) as cluster:
        make_pool(cluster)
        yield cluster
