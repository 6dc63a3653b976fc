"""A dev cluster with the plugin, and a `flashrec` that only says how it was started."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from flashrec.devcluster.cluster import DevCluster
from tests.support.cluster import dev_cluster, shared_folder
from tests.support.plugin import build_plugin

# What the plugin makes of an srun, told by whoever it has become.
FAKE = """#!/bin/bash
echo $# >> {log}
echo BECAME
printf 'ARG<%s>\\n' "$@"
env | grep -E '^(FLASHREC|PWD=|SLURM_JOB_ID)' | sed 's/^/ENV /'
echo "ENV NOFILE=$(ulimit -Sn) $(ulimit -Hn)"
echo "ENV FILES="/proc/$$/fd/*
grep SigBlk /proc/self/status
"""


class Site:
    """A cluster whose plugstack.conf the tests rewrite: srun and slurmstepd read it anew each time."""

    def __init__(self, cluster: DevCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.executable, self.log = folder / "flashrec", folder / "started"
        self.executable.write_text(FAKE.format(log=self.log))
        self.executable.chmod(0o755)
        self.log.touch()
        self.log.chmod(0o666)
        self.plugin = build_plugin()
        self.plugstack_conf = cluster.layout.conf_dir / "plugstack.conf"
        self.usual = f"optional {self.plugin} flashrec={self.executable}"
        self.write(self.usual)

    def write(self, *lines: str) -> None:
        self.plugstack_conf.write_text("".join(f"{line}\n" for line in lines))

    @contextlib.contextmanager
    def plugstack(self, *lines: str) -> Iterator[None]:
        self.write(*lines)
        try:
            yield
        finally:
            self.write(self.usual)

    def started(self) -> int:
        """How often `flashrec` has been started so far."""
        return len(self.log.read_text().splitlines())


def complaints(stderr: str) -> str:
    """What a command said, less that it had to wait until Slurm had cleaned up after the job before."""
    waiting = re.compile(r"(srun|salloc): (job|Pending job|Granted job|Job|Nodes) .*")
    return "".join(f"{line}\n" for line in stderr.splitlines() if not waiting.fullmatch(line))


class Became(msgspec.Struct, frozen=True):
    """What a `flashrec` said of itself: its words, its environment (in part), and the signals it has blocked."""

    words: tuple[str, ...]
    environ: dict[str, str]
    blocked: int

    @classmethod
    def parse(cls, text: str) -> Became:
        assert text.count("BECAME") == 1, text
        environ = dict(line.split("=", 1) for line in re.findall(r"^ENV (.*)$", text, re.MULTILINE))
        (blocked,) = re.findall(r"^SigBlk:\s*([0-9a-f]+)$", text, re.MULTILINE)
        return cls(tuple(re.findall(r"ARG<(.*?)>\n", text, re.DOTALL)), environ, int(blocked, 16))


@pytest.fixture(scope="package")
def site() -> Iterator[Site]:
    with (
        shared_folder() as folder,
        dev_cluster(2, slurmd_timeout_s=3600, extra_conf=("LaunchParameters=use_interactive_step",)) as cluster,
    ):
        yield Site(cluster, folder)
