"""The three daemons of a cluster: where each runs, how it is started, known to run, and stopped.

All of them put themselves into the background, so the init of their station is their parent and a stopped one can be
started again without anything else noticing. What they have to say is in their logs; every failure here quotes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashrec.devcluster import process
from flashrec.devcluster.errors import DevClusterError, log_tail, wait_until
from flashrec.devcluster.spec import Layout
from flashrec.devcluster.station import Station

_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Daemon:
    station: Station
    program: str
    argv: tuple[str, ...]
    pid_file: Path
    log: Path

    @property
    def label(self) -> str:
        return f"{self.program} on {self.station.name}"

    @property
    def pid(self) -> int | None:
        """Its pid on this machine; None if it does not run."""
        return self.station.daemon_pid(self.pid_file, self.program)

    def start(self) -> None:
        start_all([self])

    def stop(self) -> None:
        """End it as its service script would; nothing to do if it does not run."""
        pid = self.pid
        if pid is not None and not process.stop(pid, timeout_s=_STOP_TIMEOUT_S):
            raise DevClusterError(
                f"{self.label}: still there {_STOP_TIMEOUT_S:g} s after SIGTERM\n{log_tail(self.log)}"
            )

    def _launch(self) -> None:
        # One left behind by a power cut names a pid that means something else after the reboot.
        self.pid_file.unlink(missing_ok=True)
        self.station.start_daemon(self.argv)

    def _await(self) -> None:
        def is_up() -> bool:
            if self.pid is not None:
                return True
            if not self.station.has_program(self.program):
                raise DevClusterError(f"{self.label}: ended while starting\n{log_tail(self.log)}")
            return False

        wait_until(
            is_up,
            timeout_s=_START_TIMEOUT_S,
            what=f"{self.label} to start",
            explain=lambda: log_tail(self.log),
        )


def start_all(daemons: Sequence[Daemon]) -> None:
    """Start those that do not run; on return all do. Raises DevClusterError with the log of the first that does not."""
    starting = [daemon for daemon in daemons if daemon.pid is None]
    for daemon in starting:
        daemon._launch()
    for daemon in starting:
        daemon._await()


def munged(switch: Station, layout: Layout) -> Daemon:
    """One for the whole cluster, reached from every station by its socket's path. It has no part in any fault."""
    private = layout.munge_key.parent
    pid_file = layout.munge_dir / "munged.pid"
    argv = (
        "munged",
        f"--key-file={layout.munge_key}",
        f"--socket={layout.munge_socket}",
        f"--pid-file={pid_file}",
        f"--log-file={layout.munge_log}",
        f"--seed-file={private / 'munged.seed'}",
    )
    return Daemon(switch, "munged", argv, pid_file, layout.munge_log)


def slurmctld(control: Station, layout: Layout) -> Daemon:
    return Daemon(control, "slurmctld", ("slurmctld",), layout.ctl_pid, layout.ctl_log)


def slurmd(node: Station, layout: Layout) -> Daemon:
    """It finds its NodeName by the station's host name."""
    return Daemon(node, "slurmd", ("slurmd",), layout.slurmd_pid(node.name), layout.slurmd_log(node.name))
