"""Node names of every form that sites use, and a thousand of them, through a real controller and back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashrec.devcluster.cluster import DevCluster
from flashrec.slurm.hostlist import compress, expand
from flashrec.slurm.scheduler import Scheduler
from tests.slurm.contract.conftest import Ask
from tests.support.cluster import dev_cluster

pytestmark = pytest.mark.devcluster

NAMES = {
    "padded": [*(f"n{i:03}" for i in range(1, 11)), "n012"],
    "dashes": ["a-1-2", "a-1-3"],
    "domain": [f"tux{i}.dc1" for i in range(4)],
    "dimensions": ["x1y3", "x1y4", "x2y3", "x2y4"],
    "mixed": ["b8", "b9", "b10", "b011", "rack1-gpu07", "solo"],
    "thousand": [f"big{i:04}" for i in range(1, 1001)],
}
LISTS = ["n[001-010,012]", "a-1-2", "a-1-[2-3]", "tux[0-3].dc1", "x[1-2]y[3-4]", "big[0001-1000]", "b[8-10],b011,solo"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    """One node that lives, and many that only slurmctld knows of."""
    where = "NodeAddr=10.77.0.2 Port=9"  # nobody answers there; n0's slurmd would, and Slurm would take them for alive
    nodes = tuple(f"NodeName={name} {where} CPUs=1 State=DOWN" for names in NAMES.values() for name in names)
    with dev_cluster(num_nodes=1, slurmd_timeout_s=3600, extra_conf=nodes) as cluster:
        yield cluster


def test_every_name_is_found(ask: Ask, scheduler: Scheduler) -> None:
    everything = {name for names in NAMES.values() for name in names}
    assert set(ask(scheduler.nodes())) == everything | {"n0"}
    for names in NAMES.values():
        found = ask(scheduler.nodes(names))
        assert list(found) == names
        assert all("DOWN" in node.states and node.name == name for name, node in found.items())


@pytest.mark.parametrize("kind", NAMES)
def test_a_list_that_slurm_wrote_is_read(kind: str, ask: Ask, scheduler: Scheduler) -> None:
    ask(scheduler.create_reservation("r", nodes=NAMES[kind], users=["root"], flags=["MAINT", "IGNORE_JOBS"]))
    try:
        found = ask(scheduler.reservation("r"))
        assert set(found.nodes) == set(NAMES[kind])
        assert found.node_count == len(found.nodes) == len(NAMES[kind])
    finally:
        ask(scheduler.delete_reservation("r"))


def slurms(cluster: DevCluster, hostlist: str) -> list[str]:
    """As Slurm itself takes a list apart; it ends with 0 also where it cannot, and prints nothing."""
    return cluster.run(["scontrol", "show", "hostnames", hostlist]).stdout.split()


@pytest.mark.parametrize("text", LISTS)
def test_our_lists_are_slurms(text: str, ask: Ask, scheduler: Scheduler, cluster: DevCluster) -> None:
    expected = slurms(cluster, text)
    if not expected:
        assert text == "tux[0-3].dc1" and ask(scheduler.version()) < (23, 11), f"Slurm cannot expand {text}"
        return
    assert list(expand(text)) == sorted(expected, key=lambda name: list(expand(text)).index(name))
    assert set(expand(text)) == set(expected)
    assert set(slurms(cluster, compress(expected))) == set(expected)
