"""Where the checks are, and whether root may run them.

A check is a file CHECK or CHECK.py in the check directory; one ending in .py is run with the interpreter we run with,
so a node needs no other. Root runs only files that nobody but root can change: whoever could write them would be root.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import flashrec
from flashrec.health.checkfile import CheckFileError, CheckLine, Plan

INSTALLED = (
    Path(sys.prefix) / "share/flashrec/checks",
    Path("/usr/libexec/flashrec/checks"),
    Path(flashrec.__file__).resolve().parents[1] / "slurm_plugin/health/checks",
)


def check_directory(plan: Plan) -> Path:
    """The plan's own, or the first that was installed. Raises CheckFileError if there is none."""
    if plan.settings.check_dir:
        chosen = Path(plan.settings.check_dir)
        if not chosen.is_dir():
            raise CheckFileError(f"{plan.source}: check_dir = {chosen}: no such directory")
        return chosen
    for directory in INSTALLED:
        if directory.is_dir():
            return directory
    raise CheckFileError(
        f"no checks are installed: none of {', '.join(map(str, INSTALLED))} exists; "
        "`make -C slurm_plugin install` installs them"
    )


def available(directory: Path) -> list[str]:
    """Names of the checks in a directory; what starts with _ or . belongs to them but is none."""
    found = {path.name.removesuffix(".py") for path in directory.iterdir() if path.is_file()}
    return sorted(name for name in found if not name.startswith(("_", ".")) and "." not in name)


def command_of(line: CheckLine, directory: Path, source: str) -> list[str]:
    """The command that runs a line's check. Raises CheckFileError."""
    where = f"{source}:{line.line}"
    script = directory / f"{line.check}.py"
    if script.is_file():
        _trust(script, where)
        return [sys.executable, "-EsSB", str(script), *line.args]
    program = directory / line.check
    if not program.is_file():
        known = ", ".join(available(directory))
        raise CheckFileError(f"{where}: there is no check {line.check} in {directory}; there are: {known}")
    if not os.access(program, os.X_OK):
        raise CheckFileError(f"{where}: {program} is not executable")
    _trust(program, where)
    return [str(program), *line.args]


def _trust(path: Path, where: str) -> None:
    if os.geteuid() == 0:
        doubt = doubt_about(path)
        if doubt:
            raise CheckFileError(f"{where}: not run as root: {doubt}")


def doubt_about(path: Path) -> str:
    """Why somebody but root could change this file, or turn a link on the way to it; '' if nobody can. A sticky
    directory (/tmp) protects what is in it. Raises OSError."""
    path.stat()  # links that go round in circles
    for part in dict.fromkeys((*_on_the_way(path), path.resolve(), *path.resolve().parents)):
        status = part.lstat()
        is_sticky = stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_ISVTX)
        if status.st_uid != 0:
            return f"{part} belongs to user {status.st_uid}; chown root it"
        if stat.S_ISLNK(status.st_mode):
            continue  # whose folder it is in counts
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
            return f"{part} can be written by others than root; chmod go-w it"
    return ""


def _on_the_way(path: Path) -> Iterator[Path]:
    """The file and the folders above it; the same of each link that leads to it."""
    path = Path(os.path.abspath(path))
    for part in (*reversed(path.parents), path):
        if part.is_symlink():
            yield from (part, *part.parents)
            yield from _on_the_way(part.parent / os.readlink(part) / path.relative_to(part))
            return
    yield from (path, *path.parents)
