"""What the project asks Slurm, and the records it gets: the interface behind which Slurm's versions lie.

Rules for everyone who implements or calls it:

* every method is asynchronous and bounded in time;
* `SlurmError` means that Slurm answered and the answer is no; `SlurmUnavailable` that it could not be asked. An empty
  answer is an answer: there is nothing of that kind;
* times are seconds since the epoch, durations are seconds unless the name says minutes, None means Slurm says none;
* names, comments and reasons are text that somebody typed: show it, compare it, never take it apart for facts. Only
  an admin comment is out of a user's reach.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import msgspec

FINISHED = frozenset(
    {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"}
)
UNUSABLE = frozenset({"DOWN", "DRAIN", "FAIL", "ERROR", "UNKNOWN", "FUTURE", "NOT_RESPONDING", "POWERED_DOWN"})


class SlurmError(Exception):
    """Slurm answered, and the answer is no."""


class SlurmUnavailable(SlurmError):
    """Slurm could not be asked (no controller, no command, no answer in time); asking again later may help."""


class JobPlace(msgspec.Struct, frozen=True):
    """Where a job is now. state: squeue's one word, upper case; nodes: names; batch_host: '' if there is none."""

    job_id: int
    state: str
    nodes: tuple[str, ...]
    batch_host: str


class JobInfo(JobPlace, frozen=True, kw_only=True):
    """All we ask about a job. states: every word of its state, as {'RUNNING', 'COMPLETING'}. features: the constraint
    as typed. tres_per_node and tres_requested: as Slurm writes them, as 'gres/gpu:2' ('gres:gpu:2' on 22.05) and
    'cpu=4,node=2'. array_job_id: None outside of arrays. time_limit_s: None is unlimited or not set yet."""

    states: frozenset[str]
    user_id: int
    user_name: str
    account: str
    partition: str
    qos: str
    name: str
    comment: str
    admin_comment: str
    reservation: str
    features: str
    tres_per_node: str
    tres_requested: str
    num_nodes: int | None
    num_cpus: int | None
    time_limit_s: float | None
    submit_time: float | None
    start_time: float | None
    end_time: float | None
    array_job_id: int | None
    array_task_id: int | None

    @property
    def is_finished(self) -> bool:
        """Ended for good: no state word says that it waits, runs or comes to its end."""
        return bool(self.states & FINISHED) and "COMPLETING" not in self.states and "REQUEUED" not in self.states


class StepInfo(msgspec.Struct, frozen=True):
    """A job step that exists now. step_id: '0', '17', 'batch', 'extern' or 'interactive'."""

    job_id: int
    step_id: str
    state: str
    nodes: tuple[str, ...]


class NodeInfo(msgspec.Struct, frozen=True):
    """A node. states: words, upper case, no marks, as {'IDLE', 'DRAIN', 'NOT_RESPONDING'}. reason_by: user name.
    reason_time: when the reason was set, by the controller's clock."""

    name: str
    address: str
    states: frozenset[str]
    features: tuple[str, ...]
    active_features: tuple[str, ...]
    partitions: tuple[str, ...]
    reason: str
    reason_by: str
    comment: str
    gres: str
    version: str
    num_cpus: int
    num_cpus_allocated: int
    memory_mb: int
    boot_time: float | None
    reason_time: float | None = None

    @property
    def is_usable(self) -> bool:
        """True if Slurm would run jobs on it."""
        return not self.states & UNUSABLE

    @property
    def is_busy(self) -> bool:
        """True if a job holds some of it, or is about to leave it."""
        return bool(self.states & {"ALLOCATED", "MIXED", "COMPLETING"}) or self.num_cpus_allocated > 0


class ReservationInfo(msgspec.Struct, frozen=True):
    """A reservation. flags: upper case words as Slurm prints them, as {'SPEC_NODES', 'REPLACE_DOWN'}."""

    name: str
    nodes: tuple[str, ...]
    node_count: int
    users: tuple[str, ...]
    accounts: tuple[str, ...]
    flags: frozenset[str]
    features: str
    partition: str
    start_time: float | None
    end_time: float | None
    is_active: bool


class Scheduler(Protocol):
    """What one can ask Slurm, and tell it. See the module's rules for errors, units and text."""

    async def version(self) -> tuple[int, int]:
        """Major and minor number of what we ask with, as (24, 11)."""

    async def job(self, job_id: int) -> JobInfo:
        """One job; Slurm forgets a finished one after MinJobAge. SlurmError if it knows no such job."""

    async def jobs(
        self, user: str | None = None, name: str | None = None, states: Collection[str] | None = None
    ) -> tuple[JobInfo, ...]:
        """Jobs in order of id. states: any of these state words; None: all that have not ended."""

    async def steps(self, job_id: int) -> tuple[StepInfo, ...]:
        """The job steps of a job that exist now."""

    async def nodes(self, names: Sequence[str] | None = None) -> dict[str, NodeInfo]:
        """Nodes by name, hidden ones too; None: all. SlurmError if one of `names` does not exist."""

    async def reservation(self, name: str) -> ReservationInfo | None:
        """One reservation; None if there is none of that name."""

    async def reservations(self) -> tuple[ReservationInfo, ...]:
        """All reservations in order of name."""

    async def config(self) -> Mapping[str, str]:
        """slurm.conf as the controller runs with it: 'SlurmdTimeout' → '300 sec'."""

    async def cancel(self, job_id: int) -> None:
        """End a job. No error if it has ended already."""

    async def set_time_limit(self, job_id: int, minutes: int) -> None:
        """Only an operator may raise it."""

    async def set_admin_comment(self, job_id: int, text: str) -> None:
        """Only an operator may."""

    async def drain(self, node: str, reason: str) -> None:
        """Take no new jobs there. Overwrites the reason of a node that is drained already: look first."""

    async def undrain(self, node: str) -> None:
        """Take jobs there again; Slurm does so once the node has answered a ping. Nothing happens to a node that is
        not drained, and one that is DOWN as well stays so. 24.11 keeps the reason."""

    async def create_reservation(
        self,
        name: str,
        *,
        nodes: Sequence[str] | None = None,
        node_count: int | None = None,
        features: str | None = None,
        partition: str | None = None,
        users: Sequence[str] | None = None,
        accounts: Sequence[str] | None = None,
        flags: Collection[str] = (),
        start: str = "now",
        duration: str = "infinite",
    ) -> None:
        """Either nodes or node_count. start, duration: as scontrol takes them. SlurmError if the name is taken."""

    async def update_reservation(
        self,
        name: str,
        *,
        nodes: Sequence[str] | None = None,
        node_count: int | None = None,
        features: str | None = None,
        partition: str | None = None,
        users: Sequence[str] | None = None,
        accounts: Sequence[str] | None = None,
        flags: Collection[str] = (),
        duration: str | None = None,
    ) -> None:
        """Change what is given, leave the rest; `flags` are added."""

    async def delete_reservation(self, name: str) -> None:
        """No error if there is none of that name; SlurmError while jobs run in it."""
