"""The root's tool: what it says when it cannot work, and that nothing of it is left on the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.cluster import wait_for
from tests.versions import root
from tests.versions.__main__ import summary
from tests.versions.root import ENTER, TREE, Root, RootError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHREC_ROOTS", str(tmp_path / "roots"))
    return tmp_path / "roots"


def fake_debian(path: Path, version: str) -> None:
    """As much of a Debian root as dpkg-query wants."""
    (path / "var/lib/dpkg/updates").mkdir(parents=True)
    (path / "var/lib/dpkg/status").write_text(
        f"Package: slurmctld\nStatus: install ok installed\nArchitecture: amd64\nVersion: {version}\n"
        "Maintainer: x <x@x>\nDescription: x\n\n"
    )


@pytest.mark.devcluster
def test_a_mirror_that_is_not_there_is_said_and_leaves_no_root(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Root("24.11", "http://127.0.0.1:1/debian")
    broken = cache / "mmdebstrap"
    broken.mkdir(parents=True)
    (broken / "tool").write_text("#!/bin/sh\necho 'E: cannot connect'; mkdir -p $6; exit 25\n")
    (broken / "tool").chmod(0o755)
    monkeypatch.setattr(root, "_mmdebstrap", lambda cache: broken / "tool")
    with pytest.raises(RootError, match=r"exit code 25 (.|\n)*cannot connect(.|\n)*MIRROR=URL"), made.opened():
        pass
    assert not made.path.exists()


@pytest.mark.devcluster
def test_a_suite_that_has_moved_on_is_refused(cache: Path) -> None:
    moved = Root("26.05", "http://mirror")
    fake_debian(moved.path, "26.11.1-1")
    with pytest.raises(RootError, match=r"Slurm 26\.11\.1-1 now, not 26\.05"), moved.opened():
        pass
    right = Root("24.11", "http://mirror")
    fake_debian(right.path, "24.11.5-4")
    with right.opened():
        assert right.installed("slurmctld") == "24.11.5-4"


def test_without_root_it_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RootError, match="needs root"), Root("24.11", "http://mirror").opened():
        pass
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RootError, match="unshare not found: apt-get install util-linux"), Root("24.11", "x").opened():
        pass


@pytest.mark.devcluster
def test_mounts_and_processes_end_with_the_command(tmp_path: Path) -> None:
    """The tool is killed in the middle: what ran inside is gone, and the machine has no mount more."""
    inside = tmp_path / "root"
    for name in ("proc", "sys", "dev", "run", "src", "bin", "lib", "lib64", "usr", "etc"):
        (inside / name).mkdir(parents=True)
    before = Path("/proc/mounts").read_text()
    bind = ":".join(f"/{name}={name}" for name in ("usr", "bin", "lib", "lib64"))
    marker = inside / "src/pid"
    inner = [*root._ISOLATED, str(ENTER), str(inside), "sh", "-c", "touch pid; exec sleep 4242.4242"]
    tool = f"import subprocess; subprocess.run({inner!r})"
    process = subprocess.Popen([sys.executable, "-c", tool], env={**os.environ, "BIND": bind})
    wait_for(marker.exists, "the command runs inside", 30)
    assert Path("/proc/mounts").read_text() == before, "mounts are not the machine's"
    process.kill()
    process.wait()

    def sleeps() -> bool:
        lines = [Path(f"/proc/{pid}/cmdline") for pid in os.listdir("/proc") if pid.isdigit()]
        return any(b"4242.4242" in _read(line) for line in lines)

    wait_for(lambda: not sleeps(), "what ran inside is gone", 30)
    assert Path("/proc/mounts").read_text() == before


def test_a_step_that_does_not_exist_is_refused() -> None:
    argv = [sys.executable, "-m", "tests.versions", "24.11", "--only", "everything"]
    done = subprocess.run(argv, cwd=TREE, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no step everything" in done.stderr


def test_the_summary_is_pytests(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"x\n==== 3 passed, 1 skipped in {time.monotonic():.2f}s ====\n")
    assert summary(log) == "3 passed, 1 skipped"
    log.write_text("Successfully installed\n")
    assert summary(log) == "ok"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
