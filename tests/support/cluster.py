"""A dev cluster for the length of a test or a module: up on entry, down always, also after a test run was killed.

    @pytest.fixture(scope="module")
    def cluster() -> Iterator[DevCluster]:
        with dev_cluster(num_nodes=4, slurmd_timeout_s=3600) as cluster:
            yield cluster

Clusters are named after the process that owns them; what a killed test run left up is taken down by the next one.
Slurm missing is a failure that names the remedy, never a skip: a suite that skips everything is green as well.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flashrec.devcluster.cluster import DevCluster, take_down
from flashrec.devcluster.errors import wait_until
from flashrec.devcluster.record import list_clusters
from flashrec.devcluster.spec import DEFAULT_STATE_DIR, ClusterSpec

_counter = itertools.count()


def new_name() -> str:
    """A cluster name of this process that no other test uses."""
    return f"test-{os.getpid()}-{next(_counter)}"


@contextlib.contextmanager
def dev_cluster(num_nodes: int = 3, **settings: Any) -> Iterator[DevCluster]:
    """`settings` are ClusterSpec's fields."""
    sweep()
    spec = ClusterSpec(**{"name": new_name(), "num_nodes": num_nodes, **settings})
    with DevCluster.up(spec) as cluster:
        yield cluster


def sweep() -> None:
    """Take down test clusters whose owner is gone."""
    for name in list_clusters(DEFAULT_STATE_DIR):
        prefix, _, rest = name.partition("-")
        owner = rest.partition("-")[0]
        if prefix == "test" and owner.isdigit() and not Path(f"/proc/{owner}").exists():
            take_down(name)


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder every node and every user can write to, as a job directory on a cluster's file system."""
    folder = Path(tempfile.mkdtemp(prefix="flashrec-job-"))
    folder.chmod(0o777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(is_done: Callable[[], bool], what: str, timeout_s: float = 20.0) -> float:
    """Wait for something outside our control; returns time.monotonic() when it was so."""
    wait_until(is_done, timeout_s=timeout_s, what=what)
    return time.monotonic()


def is_gone(pid: int) -> bool:
    """Ended; a zombie that the machine's init has not reaped yet is gone as well."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def await_no_jobs(cluster: DevCluster) -> None:
    """Until Slurm has no job."""
    wait_for(lambda: not cluster.run(["squeue", "--noheader"]).stdout.strip(), "the end of all jobs", 180)


def heal_all(cluster: DevCluster) -> list[str]:
    """Power for every node that has none, and links as they were made. Returns the nodes that lacked something."""
    hurt = [node.name for node in cluster.status().nodes if not node.is_whole]
    for node in hurt:
        cluster.heal(node)
    return hurt


def free_all(cluster: DevCluster) -> None:
    """After a test whose jobs are cancelled: every node is whole, and Slurm has no job. A node that had no power when
    its job ended is asked again only after a minute or more; giving it up and taking it back frees it at once."""
    for node in heal_all(cluster):
        cluster.run(["scontrol", "update", f"nodename={node}", "state=down", "reason=test"], check=False)
        cluster.run(["scontrol", "update", f"nodename={node}", "state=resume"], check=False)
    await_no_jobs(cluster)
