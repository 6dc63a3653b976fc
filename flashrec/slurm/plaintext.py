"""What we take from Slurm as text: job steps, reservations and the configuration.

Nothing here was typed by a user: reservations and the configuration are an operator's, and of job steps only columns
without names are asked for. Each line is taken apart strictly; what is not as expected is an error. Pure.
"""

from __future__ import annotations

import datetime
import re

from flashrec.slurm.hostlist import expand
from flashrec.slurm.scheduler import ReservationInfo, SlurmError, StepInfo

STEP_COLUMNS = "JobID:|,StepID:|,StepState:|,Nodes:|"
_PAIR = re.compile(r"([A-Za-z]+)=(\S*)")
_STEP = re.compile(r"(\d+)\|\d+(?:_\d+)?\.(\w+)\|([A-Z_]+)\|([^|]*)\|")  # 2|1_1.0|…: an array's task has two numbers
_NEEDED = ("ReservationName", "StartTime", "EndTime", "Nodes", "NodeCnt", "Features", "PartitionName", "Flags",
           "Users", "Accounts", "State")  # fmt: skip


def reservations_of(text: str) -> tuple[ReservationInfo, ...]:
    """All reservations of `scontrol --oneliner show reservation`, its times in UTC."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) == 1 and lines[0].startswith("No reservations in the system"):
        return ()
    return tuple(_reservation(line) for line in lines)


def _reservation(line: str) -> ReservationInfo:
    facts, _, _ = line.partition(" Comment=")  # the last one, and free text
    words: dict[str, str] = {}
    for part in facts.split():
        pair = _PAIR.fullmatch(part)
        if pair is None:
            raise SlurmError(f"scontrol show reservation: not Key=Value: {part!r}")
        words.setdefault(pair[1], "" if pair[2] in ("(null)", "n/a") else pair[2])
    missing = [key for key in _NEEDED if key not in words]
    if missing:
        raise SlurmError(f"scontrol show reservation: no {', '.join(missing)} in {line!r}")
    try:
        return ReservationInfo(
            name=words["ReservationName"],
            nodes=expand(words["Nodes"]),
            node_count=int(words["NodeCnt"]),
            users=_list(words["Users"]),
            accounts=_list(words["Accounts"]),
            flags=frozenset(word.upper() for word in _list(words["Flags"])),
            features=words["Features"],
            partition=words["PartitionName"],
            start_time=_utc(words["StartTime"]),
            end_time=_utc(words["EndTime"]),
            is_active=words["State"] == "ACTIVE",
        )
    except ValueError as err:
        raise SlurmError(f"scontrol show reservation: {err}") from err


def steps_of(text: str, job_id: int) -> tuple[StepInfo, ...]:
    """The steps of one job from `squeue --steps` with STEP_COLUMNS."""
    steps = []
    for line in text.splitlines():
        found = _STEP.fullmatch(line.strip())
        if found is None:
            raise SlurmError(f"squeue --steps printed no step: {line!r}")
        if int(found[1]) == job_id:
            steps.append(StepInfo(job_id, found[2], found[3], expand(found[4])))
    return tuple(steps)


def config_of(text: str) -> dict[str, str]:
    """Key to value of `scontrol show config`; '' for what is not set."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {key.strip(): "" if value.strip() == "(null)" else value.strip() for key, sign, value in pairs if sign}


def _list(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def _utc(text: str) -> float | None:
    if text in ("Unknown", "NONE", ""):
        return None
    return datetime.datetime.fromisoformat(text).replace(tzinfo=datetime.UTC).timestamp()
