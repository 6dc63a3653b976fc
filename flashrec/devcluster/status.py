"""What can be said of a running cluster at a glance: frozen values, one line a node."""

from __future__ import annotations

import msgspec


class NodeStatus(msgspec.Struct, frozen=True):
    """`slurm_state` as sinfo says it (`idle`, `mixed`, `down*`, …); None if slurmctld gave no answer. `fabric_up`: None
    in a cluster without one. `faults`: what else was done to its links, in words."""

    name: str
    slurm_state: str | None
    has_power: bool
    link_up: bool
    slurmd_pid: int | None
    fabric_up: bool | None = None
    faults: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Power, every link, and nothing done to them."""
        return self.has_power and self.link_up and self.fabric_up is not False and not self.faults


class ClusterStatus(msgspec.Struct, frozen=True):
    name: str
    slurm_conf: str
    slurmctld_pid: int | None
    nodes: list[NodeStatus]


def is_usable(slurm_state: str) -> bool:
    """Slurm would start something there. `*` means that slurmctld has not heard from it."""
    return not slurm_state.endswith("*") and not slurm_state.startswith(("down", "unk"))
