"""The process that talks to Slurm through pyslurm, for `pyslurm_client`: one line of JSON a question, one an answer.

pyslurm stays out of our own processes: importing it ends the interpreter where there is no slurm.conf, its calls hold
the interpreter's lock (10 s without a controller), a library that does not match may crash, and it is GPL-2.0. Whatever
happens here happens to this process only. Its first line says that it is ready; standard output is for these lines
alone, what libraries print goes to standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from flashrec.slurm.hostlist import expand
from flashrec.slurm.records import one_word
from flashrec.slurm.scheduler import JobInfo, NodeInfo

_NO_ANSWER = ("unable to contact", "connection", "timed out", "zero bytes", "unexpected message")


class Question(msgspec.Struct, frozen=True):
    """call: a key of CALLS; args: its arguments."""

    call: str
    args: dict[str, Any]


class Reply(msgspec.Struct, frozen=True):
    """value: JSON of what was asked for; error: '' or why not; could_ask: False if Slurm gave no answer; could_read:
    False if pyslurm could not make anything of Slurm's answer."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""
    could_ask: bool = True
    could_read: bool = True


def job_info(job: Any) -> JobInfo:
    """A pyslurm.Job as our record; what a version of pyslurm does not have raises AttributeError."""
    states = frozenset(job.state.upper().split("+"))
    return JobInfo(
        job_id=job.id,
        state=one_word(states),
        nodes=expand(job.allocated_nodes or ""),
        batch_host=job.batch_host or "",
        states=states,
        user_id=job.user_id,
        user_name=job.user_name or "",
        account=job.account or "",
        partition=job.partition or "",
        qos=job.qos or "",
        name=job.name or "",
        comment=job.comment or "",
        admin_comment=job.admin_comment or "",
        reservation=job.reservation or "",
        features=",".join(job.constraints or ()),
        tres_per_node=job.tres_per_node or "",
        tres_requested=_tres(job.requested_tres),
        num_nodes=job.num_nodes,
        num_cpus=job.cpus,
        time_limit_s=60.0 * job.time_limit if isinstance(job.time_limit, int) else None,
        submit_time=_moment(job.submit_time),
        start_time=_moment(job.start_time),
        end_time=_moment(job.end_time),
        array_job_id=job.array_id,
        array_task_id=job.array_task_id if isinstance(job.array_task_id, int) else None,
    )


def node_info(node: Any) -> NodeInfo:
    """A pyslurm.Node as our record."""
    return NodeInfo(
        name=node.name,
        address=node.address or "",
        states=frozenset(node.state.upper().split("+")),
        features=tuple(node.available_features or ()),
        active_features=tuple(node.active_features or ()),
        partitions=tuple(node.partitions or ()),
        reason=node.reason or "",
        reason_by=node.reason_user or "",
        reason_time=_moment(node.reason_time),
        comment=node.comment or "",
        gres=",".join(f"{name}:{count}" for name, count in (node.configured_gres or {}).items()),
        version=node.slurm_version or "",
        num_cpus=node.total_cpus,
        num_cpus_allocated=node.allocated_cpus or 0,
        memory_mb=node.real_memory,
        boot_time=_moment(node.boot_time),
    )


def _tres(tres: Any) -> str:
    pairs = {} if tres is None else tres.to_dict()
    return ",".join(f"{name}={count}" for name, count in pairs.items() if isinstance(count, int) and count)


def _moment(value: Any) -> float | None:
    return float(value) if value else None


def calls(pyslurm: Any) -> Mapping[str, Callable[..., Any]]:
    """What can be asked. A module of another shape than we know raises AttributeError here or later."""
    describe = pyslurm.JobSubmitDescription
    return {
        "job": lambda job_id: job_info(pyslurm.Job.load(job_id)),
        "jobs": lambda: [job_info(job) for job in pyslurm.Jobs.load().values()],
        "nodes": lambda: [node_info(node) for node in pyslurm.Nodes.load().values()],
        "cancel": lambda job_id: pyslurm.Job(job_id).cancel(),
        "set_time_limit": lambda job_id, minutes: pyslurm.Job(job_id).modify(describe(time_limit=minutes)),
        "set_admin_comment": lambda job_id, text: pyslurm.Job(job_id).modify(describe(admin_comment=text)),
        "drain": lambda node, reason: pyslurm.Node(node).modify(pyslurm.Node(state="DRAIN", reason=reason)),
        "undrain": lambda node: pyslurm.Node(node).modify(pyslurm.Node(state="UNDRAIN")),
    }


def answer(line: bytes, known: Mapping[str, Callable[..., Any]]) -> Reply:
    """The reply to one question. Of Slurm's own errors some are a no and some an outage; any other exception is
    pyslurm's: it fails on all jobs, for example, if the name of one of them is not UTF-8."""
    try:
        question = msgspec.json.decode(line, type=Question)
        value = known[question.call](**question.args)
        return Reply(value=msgspec.Raw(msgspec.json.encode(value)))
    except Exception as err:
        said = str(err) or type(err).__name__
        if type(err).__name__ != "RPCError":
            return Reply(error=f"{type(err).__name__}: {said}", could_read=False)
        return Reply(error=said, could_ask=not any(sign in said.lower() for sign in _NO_ANSWER))


def main() -> None:
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import pyslurm  # type: ignore[import-not-found,unused-ignore]  # may end this process

    known = calls(pyslurm)
    pipe.write(msgspec.json.encode(Reply()) + b"\n")
    pipe.flush()
    for line in sys.stdin.buffer:
        pipe.write(msgspec.json.encode(answer(line, known)) + b"\n")
        pipe.flush()


if __name__ == "__main__":
    main()
