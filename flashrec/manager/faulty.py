"""Telling root of a node that we found bad; see docs/reference/plugin-contract.md. Root decides what becomes of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

SPOOL = Path("/var/spool/flashrec")
MAX_REASON = 100
MAX_BYTES = 4096


def report_faulty(job_id: int | None, node: str, reason: str, environ: Mapping[str, str], spool: Path = SPOOL) -> str:
    """Add a line to this node's report; '' if done, or why not. Needs flashrec-prolog on the job's first node."""
    here, cluster = environ.get("SLURMD_NODENAME", ""), environ.get("SLURM_CLUSTER_NAME", "")
    if job_id is None or not here or not cluster:
        return "not reported: the manager does not run on a node of a Slurm job"
    text = "".join(char if " " <= char <= "~" else "?" for char in reason)[:MAX_REASON]
    path = spool / cluster / here / str(job_id) / "report" / "faulty"
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as err:
        return f"not reported: {path.parent}: {err.strerror} (the site's Prolog does not call flashrec-prolog)"
    try:
        line = f"{node} {text}\n".encode()
        if os.fstat(file).st_size + len(line) > MAX_BYTES:
            return "not reported: the report is full"
        os.write(file, line)
    finally:
        os.close(file)
    return ""
