"""What a cluster writes down about itself, the lock around changes of it, and taking one away without a trace.

The record is written before anything is started and removed after everything is gone, so whatever a crash leaves
behind is known to the next `up` or `down`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from flashrec.devcluster import process
from flashrec.devcluster.errors import DevClusterError
from flashrec.devcluster.spec import CONTROL, SWITCH, ClusterSpec, Layout
from flashrec.devcluster.station import Station


class ClusterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`pid_namespace`: where the recorded pids have their meaning. `is_complete`: `up` came to its end."""

    spec: ClusterSpec
    boot_id: str
    pid_namespace: int
    is_complete: bool = False


def new_record(spec: ClusterSpec) -> ClusterRecord:
    return ClusterRecord(spec=spec, boot_id=process.machine_boot_id(), pid_namespace=process.own_pid_namespace())


def write_record(layout: Layout, record: ClusterRecord) -> None:
    draft = layout.record.with_suffix(".new")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
    draft.replace(layout.record)


def read_record(layout: Layout) -> ClusterRecord | None:
    """None if there is none that can be read. Raises DevClusterError inside a cluster: its pids mean others there."""
    try:
        record = msgspec.json.decode(layout.record.read_bytes(), type=ClusterRecord)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    if record.pid_namespace != process.own_pid_namespace() and record.boot_id == process.machine_boot_id():
        raise DevClusterError(
            f"cluster {record.spec.name} was started in another PID namespace; run this where `up` was run,"
            " not inside one of its nodes"
        )
    return record


def is_running(layout: Layout, record: ClusterRecord | None) -> bool:
    """Complete, and its switch and control node have power; nodes may be down."""
    if record is None or not record.is_complete or record.boot_id != process.machine_boot_id():
        return False
    return all(Station(name, layout).is_alive for name in (SWITCH, CONTROL))


def list_clusters(state_dir: Path) -> list[str]:
    """Names of all clusters with a record, running or not."""
    return sorted(path.parent.name for path in state_dir.glob("*/cluster.json"))


def remove(layout: Layout) -> bool:
    """Kill what is recorded, then delete the folder; False if there was none. Call it under `locked`."""
    if not layout.root.exists():
        return False
    record = read_record(layout)
    content = {path.name for path in layout.root.iterdir()}
    if content and not content & {layout.record.name, layout.record.with_suffix(".new").name}:
        raise DevClusterError(f"{layout.root} is not a dev cluster's folder (no {layout.record.name}); not touched")
    if record is None or record.boot_id == process.machine_boot_id():
        for path in sorted((layout.root / "init").glob("*.json")):
            Station(path.stem, layout).kill()
    for path in layout.root.iterdir():
        if path != layout.record:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    layout.record.unlink(missing_ok=True)
    layout.root.rmdir()
    return True


@contextlib.contextmanager
def locked(layout: Layout) -> Iterator[None]:
    """One change of a cluster at a time. The kernel drops the lock with its holder, however that one ends."""
    if not layout.state_dir.exists():
        layout.state_dir.mkdir(parents=True, exist_ok=True)
        layout.state_dir.chmod(0o755)  # whatever the umask: the cluster's users read slurm.conf below it
    while True:
        descriptor = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # The one before us may have deleted the file we waited for.
        with contextlib.suppress(FileNotFoundError):
            if os.stat(layout.lock).st_ino == os.fstat(descriptor).st_ino:
                break
        os.close(descriptor)
    try:
        yield
    finally:
        if not layout.root.exists():
            layout.lock.unlink(missing_ok=True)
        os.close(descriptor)
