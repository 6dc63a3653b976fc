"""A process we started, told apart from a later one with the same pid, and the processes of a PID namespace.

A recorded pid may have been given away since (or the machine rebooted): the start time decides. Nothing is ever
signalled by name or by a pid that does not match its record.
"""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path

import msgspec

from flashrec.devcluster.errors import NotReadyError

_PF_EXITING = 0x4  # linux/sched.h
_ALL = 0xFFFFFFFF
_LOOK_INTERVAL_MS = 50


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


def is_alive(record: InitRecord | None) -> bool:
    """The recorded process is there and has not begun to end."""
    return record is not None and not _flags(record) & _PF_EXITING


def _flags(record: InitRecord) -> int:
    """The kernel's flags of the recorded process; all set if it is gone, is another one by now, or a zombie."""
    try:
        stat = Path(f"/proc/{record.pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return _ALL
    fields = stat.rpartition(")")[2].split()
    return _ALL if int(fields[19]) != record.start_time or fields[0] in "ZX" else int(fields[6])


def kill_namespace(record: InitRecord, *, timeout_s: float = 10.0) -> None:
    """SIGKILL the init of a PID namespace and return when all in it are dead; nothing to do if it already is gone.

    The kernel ends an init only after it has killed and reaped everything else in the namespace, so the init's pidfd
    becoming readable is the proof for all of them. A zombie whose parent is outside (an `nsenter` that was killed or
    stopped) can hold that up for as long as its parent likes; it is dead all the same, so then each is looked at.
    """
    try:
        pidfd = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return
    try:
        # Checked after the pidfd is held: it cannot be given away any more.
        if _flags(record) == _ALL:
            return
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        deadline = time.monotonic() + timeout_s
        while not poll.poll(_LOOK_INTERVAL_MS):
            left = members(record).keys() - {record.pid}
            if not left and not is_alive(record):
                return
            if time.monotonic() > deadline:
                names = ", ".join(str(pid) for pid in sorted(left))
                raise NotReadyError(f"killed init {record.pid}, but after {timeout_s:g} s there still are: {names}")
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
