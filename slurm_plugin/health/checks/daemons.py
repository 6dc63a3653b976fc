"""Daemons: does each NAME run, and does munge vouch for us?

NAME is a program's name as the kernel shows it (at most 15 characters). --munge makes and checks one credential, which
needs a munged that answers.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

from _checklib import CommandError, Findings, command_output, main, parser_of, read_text


def look(args: argparse.Namespace, found: Findings) -> None:
    running = {read_text(args.proc / entry.name / "comm") for entry in os.scandir(args.proc) if entry.name.isdigit()}
    if not running:
        found.unknown(f"no processes are visible in {args.proc}")
        return
    for name in args.names:
        if name[:15] not in running:
            found.fail(f"{name} does not run")
    if args.munge:
        look_at_munge(args, found)


def look_at_munge(args: argparse.Namespace, found: Findings) -> None:
    try:
        credential = command_output([args.munge_command, "--no-input"], args.timeout_s)
        done = subprocess.run(
            [args.unmunge_command], input=credential, capture_output=True, text=True,
            timeout=args.timeout_s, check=False,
        )  # fmt: skip
    except (CommandError, subprocess.TimeoutExpired, OSError) as err:
        found.fail(f"munge makes no credential: {err}")
        return
    if done.returncode != 0:
        found.fail(f"munge does not accept its own credential: exit code {done.returncode}")


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--munge", action="store_true")
    parser.add_argument("--timeout-s", type=float, default=5.0, help="for each command; default: %(default)s")
    parser.add_argument("--munge-command", default="munge")
    parser.add_argument("--unmunge-command", default="unmunge")
    parser.add_argument("--proc", type=Path, default=Path("/proc"))
    main("daemons", parser, look)
