"""Options for all tests, and what a failed test of a dev cluster says about its cluster."""

from __future__ import annotations

import subprocess
from collections.abc import Generator

import hypothesis
import pytest

from flashrec.devcluster.cluster import DevCluster
from flashrec.devcluster.errors import log_tail

hypothesis.settings.register_profile("any machine", deadline=None)  # a slow machine is no failure
hypothesis.settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-scenarios", action="store_true", help="write what the machine says into the scenario files"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The cluster is taken down with its logs: what Slurm has to say goes into the report while it is up."""
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            cluster = getattr(value, "cluster", value)
            if isinstance(cluster, DevCluster):
                report.sections.append((f"dev cluster {cluster.spec.name}", _describe(cluster)))
                break
    return report


def _describe(cluster: DevCluster) -> str:
    said = []
    for argv in (["sinfo", "-N", "--long"], ["squeue", "--all", "--steps"], ["squeue", "--all"]):
        try:
            done = cluster.run(argv, check=False, timeout_s=20)
            said.append(f"$ {' '.join(argv)}\n{done.stdout}{done.stderr}")
        except (OSError, subprocess.SubprocessError) as err:
            said.append(f"$ {' '.join(argv)}: {err}")
    layout = cluster.layout
    said.append(log_tail(layout.ctl_log, 40))
    said += [log_tail(layout.slurmd_log(node), 15) for node in cluster.nodes]
    return "\n".join(said)
