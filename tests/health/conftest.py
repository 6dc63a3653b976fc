"""A folder of checks of the test's own, and a file system on which every write hangs."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.health.support import CheckDir
from tests.support.cluster import wait_for


@pytest.fixture
def checks(tmp_path: Path) -> CheckDir:
    return CheckDir(tmp_path / "checks")


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[Path]:
    """A file system on which every write sleeps uninterruptibly, as on a dead disk."""
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists() or not shutil.which("mkfs.ext4"):
        pytest.skip("freezing a file system needs root, loop devices and mkfs.ext4")
    image, folder = tmp_path / "image", tmp_path / "frozen"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(16 * 2**20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, folder], check=False).returncode != 0:
        pytest.skip("loop devices cannot be mounted here")
    try:
        subprocess.run(["fsfreeze", "--freeze", folder], check=True)
        yield folder
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", folder], check=False)
        wait_for(lambda: subprocess.run(["umount", folder], check=False).returncode == 0, "the file system to be free")


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[Path]:
    """A file system that answers nothing, as a dead file server: even to look for a name in it hangs."""
    if os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("a file system without a server needs root and /dev/fuse")
    folder = tmp_path / "silent"
    folder.mkdir()
    server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
    if ctypes.CDLL(None).mount(b"silent", bytes(folder), b"fuse", ctypes.c_ulong(0), options) != 0:
        os.close(server)
        pytest.skip("FUSE cannot be mounted here")
    try:
        yield folder
    finally:
        os.close(server)  # everybody who hangs gets an error
        subprocess.run(["umount", "--lazy", folder], check=True)
