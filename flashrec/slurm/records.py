"""Slurm's JSON, of every release, as our records. Pure.

A field has one of several shapes, by release: a number may be bare, null or {set, infinite, number}; a state a word
with flags beside it, or a list; a list a comma-separated string, or a list. Three functions know that, and nothing here
knows a version. Unknown fields are ignored; a field we need and do not find is an error, never an empty value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from flashrec.slurm.hostlist import expand
from flashrec.slurm.scheduler import JobInfo, NodeInfo, SlurmError, SlurmUnavailable

Raw = Mapping[str, Any]
_NO_TASK = 0xFFFFFFFE  # NO_VAL of slurm.h
# squeue's one word for a job is the first of these that holds, else its base state
_TELLING = ("COMPLETING", "STAGE_OUT", "CONFIGURING", "RESIZING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD",
            "SPECIAL_EXIT", "STOPPED", "REVOKED", "RESV_DEL_HOLD", "SIGNALING")  # fmt: skip


def num(value: Any) -> float | None:
    """A number in any of Slurm's shapes; None if it is not set or has no limit. ValueError for what is no number."""
    if isinstance(value, Mapping):
        return num(value.get("number")) if value.get("set") and not value.get("infinite") else None
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"not a number: {value!r}")
    return float(value)


def states(value: Any, flags: Any = ()) -> frozenset[str]:
    """State words, upper case. ValueError if there are none."""
    words = frozenset(word for part in (*lst(value, "+"), *lst(flags)) for word in part.upper().split("+") if word)
    if not words:
        raise ValueError(f"no state: {value!r}")
    return words


def lst(value: Any, separator: str = ",") -> tuple[str, ...]:
    """A list of words in any of Slurm's shapes."""
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        return tuple(value.split(separator))
    if isinstance(value, Sequence) and all(isinstance(word, str) for word in value):
        return tuple(value)
    raise ValueError(f"not a list of words: {value!r}")


def entries(text: str, key: str, command: str) -> list[Raw]:
    """The list under `key` of what a command printed. SlurmError if it printed something else,
    SlurmUnavailable if it says itself that it could not look."""
    try:
        document = json.loads(text, strict=False)  # control characters of a user's text must not hide all other jobs
    except ValueError as err:
        raise SlurmError(f"{command}: did not print JSON ({err})") from err
    found = document.get(key) if isinstance(document, dict) else None
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise SlurmError(f"{command}: printed JSON without a list of {key}")
    if document.get("errors"):  # 22.05 ends with 0 without a controller, and says so nowhere else
        raise SlurmUnavailable(f"{command}: {document['errors']}")
    return found


def job_info(raw: Raw) -> JobInfo:
    """A job of `squeue --json`. SlurmError if it lacks what we need."""
    with _Reading("job", raw.get("job_id")):
        words = states(raw["job_state"])
        minutes = num(raw["time_limit"])
        is_in_array = bool(num(raw["array_job_id"]))
        return JobInfo(
            job_id=_whole(raw["job_id"]),
            state=one_word(words),
            nodes=expand(_text(raw["nodes"])),
            batch_host=_text(raw["batch_host"]),
            states=words,
            user_id=_whole(raw["user_id"]),
            user_name=_text(raw["user_name"]),
            account=_text(raw["account"]),
            partition=_text(raw["partition"]),
            qos=_text(raw["qos"]),
            name=_text(raw["name"]),
            comment=_text(raw["comment"]),
            admin_comment=_text(raw["admin_comment"]),
            reservation=_text(raw["resv_name"]),
            features=_text(raw["features"]),
            tres_per_node=_text(raw["tres_per_node"]),
            tres_requested=_text(raw["tres_req_str"]),
            num_nodes=_count(raw["node_count"]),
            num_cpus=_count(raw["cpus"]),
            time_limit_s=None if minutes is None else 60 * minutes,
            submit_time=moment(raw["submit_time"]),
            start_time=moment(raw["start_time"]),
            end_time=moment(raw["end_time"]),
            array_job_id=_count(raw["array_job_id"]) if is_in_array else None,
            array_task_id=_task(raw["array_task_id"]) if is_in_array else None,
        )


def node_info(raw: Raw) -> NodeInfo:
    """A node of `scontrol show nodes --json`, or of 22.05's `sinfo --json`."""
    with _Reading("node", raw.get("name")):
        return NodeInfo(
            name=_text(raw["name"]),
            address=_text(raw["address"]),
            states=states(raw["state"], raw.get("state_flags")),
            features=lst(raw["features"]),
            active_features=lst(raw["active_features"]),
            partitions=lst(raw["partitions"]),
            reason=_text(raw["reason"]),
            reason_by=_text(raw["reason_set_by_user"]),
            comment=_text(raw["comment"]),
            gres=_text(raw["gres"]),
            version=_text(raw["version"] if "version" in raw else raw["slurmd_version"]),
            num_cpus=_whole(raw["cpus"]),
            num_cpus_allocated=_whole(raw["alloc_cpus"]),
            memory_mb=_whole(raw["real_memory"]),
            boot_time=moment(raw["boot_time"]),
            reason_time=moment(raw["reason_changed_at"]),
        )


def one_word(words: frozenset[str]) -> str:
    """squeue's one word for a job's state words."""
    for word in _TELLING:
        if word in words:
            return word
    return sorted(words)[0]


def moment(value: Any) -> float | None:
    """Seconds since the epoch; Slurm writes 0 for never."""
    return num(value) or None


def _text(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"not text: {value!r}")
    return value


def _whole(value: Any) -> int:
    number = num(value)
    if number is None:
        raise ValueError("a number is not set")
    return int(number)


def _count(value: Any) -> int | None:
    number = num(value)
    return None if number is None else int(number)


def _task(value: Any) -> int | None:
    number = _count(value)
    return None if number == _NO_TASK else number


class _Reading:
    """Says which record could not be read, and why."""

    def __init__(self, kind: str, name: Any) -> None:
        self._what = f"{kind} {name}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, err: BaseException | None, trace: Any) -> None:
        if isinstance(err, KeyError):
            raise SlurmError(f"Slurm's JSON of {self._what} has no field {err.args[0]!r}") from err
        if isinstance(err, ValueError | TypeError):
            raise SlurmError(f"Slurm's JSON of {self._what} cannot be read: {err}") from err
