"""What all checks share: collecting findings and printing the one verdict. Standard library only.

A check looks, says what it found, and changes nothing (only `leftovers --clean` does). What it cannot look at is
unknown, never ok. All roots and commands are arguments, so that a check can be tried against anything.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

Fact = bool | int | float | str | None


class Findings:
    """What one check found; the worst of it becomes the verdict."""

    def __init__(self, check: str) -> None:
        self.check = check
        self.facts: dict[str, Fact | list[Fact]] = {}
        self._reasons: dict[str, list[str]] = {"fail": [], "unknown": [], "warn": []}

    def fail(self, reason: str) -> None:
        self._reasons["fail"].append(reason)

    def warn(self, reason: str) -> None:
        self._reasons["warn"].append(reason)

    def unknown(self, reason: str) -> None:
        self._reasons["unknown"].append(reason)

    def verdict(self) -> dict[str, object]:
        status = next((status for status, reasons in self._reasons.items() if reasons), "ok")
        reasons = [reason for reasons in self._reasons.values() for reason in reasons]
        text = "".join(char if char.isprintable() else " " for char in "; ".join(reasons))
        return {"check": self.check, "status": status, "reason": text[:400], "facts": self.facts}


def main(check: str, parser: argparse.ArgumentParser, look: Callable[[argparse.Namespace, Findings], None]) -> None:
    """Parse the arguments, look, print the verdict."""
    args = parser.parse_args()
    findings = Findings(check)
    try:
        look(args, findings)
    except PermissionError as err:
        findings.unknown(f"needs root: {err}")
    except OSError as err:
        findings.unknown(f"could not look: {err}")
    json.dump(findings.verdict(), sys.stdout)
    print()


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the check's head comment."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


def read_text(path: Path) -> str | None:
    """None if there is no such file or it cannot be read as one (sysfs answers with errors of all kinds)."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    text = read_text(path)
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


class CommandError(Exception):
    """A command is missing, did not answer in time or said no; the message says which."""


def command_output(argv: list[str], timeout_s: float, env: dict[str, str] | None = None) -> str:
    """Standard output of a command that ended with 0. Raises CommandError. A command that cannot be killed hangs the
    check; that is what the runner is for."""
    import subprocess  # most checks run no command, and start faster without

    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False, env=env
        )
    except FileNotFoundError as err:
        raise CommandError(f"{argv[0]} is not installed") from err
    except OSError as err:
        raise CommandError(f"{argv[0]} cannot be run: {err.strerror}") from err
    except subprocess.TimeoutExpired as err:
        raise CommandError(f"{argv[0]} did not answer within {timeout_s:g} s") from err
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "said nothing").splitlines()[-1]
        raise CommandError(f"{argv[0]} ended with exit code {done.returncode}: {said}")
    return done.stdout
