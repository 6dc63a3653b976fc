"""A station: one machine of the cluster (the switch, the control node or a node), from power on to power cut.

Its truth is its init's record on disk and the kernel, never a variable here: a station may be cut by one process and
healed by another, so everything is looked up anew.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from flashrec.devcluster import nodeinit, process
from flashrec.devcluster.errors import DevClusterError
from flashrec.devcluster.process import InitRecord, load_init_record
from flashrec.devcluster.requirements import SEARCH_PATH, find_program
from flashrec.devcluster.spec import Layout
from flashrec.transport.readable import await_readable

_BOOT_TIMEOUT_S = 20.0


class Station:
    def __init__(self, name: str, layout: Layout) -> None:
        self.name = name
        self.layout = layout
        self._record_path = layout.init_record(name)

    @property
    def init(self) -> InitRecord | None:
        """The init as recorded, alive or not."""
        return load_init_record(self._record_path)

    def write_record(self, record: InitRecord) -> None:
        draft = self._record_path.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode(record))
        draft.replace(self._record_path)

    @property
    def is_alive(self) -> bool:
        return process.is_alive(self.init)

    def living_init(self) -> InitRecord:
        record = self.init
        if record is None or not process.is_alive(record):
            raise DevClusterError(f"{self.name} has no power; `devcluster heal-node {self.name}` boots it")
        return record

    def processes(self) -> dict[int, int]:
        """Every process of the station, its init too: pid on this machine to pid inside; empty without power."""
        record = self.init
        # Only while the init lives: the kernel gives the number of a gone namespace to a new one.
        return process.members(record) if record is not None and process.is_alive(record) else {}

    def boot(self) -> None:
        """A new init in new namespaces. It has no network yet: `netns.plug_in` lays the cable."""
        boot_all([self])

    def kill(self) -> None:
        """Everything in it dies at once and is gone on return. Not a power cut: see `cluster.cut_power`."""
        record = self.init
        if record is not None:
            process.kill_namespace(record)

    def command(
        self,
        argv: Sequence[str],
        *,
        cwd: str | os.PathLike[str] = "/",
        env: Mapping[str, str] | None = None,
        user: tuple[int, int] | None = None,
    ) -> list[str]:
        """The command line that runs `argv` inside, as `user` (uid, gid). It is killed with its caller's end of it."""
        target = str(self.living_init().pid)
        privileges = ["--pdeathsig", "KILL"]
        if user is not None:
            privileges += ["--reuid", str(user[0]), "--regid", str(user[1]), "--init-groups"]
        return [
            *("nsenter", "--target", target, "--mount", "--uts", "--ipc", "--net", "--pid", "--"),
            *("env", f"--chdir={os.fspath(cwd)}", *(f"{key}={value}" for key, value in (env or {}).items())),
            *("setpriv", *privileges, "--", *argv),
        ]

    def start_daemon(self, argv: Sequence[str]) -> None:
        """Run a program that puts itself into the background; its own log says what it does from then on."""
        done = subprocess.run(
            [*self.command(["env", f"SLURM_CONF={self.layout.slurm_conf}", find_program(argv[0]), *argv[1:]])],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            start_new_session=True,
            env=os.environ | {"PATH": SEARCH_PATH},
        )
        if done.returncode != 0:
            raise DevClusterError(f"{self.name}: {argv[0]} did not start: {(done.stdout + done.stderr).strip()}")

    def has_program(self, program: str) -> bool:
        return any(_comm(pid) == program for pid in self.processes())

    def daemon_pid(self, pid_file: Path, program: str) -> int | None:
        """The pid on this machine of the daemon that wrote `pid_file` inside; None if it does not run."""
        try:
            inside = int(pid_file.read_text())
        except (FileNotFoundError, ValueError):
            return None
        for outside, number in self.processes().items():
            if number == inside and _comm(outside) == program:
                return outside
        return None


def boot_all(stations: Sequence[Station]) -> None:
    """Boot several at once; on return each runs its init. None is left half-booted if one fails."""
    launched = []
    try:
        for station in stations:
            argv = [sys.executable, "-I", "-S", nodeinit.__file__]
            argv += [station.name, str(station.layout.hosts)]
            launcher = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            launched.append((station, launcher))
        deadline = time.monotonic() + _BOOT_TIMEOUT_S
        for station, launcher in launched:
            station.write_record(_await_identity(station, launcher, deadline))
        for _, launcher in launched:
            assert launcher.stdin is not None
            launcher.stdin.write("go\n")
            launcher.stdin.flush()
    finally:
        for _, launcher in launched:
            for pipe in (launcher.stdin, launcher.stdout, launcher.stderr):
                if pipe is not None:
                    pipe.close()
            launcher.wait()


def _await_identity(station: Station, launcher: subprocess.Popen[str], deadline: float) -> InitRecord:
    assert launcher.stdout is not None and launcher.stderr is not None
    if not await_readable([launcher.stdout], deadline - time.monotonic()):
        raise DevClusterError(f"{station.name}: did not boot within {_BOOT_TIMEOUT_S:g} s")
    line = launcher.stdout.readline()
    if not line:
        raise DevClusterError(f"{station.name}: did not boot: {launcher.stderr.read().strip()}")
    return msgspec.json.decode(line, type=InitRecord)


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
