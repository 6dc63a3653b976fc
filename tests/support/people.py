"""Somebody without privileges, and a Python that they can run: a virtual environment below /root is closed to them.

A user's job needs an interpreter with torch and this project. If that of the tests can be executed by the user, it is
that one; else the machine's own Python of the same version, told where the packages are.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import sysconfig
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]


class Person(msgspec.Struct, frozen=True):
    """python: what to run; env: what it needs to find torch and flashrec."""

    name: str
    python: str
    env: dict[str, str]


def unprivileged(name: str = "games") -> Person:
    """A user who can run our code; for nobody 26.05 makes no reservation. AssertionError says what is missing."""
    entry = pwd.getpwnam(name)
    paths = os.pathsep.join([str(ROOT), sysconfig.get_paths()["purelib"]])
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    said = []
    quiet = {"PYTHONDONTWRITEBYTECODE": "1"}
    for python, env in ((sys.executable, quiet), (f"/usr/bin/{version}", {"PYTHONPATH": paths, **quiet})):
        done = subprocess.run(
            ["sh", "-c", f"{python} -c 'import torch, flashrec'"], env={"PATH": "/usr/bin:/bin", **env}, cwd="/",
            user=entry.pw_uid, group=entry.pw_gid, extra_groups=[], capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return Person(name, python, env)
        said.append(f"{python}: {done.stderr.strip()[-300:]}")
    raise AssertionError(f"user {name} can run no Python with torch and flashrec:\n" + "\n".join(said))
