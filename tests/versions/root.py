"""A Debian root with another Slurm release: made by mmdebstrap, kept in a cache, entered in namespaces of our own.

The cache is $FLASHREC_ROOTS, else ~/.cache/flashrec/roots: NAME/ is a root that is complete, .NAME.new one that is
being made, NAME.lock is held by whoever uses or makes it. Every mount and process is in namespaces that end with us.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

TREE = Path(__file__).parents[2]
ENTER = Path(__file__).with_name("enter.sh")
SUITES = {"22.05": "bookworm", "24.11": "trixie", "26.05": "forky"}
PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "libslurm-dev", "munge", "iproute2", "nftables", "util-linux", "procps"),
    *("python3", "python3-dev", "python3-venv", "gcc", "make", "libc6-dev", "dpkg-dev", "lua5.1", "ca-certificates"),
)
OPTIONS = (
    "--variant=minbase",
    "--mode=root",
    # A frozen mirror's index of "testing" may be past its date; its signature is checked all the same.
    '--aptopt=Acquire::Check-Valid-Until "false"',
    *(f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in ("doc", "man", "locale", "info")),
)
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_KEPT = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "PIP_INDEX_URL",
         "PIP_FIND_LINKS", "PIP_DEFAULT_TIMEOUT", "TERM")  # fmt: skip
_ISOLATED = (  # ends with us, and all that runs inside with it
    *("setpriv", "--pdeathsig", "KILL", "--"),
    *("unshare", "--mount", "--propagation", "private", "--uts", "--pid", "--fork", "--kill-child", "--"),
)


class RootError(Exception):
    """The root cannot be made or used; the message says what to do."""


class Root:
    """One root, ours alone while it is open."""

    def __init__(self, release: str, mirror: str) -> None:
        self.release, self._mirror = release, mirror
        recipe = hashlib.sha256(repr((PACKAGES, OPTIONS, mirror)).encode()).hexdigest()[:8]
        self.name = f"{SUITES[release]}-{recipe}"
        self.cache = Path(os.environ.get("FLASHREC_ROOTS") or Path.home() / ".cache/flashrec/roots")
        self.path = self.cache / self.name

    @contextlib.contextmanager
    def opened(self) -> Iterator[Root]:
        """Made if it is not there, checked, and locked until the end."""
        _check_machine()
        self.cache.mkdir(parents=True, exist_ok=True)
        with (self.cache / f"{self.name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _say(f"waiting for another run to leave {self.path}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.path.exists():
                self._make()
            self._check_release()
            yield self

    def copy_tree(self) -> None:
        """Our working tree, without what git ignores, as /src; a virtual environment that is there stays."""
        target = self.path / "src"
        target.mkdir(exist_ok=True)
        for entry in target.iterdir():
            if entry.name != ".venv":
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        argv = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(argv, cwd=TREE, capture_output=True, check=True).stdout.decode().split("\0")
        for name in filter(None, listed):
            if (TREE / name).is_file():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(TREE / name, target / name, follow_symlinks=False)
        for leftover in (self.path / "var/lib/flashrec-devcluster", self.path / "tmp"):
            shutil.rmtree(leftover, ignore_errors=True)  # of a run that was killed; its processes died with it
        (self.path / "tmp").mkdir()
        (self.path / "tmp").chmod(0o1777)

    def run(self, argv: Sequence[str], log: Path, *, env: Mapping[str, str] | None = None, timeout_s: float) -> int:
        """The exit code of a command inside, in /src; its output goes to `log`. 124 if it did not end in time."""
        shutil.copy2("/etc/resolv.conf", self.path / "etc/resolv.conf", follow_symlinks=True)
        hosts = self.path / "etc/hosts"
        if not hosts.exists():  # a minimal bookworm has none, and a dev cluster mounts its own there
            hosts.write_text("127.0.0.1 localhost\n::1 localhost\n")
        if CERTIFICATES.exists():
            shutil.copy2(CERTIFICATES, self.path / CERTIFICATES.relative_to("/"))
        pip_cache = self.cache / "pip"
        pip_cache.mkdir(exist_ok=True)
        binds = [f"{pip_cache}=/root/.cache/pip"]
        wheels = os.environ.get("PIP_FIND_LINKS", "")
        if wheels.startswith("/") and Path(wheels).is_dir():
            binds.append(f"{wheels}={wheels}")
        inside = {key: os.environ[key] for key in _KEPT if key in os.environ}
        inside |= {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root",
                   "SHELL": "/bin/bash", "USER": "root", "LOGNAME": "root"}  # fmt: skip
        inside |= {"LANG": "C.UTF-8", "PIP_CERT": str(CERTIFICATES), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        inside |= {"BIND": ":".join(binds), **(env or {})}
        with log.open("ab") as out:
            process = subprocess.Popen(
                [*_ISOLATED, str(ENTER), str(self.path), *argv],
                env=inside,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
            try:
                return process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return 124
            finally:
                process.kill()  # and so, by --kill-child, all that runs inside
                process.wait()

    def installed(self, package: str) -> str:
        """Version of a package inside."""
        argv = ["dpkg-query", f"--admindir={self.path}/var/lib/dpkg", "-Wf", "${Version}", package]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    def _make(self) -> None:
        _say(f"making a Debian {SUITES[self.release]} root in {self.path} (once, about half a minute)")
        draft = self.cache / f".{self.name}.new"
        shutil.rmtree(draft, ignore_errors=True)
        log = self.cache / f"{self.name}.log"
        tool = _mmdebstrap(self.cache)
        include = f"--include={','.join(PACKAGES)}"
        argv = [*_ISOLATED, str(tool), *OPTIONS, include, SUITES[self.release], str(draft), self._mirror]
        env = {**os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}"}  # mmtarfilter lies beside it
        with log.open("wb") as out:
            done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False)
        if done.returncode != 0:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise RootError(
                f"mmdebstrap failed with exit code {done.returncode} ({log}):\n{tail}\n"
                f"Is {self._mirror} reachable from here? For another: make test-slurm SLURM={self.release} MIRROR=URL"
            )
        draft.rename(self.path)

    def _check_release(self) -> None:
        found = self.installed("slurmctld")
        if not found.startswith(f"{self.release}."):
            raise RootError(
                f"Debian {SUITES[self.release]} has Slurm {found} now, not {self.release} ({self.path}).\n"
                "Use a snapshot of Debian from when it had: MIRROR=http://snapshot.debian.org/archive/debian/DATE"
            )


def _check_machine() -> None:
    wanted = {"unshare": "util-linux", "setpriv": "util-linux", "git": "git", "dpkg-query": "dpkg"}
    lacks = [
        f"{name} not found: apt-get install {package}" for name, package in wanted.items() if shutil.which(name) is None
    ]
    if os.geteuid() != 0:
        lacks.append("needs root, for a Debian root and network namespaces: run with sudo")
    elif not lacks:
        tried = subprocess.run([*_ISOLATED, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
        if tried.returncode != 0:
            said = tried.stderr.decode(errors="replace").strip()
            lacks.append(f"cannot mount in a namespace ({said}): a container needs --privileged")
    if lacks:
        raise RootError("\n".join(lacks))


def _mmdebstrap(cache: Path) -> Path:
    """The machine's, else Debian's package unpacked into the cache: it needs no installation."""
    found = shutil.which("mmdebstrap")
    if found:
        return Path(found)
    folder = cache / "mmdebstrap"
    tool = folder / "usr/bin/mmdebstrap"
    if not tool.exists():
        if shutil.which("apt-get") is None:
            raise RootError("mmdebstrap not found: install it (Debian, Ubuntu: apt-get install mmdebstrap)")
        folder.mkdir(exist_ok=True)
        argv = ["apt-get", "download", "-q", "mmdebstrap"]
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
        packages = sorted(folder.glob("mmdebstrap_*.deb"))
        if done.returncode != 0 or not packages:
            raise RootError(f"apt-get download mmdebstrap: {done.stderr.strip()}\nTry: apt-get install mmdebstrap")
        subprocess.run(["dpkg", "-x", str(packages[-1]), str(folder)], check=True)
    return tool


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
