"""Checks of the tests' own, written as shell scripts, and plans that run them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flashrec.health import Plan, Report, run_checks
from flashrec.health.checkfile import parse

CHECKS = Path(__file__).resolve().parents[2] / "slurm_plugin/health/checks"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts, users and trust are root's")
LAUNCHER = CHECKS.parent / "flashrec-node-health"


def verdict(check: str, status: str = "ok", reason: str = "", **facts: object) -> str:
    """What a check prints."""
    return json.dumps({"check": check, "status": status, "reason": reason, "facts": facts})


class CheckDir:
    """A folder of checks; `check(name, script)` adds one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def add(self, name: str, script: str, mode: int = 0o755) -> Path:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(mode)
        return path

    def says(self, name: str, status: str = "ok", reason: str = "") -> Path:
        return self.add(name, f"cat <<'END'\n{verdict(name, status, reason)}\nEND")

    def plan(self, *lines: str) -> Plan:
        return parse("\n".join((f"check_dir = {self.folder}", *lines)), "test.conf")

    def run(self, *lines: str, node: str = "n1", **options: Any) -> Report:
        return asyncio.run(run_checks(self.plan(*lines), node, **options))


def run_check(name: str, *args: object, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Run one of the installed checks as the runner does; returns its verdict."""
    done = run_raw(name, *args, env=env)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert set(found) == {"check", "status", "reason", "facts"} and found["check"] == name
    return found


def run_raw(name: str, *args: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-EsSB", str(CHECKS / f"{name}.py"), *map(str, args)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, env=env)


def script(path: Path, text: str) -> Path:
    """An executable that stands in for a command."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def write_tree(root: Path, files: dict[str, str]) -> Path:
    """Files below a root, as a piece of /proc or /sys."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def only_finding(report: Report) -> Any:
    (finding,) = report.findings
    return finding


def statuses(report: Report) -> Sequence[str]:
    return [str(finding.verdict.status) for finding in report.findings]
