"""A launched process as the agent sees it: a pidfd (never a bare pid that may be reused) and what /proc says.

The launcher makes each worker the leader of its own session, so its whole group (data loader processes, shells) is
ended with it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from pathlib import Path


class WatchedProcess:
    """Holds a pidfd; `fileno()` becomes readable when the process has ended. Raises ProcessLookupError if it has."""

    def __init__(self, pid: int) -> None:
        if pid <= 1:  # 0: not visible from here; to kill "group 1" would kill all processes of the user
            raise OSError(errno.EINVAL, f"not a process that can be watched: {pid}")
        self.pid = pid
        self._fd = os.pidfd_open(pid)
        try:
            self.leads_session = os.getsid(pid) == pid  # else its group is that of all tasks of the job step
        except BaseException:
            os.close(self._fd)
            raise

    def fileno(self) -> int:
        return self._fd

    def kill(self) -> None:
        """SIGKILL the process and everything in its group. Harmless if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
        self.kill_group()

    def kill_group(self) -> None:
        """SIGKILL what is left of the process group (the leader may be gone)."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def is_stopped(self) -> bool:
        """True if the kernel shows the process as stopped (SIGSTOP, a debugger, `scontrol suspend`)."""
        return state_of(self.pid) in ("T", "t")

    def close(self) -> None:
        os.close(self._fd)


def state_of(pid: int) -> str:
    """One-letter process state from /proc/PID/stat; '' if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text[text.rindex(")") + 2]
