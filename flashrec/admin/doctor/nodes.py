"""Looks at nodes through one short job: each runs `flashrec doctor --local-only` and prints its report.

srun mixes the output of several tasks at line ends, but cuts lines longer than about a thousand bytes anywhere. So a
report is printed in short lines, `MARK NODE INDEX COUNT TEXT`, and put together again here.

The job is bounded: it gives up when the nodes are not free within IMMEDIATE_S, and Slurm ends it after two minutes. A
node that says nothing is a finding, never skipped.
"""

from __future__ import annotations

import base64
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from flashrec.admin.doctor.examine import NodeReport
from flashrec.admin.doctor.finding import Finding, fail, ok, unknown, warn
from flashrec.slurm.command import Commands
from flashrec.slurm.scheduler import SlurmError

IMMEDIATE_S = 20
JOB_TIMEOUT_S = 150.0
CLOCK_SKEW_S = 1.0
_MISSING = "flashrec-doctor: not executable on "
_MARK = "flashrec-doctor-report"
_PIECE_BYTES = 400
_PIECE = re.compile(rf"{_MARK} (?P<node>\S+) (?P<index>\d{{1,4}}) (?P<count>\d{{1,4}}) (?P<text>[A-Za-z0-9+/=]+)")
# $1: flashrec; the rest: its arguments. The node says so itself if there is no such program.
_SCRIPT = f'if [ -x "$1" ]; then exec "$@"; fi; echo "{_MISSING}$SLURMD_NODENAME"'


async def look_at_nodes(
    commands: Commands, nodes: Sequence[str], flashrec: str, environ: Mapping[str, str], folder: Path
) -> list[Finding]:
    """flashrec: the executable that srun would become. folder: where a job directory would be; written to."""
    try:
        with tempfile.NamedTemporaryFile(prefix=".flashrec-doctor-", dir=folder) as proof:
            os.chmod(proof.name, 0o644)
            began = time.time()
            answer = await commands.run(*job_argv(nodes, flashrec, environ, proof.name))
            ended = time.time()
    except OSError as error:
        return [unknown("nodes", f"no file can be made in {folder}: {error.strerror}", "go to a folder of yours")]
    except SlurmError as error:
        return [unknown("nodes", _last(str(error)), "try again with nodes that are idle")]
    reports, missing = read_reports(answer.out)
    found: list[Finding] = []
    for node in nodes:
        if node in missing:
            found.append(_on(node, fail("nodes.flashrec", f"{flashrec} cannot be run", _INSTALL_THERE)))
        elif node in reports:
            found += judge(reports[node], began, ended, str(folder))
        else:
            found.append(_on(node, unknown("nodes", f"said nothing: {_last(answer.said)}", "is it idle and healthy?")))
    return found


_INSTALL_THERE = "install the Python package in a folder that all nodes see, or on this node as well"


def job_argv(nodes: Sequence[str], flashrec: str, environ: Mapping[str, str], proof: str) -> list[str]:
    """One task a node: inside an allocation a job step, outside a job of its own."""
    place = ["--overlap"] if "SLURM_JOB_ID" in environ else [f"--immediate={IMMEDIATE_S}", "--time=2"]
    count = len(nodes)
    return [
        "srun", *place, "--no-kill", "--kill-on-bad-exit=0", f"--nodes={count}", f"--ntasks={count}",
        "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}", "--job-name=flashrec-doctor", "--mpi=none",
        "--input=none", "sh", "-c", _SCRIPT, "sh", flashrec, "doctor", "--local-only", f"--proof={proof}",
    ]  # fmt: skip


def read_reports(out: str) -> tuple[dict[str, NodeReport], set[str]]:
    """(reports by node, nodes without the executable). Lines that are neither are what prologs print: skipped."""
    pieces: dict[str, dict[int, str]] = {}
    counts: dict[str, int] = {}
    missing: set[str] = set()
    for line in out.splitlines():
        found = _PIECE.fullmatch(line.strip())
        if line.startswith(_MISSING):
            missing.add(line.removeprefix(_MISSING).strip())
        elif found:
            pieces.setdefault(found["node"], {})[int(found["index"])] = found["text"]
            counts[found["node"]] = int(found["count"])
    reports = {node: _decode(parts, counts[node]) for node, parts in pieces.items()}
    return {node: report for node, report in reports.items() if report is not None}, missing


def print_report(report: NodeReport) -> str:
    """What `read_reports` takes apart: short lines."""
    text = base64.b64encode(msgspec.json.encode(report)).decode()
    parts = [text[at : at + _PIECE_BYTES] for at in range(0, len(text), _PIECE_BYTES)]
    return "".join(f"{_MARK} {report.node} {index} {len(parts)} {part}\n" for index, part in enumerate(parts))


def _decode(parts: Mapping[int, str], count: int) -> NodeReport | None:
    """None if a piece is missing or damaged."""
    try:
        text = "".join(parts[index] for index in range(count))
        return msgspec.json.decode(base64.b64decode(text, validate=True), type=NodeReport)
    except (KeyError, ValueError):
        return None


def judge(report: NodeReport, began: float, ended: float, folder: str) -> list[Finding]:
    """What can only be told by comparing a node with us, then what it found itself."""
    return [_on(report.node, finding) for finding in (clock(report, began, ended), proof(report, folder))] + list(
        report.findings
    )


def clock(report: NodeReport, began: float, ended: float) -> Finding:
    """It read its clock at some moment between `began` and `ended` of ours."""
    name = "clock.node"
    late, early = began - report.clock, report.clock - ended
    if max(late, early) > CLOCK_SKEW_S:
        skew = f"{max(late, early):.1f} s {'behind' if late > early else 'ahead of'} ours"
        return warn(name, f"its clock is at least {skew}: logs cannot be compared", "run chrony or ntpd on all nodes")
    return ok(name, "agrees with ours")


def proof(report: NodeReport, folder: str) -> Finding:
    name = "nodes.job-dir"
    if report.sees_proof is None:
        return unknown(name, "was not asked")
    if not report.sees_proof:
        return fail(
            name,
            f"does not see a file that was just made in {folder}",
            "start jobs in a folder that all nodes share, or set job_dir to one",
        )
    return ok(name, f"sees {folder}")


def _on(node: str, finding: Finding) -> Finding:
    return msgspec.structs.replace(finding, node=node)


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "srun printed nothing"
