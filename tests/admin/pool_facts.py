"""Nodes, jobs and reservations for the tests of the pool, and a Scheduler that plays a small cluster from memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from flashrec.admin.pool import PoolFacts
from flashrec.slurm.scheduler import JobInfo, NodeInfo, ReservationInfo, SlurmError

NOW = 1_800_000_000.0
YEAR = 365 * 86400.0


def node(name: str, *states: str, features: str = "flashspare", reason: str = "", busy: int = 0) -> NodeInfo:
    words = tuple(word for word in features.split(",") if word)
    return NodeInfo(
        name=name, address=name, states=frozenset(states or ("IDLE",)), features=words, active_features=words,
        partitions=("main",), reason=reason, reason_by="", comment="", gres="", version="", num_cpus=8,
        num_cpus_allocated=busy, memory_mb=0, boot_time=None,
    )  # fmt: skip


def job(
    job_id: int, *, admin: str = "", user: int = 1000, state: str = "RUNNING", nodes: Iterable[str] = (),
    reservation: str = "", name: str = "train", comment: str = "",
) -> JobInfo:  # fmt: skip
    return JobInfo(
        job_id=job_id, state=state, nodes=tuple(nodes), batch_host="", states=frozenset({state}), user_id=user,
        user_name=f"u{user}", account="", partition="main", qos="", name=name, comment=comment, admin_comment=admin,
        reservation=reservation, features="", tres_per_node="", tres_requested="", num_nodes=None, num_cpus=None,
        time_limit_s=None, submit_time=None, start_time=None, end_time=None, array_job_id=None, array_task_id=None,
    )  # fmt: skip


def reservation(*nodes: str, name: str = "flashspare", **changes: Any) -> ReservationInfo:
    made = ReservationInfo(
        name=name, nodes=nodes, node_count=len(nodes), users=("-daemon",), accounts=(),
        flags=frozenset({"IGNORE_JOBS", "SPEC_NODES"}), features="", partition="", start_time=NOW, end_time=NOW + YEAR,
        is_active=True,
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def facts(nodes: Iterable[NodeInfo], *held: ReservationInfo, jobs: Iterable[JobInfo] = ()) -> PoolFacts:
    return PoolFacts(nodes={n.name: n for n in nodes}, reservations=held, jobs=tuple(jobs))


class MemoryScheduler:
    """The part of the Scheduler interface that the pool uses. fail: names of methods that raise what is given."""

    def __init__(self, start: PoolFacts, fail: dict[str, Exception] | None = None) -> None:
        self.known = dict(start.nodes)
        self.held = {r.name: r for r in start.reservations}
        self.running = {j.job_id: j for j in start.jobs}
        self.fail = fail or {}
        self.calls: list[str] = []

    def _called(self, what: str) -> None:
        self.calls.append(what)
        if what in self.fail:
            raise self.fail[what]

    async def nodes(self, names: Any = None) -> dict[str, NodeInfo]:
        self._called("nodes")
        if names is not None and set(names) - set(self.known):
            raise SlurmError("no such node")
        return {n: v for n, v in self.known.items() if names is None or n in names}

    async def reservations(self) -> tuple[ReservationInfo, ...]:
        self._called("reservations")
        return tuple(self.held.values())

    async def reservation(self, name: str) -> ReservationInfo | None:
        return self.held.get(name)

    async def jobs(self, **_: Any) -> tuple[JobInfo, ...]:
        self._called("jobs")
        return tuple(self.running.values())

    async def cancel(self, job_id: int) -> None:
        self._called("cancel")
        del self.running[job_id]

    async def drain(self, name: str, reason: str) -> None:
        self._called("drain")
        self.known[name] = node(name, "IDLE", "DRAIN", reason=reason)

    async def undrain(self, name: str) -> None:
        self._called("undrain")
        self.known[name] = node(name)

    async def create_reservation(self, name: str, *, nodes: Any, users: Any, flags: Any) -> None:
        self._called("create")
        self.held[name] = reservation(*nodes, name=name, users=tuple(users), flags=frozenset(flags) | {"SPEC_NODES"})

    async def update_reservation(
        self, name: str, *, nodes: Any = None, users: Any = None, duration: str | None = None
    ) -> None:
        self._called("update")
        held = self.held[name]
        end = held.end_time if duration is None else (held.start_time or 0.0) + int(duration) * 60
        self.held[name] = msgspec.structs.replace(
            held, nodes=tuple(nodes or held.nodes), users=tuple(users or held.users), end_time=end
        )

    async def delete_reservation(self, name: str) -> None:
        self._called("delete")
        del self.held[name]
