"""Mounts: is each PATH a mount point, of the expected kind, and does it answer?

A dead file server leaves the mount in place and hangs everybody who touches it, so each PATH is touched by a child
process, which is left behind if it does not come back within --timeout-s.
"""

from __future__ import annotations

import argparse
import os
import re
import select
from pathlib import Path

from _checklib import Findings, main, parser_of


def look(args: argparse.Namespace, found: Findings) -> None:
    mounted = mounts(args.proc / "self/mountinfo")
    found.facts["mounts"] = len(mounted)
    waiting: dict[int, str] = {}
    for wanted in args.paths:
        path, _, kind = wanted.partition("=")
        if path not in mounted:
            found.fail(f"{path} is not mounted")
        elif kind and not re.fullmatch(re.escape(kind).replace(r"\*", ".*"), mounted[path]):
            found.fail(f"{path} is mounted as {mounted[path]}, expected {kind}")
        else:
            waiting[touch(args.root / path.lstrip("/"))] = path
    for pidfd, path in waiting.items():  # they all started at once
        await_child(pidfd, path, args.timeout_s, found)


def mounts(mountinfo: Path) -> dict[str, str]:
    """Mount point to type; the last mount on a place counts. Raises OSError."""
    found = {}
    for line in mountinfo.read_text().splitlines():
        left, _, right = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), left.split()[4])
        found[point] = right.split()[0]
    return found


def touch(path: Path) -> int:
    """pidfd of a child that looks into `path`: exit code 0 if it could."""
    pid = os.fork()
    if pid == 0:
        try:
            os.statvfs(path)
            with os.scandir(path) as entries:
                next(entries, None)
            os._exit(0)
        except PermissionError:
            os._exit(0)  # it answered
        except BaseException:
            os._exit(1)
    return os.pidfd_open(pid)


def await_child(pidfd: int, path: str, timeout_s: float, found: Findings) -> None:
    if not select.select([pidfd], [], [], timeout_s)[0]:
        found.fail(f"{path} does not answer within {timeout_s:g} s")
        return
    result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    if result is None or result.si_status != 0:
        found.fail(f"{path} is mounted but cannot be read")


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("paths", nargs="+", metavar="PATH[=TYPE]", help="TYPE as in mount -t, with *: nfs*")
    parser.add_argument("--timeout-s", type=float, default=5.0, help="default: %(default)s")
    parser.add_argument("--proc", type=Path, default=Path("/proc"))
    parser.add_argument("--root", type=Path, default=Path("/"))
    main("mounts", parser, look)
