"""The configuration of a job: one frozen struct, defaults that need no file, units in the names.

Unknown keys and values out of range are errors that name the key and what is allowed; nothing is guessed. The same
words are used in the file, on the command line (`--set detection.dead_after_s=3`) and in the documentation.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from flashrec.core.health import HealthRules
from flashrec.core.limits import Count, HangLimits, Limits, PoolLimits, Positive, Seconds, Timing

DEFAULT_POOL = "flashspare"
_NO_LIMIT = 10**6


class Detection(Timing, frozen=True, forbid_unknown_fields=True):
    """When silence becomes a verdict: the core's thresholds and the periods of what feeds them."""

    heartbeat_interval_s: Seconds = 0.25
    probe_timeout_s: Seconds = 0.4  # how long a node that is asked to look waits for an answer
    slurm_poll_interval_s: Seconds = 5.0
    worker_silent_s: Seconds = 30.0  # no heartbeat of a worker that runs (an extension may hold the interpreter)
    worker_stopped_s: Seconds = 1.0  # no heartbeat of a worker that the kernel shows as stopped

    def __post_init__(self) -> None:
        if not self.heartbeat_interval_s < self.suspect_after_s < self.dead_after_s:
            raise ValueError("detection: heartbeat_interval_s < suspect_after_s < dead_after_s must hold")
        if not self.suspect_after_s < self.fabric_dead_after_s:
            raise ValueError("detection: suspect_after_s < fabric_dead_after_s must hold")
        if not self.probe_timeout_s < self.probe_interval_s:
            raise ValueError("detection: probe_timeout_s < probe_interval_s must hold")
        if not self.tick_interval_s < self.suspect_after_s:
            raise ValueError("detection: tick_interval_s < suspect_after_s must hold")


class Recovery(Limits, frozen=True, forbid_unknown_fields=True):
    """Bounds of one recovery."""

    agent_retry_s: Seconds = 5.0  # how often a lost node is asked to run an agent again


class Control(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The control plane. host '': the address of this node towards the others; '0.0.0.0': listen on all."""

    host: str = ""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    lease_s: Seconds = 10.0
    reconnect_s: Seconds = 120.0


class Pool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Replacement nodes from a pool, one companion job each. tier None: 'pool' if there is a name, else 'warm'."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{0,63}\Z")] = ""
    tier: Literal["warm", "pool"] | None = None
    max_swaps: Count | None = None  # None: as many as the site allows
    wait_s: Seconds = 60.0

    @property
    def reservation(self) -> str:
        """The reservation that holds the pool; '' if no node is to be taken from one."""
        if self.tier == "warm":
            return ""
        return self.name or (DEFAULT_POOL if self.tier == "pool" else "")

    def limits(self) -> PoolLimits:
        """What the core has to know."""
        max_swaps = _NO_LIMIT if self.max_swaps is None else self.max_swaps
        return PoolLimits(max_swaps if self.reservation else 0, self.wait_s)


CheckNames = Annotated[tuple[Annotated[str, Meta(pattern=r"^[a-z][a-z0-9-]*\Z")], ...], Meta(min_length=1)]


class Health(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Node-health checks in the agents. file '': the site's check file, or the built-in one if there is none."""

    enabled: bool = True
    file: str = ""
    only: CheckNames = ("disk", "memory", "nic")  # none of them asks Slurm, and none judges the job's load
    admit: CheckNames = ("disk",)  # those that a node waits for before it gets ranks
    period_s: Seconds = 240.0  # a look costs up to 0.2 s of one CPU: less than 0.1 %
    again_s: Seconds = 5.0  # while something is in doubt
    timeout_s: Seconds = 15.0  # one look, all checks together
    gpu_period_s: Seconds = 10.0  # NVML; Xids are heard of at once
    fail_after: Positive = 3
    well_after: Positive = 2
    admit_timeout_s: Seconds = 5.0
    max_sick: Positive = 2  # more than so many sick at once: more likely something that they share

    def rules(self) -> HealthRules:
        """What an agent is told."""
        names = (field.name for field in msgspec.structs.fields(HealthRules))
        return HealthRules(**{name: getattr(self, name) for name in names})


class Fabric(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Heartbeats over MPI on the training fabric. interface: names or networks, the first that is there, or a device of
    the provider; '': the interface of the control connection. library: path of a libmpi; ports: 'LOW-HIGH', '': any."""

    mpi: Literal["auto", "off", "required"] = "auto"
    provider: Literal["tcp", "verbs", "cxi", "psm3", "ucx"] = "tcp"
    interface: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/@,-]*\Z")] = ""
    library: str = ""
    ports: Annotated[str, Meta(pattern=r"^([0-9]{1,5}-[0-9]{1,5})?\Z")] = ""
    heartbeat_interval_s: Seconds = 0.25

    @property
    def port_range(self) -> tuple[int, int]:
        """TCP ports that may be used; (0, 0): any."""
        low, _, high = (self.ports or "0-0").partition("-")
        return int(low), int(high)

    def __post_init__(self) -> None:
        low, high = self.port_range
        if self.ports and not 1024 <= low <= high <= 65535:
            raise ValueError("fabric.ports: LOW-HIGH with 1024 <= LOW <= HIGH <= 65535")
        for word in filter(lambda word: "/" in word, self.interface.split(",")):
            try:
                ipaddress.IPv4Network(word, strict=False)
            except ValueError as err:
                raise ValueError(f"fabric.interface: {word} is no IPv4 network: {err}") from err


class Hangs(HangLimits, frozen=True, forbid_unknown_fields=True):
    """Workers that stand still while the others wait. kill False: they are reported, with their stacks, and left."""

    enabled: bool = True
    kill: bool = True
    tick_interval_s: Seconds = 0.25
    stacks_timeout_s: Seconds = 2.0


ModuleName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_.]*\Z")]


class Hot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parked processes: what a replacement can have done before it is needed. park 'script': the script itself, up to
    flashrec.init(). imports: beside what DistributedDataParallel and flashrec import."""

    park: Literal["none", "imports", "script"] = "imports"
    imports: tuple[ModuleName, ...] = ()
    after_s: Seconds = 30.0  # of training, at the start and after a recovery
    memory_mb: Seconds = 2000.0  # what a node must have to spare
    cuda: bool = False  # those on spares make a CUDA context, too


class Output(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What of the workers' output is copied into the job's output (files per rank always get all of it)."""

    follow: Literal["all", "rank0", "none"] = "all"


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything. job_dir '': `flashrec-<job id>` in the working directory."""

    spares: Count | None = None
    job_dir: str = ""
    detection: Detection = Detection()
    recovery: Recovery = Recovery()
    pool: Pool = Pool()
    control: Control = Control()
    health: Health = Health()
    fabric: Fabric = Fabric()
    hangs: Hangs = Hangs()
    hot: Hot = Hot()
    output: Output = Output()

    def __post_init__(self) -> None:
        if self.control.lease_s <= self.detection.dead_after_s:
            raise ValueError("control.lease_s must be longer than detection.dead_after_s")
        if self.fabric.heartbeat_interval_s > self.detection.suspect_after_s / 2:
            raise ValueError("fabric.heartbeat_interval_s must be at most half of detection.suspect_after_s")
        if self.control.lease_s <= self.detection.dead_after_s + self.detection.probed_patience_s:
            raise ValueError(
                "control.lease_s must be longer than detection.dead_after_s + detection.probed_patience_s: the "
                "workers of a node that cannot be commanded end with its lease, and it is to be replaced before"
            )
