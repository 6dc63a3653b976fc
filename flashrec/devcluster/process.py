"""A process we started, told apart from a later one with the same pid, and the processes of a PID namespace.

A recorded pid may have been given away since (or the machine rebooted): the start time decides. Nothing is ever
signalled by name or by a pid that does not match its record.
"""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import msgspec

from flashrec.devcluster.errors import NotReadyError


class InitRecord(msgspec.Struct, frozen=True):
    """The init of a station as `nodeinit` told it. `start_time` in clock ticks since the machine booted."""

    pid: int
    start_time: int
    pid_namespace: int


def load_init_record(path: Path) -> InitRecord | None:
    """None if the station was never booted."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=InitRecord)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _is_same(record: InitRecord) -> bool:
    """The process is there, is the recorded one and is not a zombie that nobody has reaped yet."""
    try:
        stat = Path(f"/proc/{record.pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    fields = stat.rpartition(")")[2].split()
    return int(fields[19]) == record.start_time and fields[0] not in "ZX"


def is_alive(record: InitRecord | None) -> bool:
    return record is not None and _is_same(record)


def kill_namespace(record: InitRecord, *, timeout_s: float = 10.0) -> None:
    """SIGKILL the init of a PID namespace and return when all in it are gone; nothing to do if it already is.

    The kernel ends an init only after it has killed and reaped everything else in the namespace, so the init's pidfd
    becoming readable is the proof for all of them.
    """
    try:
        pidfd = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return
    try:
        # Checked after the pidfd is held: it cannot be given away any more.
        if not _is_same(record):
            return
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            left = ", ".join(str(pid) for pid in members(record))
            raise NotReadyError(f"killed init {record.pid}, but after {timeout_s:g} s there still are: {left}")
    finally:
        os.close(pidfd)


def members(record: InitRecord) -> dict[int, int]:
    """Every living process of the namespace: pid on this machine to pid inside."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            if os.stat(f"/proc/{entry}/ns/pid").st_ino != record.pid_namespace:
                continue
            status = Path(f"/proc/{entry}/status").read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended while we looked
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        if fields["State"].split()[0] not in "ZX":
            found[int(entry)] = int(fields["NSpid"].split()[-1])
    return found


def stop(pid: int, *, timeout_s: float) -> bool:
    """SIGTERM and wait; False if it is still there after `timeout_s`."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))
    finally:
        os.close(pidfd)


def machine_boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def own_pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
