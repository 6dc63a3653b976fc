"""What is in the packages must be what `make install` installs, file by file."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

from tests.support.plugin import make

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def output(*argv: str | Path) -> str:
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, f"{argv}:\n{done.stdout}{done.stderr}"
    return done.stdout


def installed(folder: Path, *settings: str) -> dict[str, tuple[int, bytes]]:
    """Files of `make install` below DESTDIR: path to mode and content."""
    root = folder / "root"
    make("install", f"BUILD={folder / 'build'}", f"DESTDIR={root}", *settings)
    return files_below(root)


def files_below(root: Path) -> dict[str, tuple[int, bytes]]:
    return {
        f"/{path.relative_to(root)}": (path.stat().st_mode & 0o777, path.read_bytes())
        for path in root.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


def release() -> str:
    """'22.05': the Slurm that packages built here are for."""
    for line in Path("/usr/include/slurm/slurm_version.h").read_text().splitlines():
        if line.startswith("#define SLURM_VERSION_NUMBER"):
            number = int(line.split()[2], 16)
            return f"{number >> 16}.{number >> 8 & 0xFF:02d}"
    raise AssertionError("slurm_version.h names no version")
