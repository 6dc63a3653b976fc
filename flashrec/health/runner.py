"""Run the checks of a node side by side, each for its own time, all together for theirs.

Whatever a check does, a finding comes of it: hung, crashed, flooding or silent checks are `unknown` with a reason (or
`fail`, where the line says so). See `process` for how a program is ended.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from flashrec.health.catalog import check_directory, command_of
from flashrec.health.checkfile import CheckLine, Plan
from flashrec.health.nodesets import is_member
from flashrec.health.process import Ended, run_bounded
from flashrec.health.verdict import Status, Verdict, decode_verdict, worst

_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_PASSED_ON = ("SLURM_CONF", "TMPDIR")


class Finding(msgspec.Struct, frozen=True):
    """One check that was run. label: the check with its arguments."""

    label: str
    verdict: Verdict
    seconds: float


class Report(msgspec.Struct, frozen=True):
    """Everything that was found on one node."""

    node: str
    status: Status
    findings: tuple[Finding, ...]

    def with_status(self, status: Status) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.verdict.status is status)


async def run_checks(
    plan: Plan,
    node: str,
    *,
    features: Collection[str] | None = None,
    only: Collection[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Report:
    """Run what `plan` has for this node. features: the node's, None if not known. only: names of checks, all if empty.
    Raises CheckFileError, before anything is run, if a check does not exist or root may not run it."""
    directory = check_directory(plan)
    lines = [line for line in plan.lines if not only or line.check in only]
    commands = {line: command_of(line, directory, plan.source) for line in lines}
    gate = asyncio.Semaphore(plan.settings.parallel)
    deadline = time.monotonic() + plan.settings.run_timeout_s
    env = _environment(node, os.environ if environ is None else environ)

    async def run(line: CheckLine) -> Finding | None:
        applies = is_member(node, line.terms, features)
        if applies is False:
            return None
        if applies is None:
            return _finding(line, _unknown(line, "the features of this node are not known"), 0.0)
        async with gate:
            return await _run_line(line, commands[line], env, deadline)

    found = await asyncio.gather(*(run(line) for line in lines))
    findings = tuple(finding for finding in found if finding is not None)
    return Report(node, worst([finding.verdict.status for finding in findings]), findings)


async def _run_line(line: CheckLine, command: list[str], env: dict[str, str], deadline: float) -> Finding:
    started = time.monotonic()
    time_s = min(line.timeout_s, deadline - started)
    if time_s <= 0:
        return _finding(line, _unknown(line, "not run: the checks before it used up run_timeout_s"), 0.0)
    try:
        ended = await run_bounded(command, env, time_s)
    except OSError as err:
        return _finding(line, _unknown(line, f"cannot be run: {err.strerror}"), 0.0)
    return _finding(line, _judge(line, ended, time_s), time.monotonic() - started)


def _judge(line: CheckLine, ended: Ended, time_s: float) -> Verdict:
    if ended.is_flood:
        return _unknown(line, "printed without end and was killed")
    if ended.exit_code is None:
        rest = f"; it outlives SIGKILL in state {ended.stuck}" if ended.stuck else ""
        return Verdict(line.check, Status(line.when_hung), f"did not end within {time_s:g} s{rest}")
    if ended.exit_code != 0:
        return _unknown(line, f"{_how(ended.exit_code)}{_last_line(ended.err)}")
    try:
        verdict = decode_verdict(ended.out, line.check)
    except ValueError as err:
        return _unknown(line, str(err))
    if verdict.status is Status.UNKNOWN:
        return msgspec.structs.replace(verdict, status=Status(line.when_unknown))
    return verdict


def _unknown(line: CheckLine, reason: str) -> Verdict:
    printable = "".join(char if char.isprintable() else " " for char in reason)
    return Verdict(line.check, Status(line.when_unknown), printable[:300])


def _finding(line: CheckLine, verdict: Verdict, seconds: float) -> Finding:
    return Finding(line.label, verdict, round(seconds, 3))


def _how(exit_code: int) -> str:
    return f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"


def _last_line(err: bytes) -> str:
    lines = err.decode(errors="replace").strip().splitlines()
    return f": {lines[-1].strip()}" if lines else ""


def _environment(node: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Little, and the same for everybody: a check must not depend on who runs it."""
    path = ":".join(part for part in (environ.get("PATH", ""), _PATH) if part)
    passed_on = {name: environ[name] for name in _PASSED_ON if name in environ}
    return {**passed_on, "PATH": path, "LC_ALL": "C", "HOME": str(Path("/")), "FLASHREC_NODE": node}
