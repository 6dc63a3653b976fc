"""Everything a cluster has on disk before its first process starts: folders, configuration, munge key, record.

Made readable for every user of the machine, as a cluster's configuration is, whatever the caller's umask; the munge
key and the controller's state for root alone.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from flashrec.devcluster.record import new_record, write_record
from flashrec.devcluster.slurmconf import render_hosts, render_plugstack_conf, render_slurm_conf
from flashrec.devcluster.spec import ClusterSpec, Layout


def write_files(spec: ClusterSpec, layout: Layout) -> None:
    """The record comes first: a crash at any later point leaves a folder that is known to be ours."""
    layout.root.mkdir(parents=True)
    write_record(layout, new_record(spec))
    for folder, mode in layout.folders(spec.nodes).items():
        folder.mkdir(exist_ok=True)
        folder.chmod(mode)
    layout.munge_key.touch(mode=0o400)
    layout.munge_key.write_bytes(secrets.token_bytes(1024))
    _publish(layout.slurm_conf, render_slurm_conf(spec, layout, memory_mib=_memory_mib()))
    _publish(layout.conf_dir / "plugstack.conf", render_plugstack_conf(spec, layout))
    _publish(layout.hosts, render_hosts(spec))
    for name, text in spec.conf_files.items():
        _publish(layout.conf_dir / name, text)


def write_cgroup_conf(layout: Layout, text: str) -> None:
    _publish(layout.conf_dir / "cgroup.conf", text)


def _publish(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o644)


def _memory_mib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
