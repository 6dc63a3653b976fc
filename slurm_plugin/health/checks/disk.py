"""Disks: is there room, is it writable, does a write arrive?

PATH... are mount points or folders. A file system that the kernel has set read-only (its answer to I/O errors) fails.
--write-test also writes, syncs, reads back and removes a small file in each PATH.
"""

from __future__ import annotations

import argparse
import os

from _checklib import Findings, main, parser_of


def look(args: argparse.Namespace, found: Findings) -> None:
    for path in args.paths:
        try:
            look_at(path, args, found)
        except FileNotFoundError:
            found.fail(f"{path} does not exist")
        except PermissionError as err:
            found.unknown(f"needs root: {err}")
        except OSError as err:
            found.fail(f"{path}: {err.strerror}")


def look_at(path: str, args: argparse.Namespace, found: Findings) -> None:
    at = os.statvfs(path)
    free = 100 * at.f_bavail / at.f_blocks if at.f_blocks else 100.0
    inodes = 100 * at.f_favail / at.f_files if at.f_files else 100.0  # some file systems count none
    found.facts |= {f"{path}:free_percent": round(free, 1), f"{path}:free_inodes_percent": round(inodes, 1)}
    if at.f_flag & os.ST_RDONLY:
        found.fail(f"{path} is mounted read-only")
        return
    if free < args.min_free_percent:
        found.fail(f"{path} has {free:.1f} % free, at least {args.min_free_percent:g} % wanted")
    if inodes < args.min_inodes_percent:
        found.fail(f"{path} has {inodes:.1f} % of its inodes free, at least {args.min_inodes_percent:g} % wanted")
    if args.write_test:
        write_and_read(path)


def write_and_read(folder: str) -> None:
    """Raises OSError. A new file that nobody else can have put there, so root may do it in /tmp as well."""
    name = os.path.join(folder, f".flashrec-health-{os.urandom(8).hex()}")
    wanted = os.urandom(4096)
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, wanted)
        os.fsync(fd)
        if os.pread(fd, len(wanted), 0) != wanted:
            raise OSError(5, "what was written is not what is read")
    finally:
        os.close(fd)
        os.unlink(name)


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("paths", nargs="+", metavar="PATH")
    parser.add_argument("--min-free-percent", type=float, default=5.0, help="default: %(default)s")
    parser.add_argument("--min-inodes-percent", type=float, default=2.0, help="default: %(default)s")
    parser.add_argument("--write-test", action="store_true")
    main("disk", parser, look)
