"""What a dev cluster is asked to be: a frozen value, checked once, from which names and addresses follow.

Addresses exist only inside the cluster's own network namespaces, so every cluster uses the same ones and none can
meet another or the machine's network.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from flashrec.devcluster.errors import DevClusterError

DEFAULT_STATE_DIR = Path("/var/lib/flashrec-devcluster")
CONTROL = "ctl"  # slurmctld and the login shell
SWITCH = "switch"  # the bridge and munged; not a Slurm node and never a target of a fault
MAX_NODES = 200
PREFIX_LENGTH = 16
CONTROL_NETWORK, FABRIC_NETWORK = "control", "fabric"  # Slurm and our control plane; training and its heartbeats
NETWORKS = (CONTROL_NETWORK, FABRIC_NETWORK)
INTERFACES = {CONTROL_NETWORK: "eth0", FABRIC_NETWORK: "fab0"}
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_OWN_FILES = ("slurm.conf", "plugstack.conf", "cgroup.conf", "hosts", "plugstack.conf.d")
_MAX_SOCKET_PATH = 107  # sun_path less its terminating zero


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`features`: NodeName to the `Feature=` string of slurm.conf. `extra_conf`: lines appended to slurm.conf.
    `plugstack`: lines of plugstack.conf. `conf_files`: further files beside slurm.conf, name to text (job_submit.lua,
    for example). `slurmd_timeout_s`: after how much silence Slurm marks a node DOWN; make it larger than the test for a
    Slurm that does not notice. `fabric`: a second network beside the first, with an interface `fab0` on every station,
    which Slurm does not know."""

    name: str = "dev"
    num_nodes: int = 5
    cpus_per_node: int = 8
    slurmd_timeout_s: int = 120
    features: dict[str, str] = {}
    extra_conf: tuple[str, ...] = ()
    plugstack: tuple[str, ...] = ()
    conf_files: dict[str, str] = {}
    fabric: bool = False

    def __post_init__(self) -> None:
        check_name(self.name)
        if not 1 <= self.num_nodes <= MAX_NODES:
            raise DevClusterError(f"nodes must be 1 to {MAX_NODES}, not {self.num_nodes}")
        if self.cpus_per_node < 1:
            raise DevClusterError(f"cpus-per-node must be at least 1, not {self.cpus_per_node}")
        if not 2 <= self.slurmd_timeout_s <= 65533:
            raise DevClusterError(f"slurmd-timeout must be 2 to 65533 s, not {self.slurmd_timeout_s}")
        if any("\n" in line for line in (*self.extra_conf, *self.plugstack, *self.features.values())):
            raise DevClusterError("conf-line, plugstack and feature are one line each; repeat the option for more")
        for name in self.conf_files:
            if not _FILE_NAME.fullmatch(name) or name in _OWN_FILES:
                raise DevClusterError(f"conf_files: {name!r} must be a plain file name that the cluster does not write")
        unknown = sorted(set(self.features) - set(self.nodes))
        if unknown:
            raise DevClusterError(
                f"features for unknown node {unknown[0]}; nodes are {self.nodes[0]}..{self.nodes[-1]}"
            )

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(f"n{i}" for i in range(self.num_nodes))

    @property
    def stations(self) -> tuple[str, ...]:
        """Everything with a link to the switch: the control node, then the nodes."""
        return (CONTROL, *self.nodes)

    @property
    def networks(self) -> tuple[str, ...]:
        return NETWORKS if self.fabric else (CONTROL_NETWORK,)

    def address(self, station: str, network: str = CONTROL_NETWORK) -> str:
        index = self.stations.index(station) + 1
        return f"10.{77 + NETWORKS.index(network)}.0.{index}"

    def mac(self, station: str, network: str = CONTROL_NETWORK) -> str:
        """Fixed per station and network: a rebooted node has the same one, as a real NIC has."""
        return f"02:f1:a5:{NETWORKS.index(network):02x}:00:{self.stations.index(station) + 1:02x}"


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise DevClusterError(f"cluster name {name!r}: use a-z, 0-9 and -, at most 31 characters, not - first")
    return name


class Layout:
    """Where the cluster keeps what on disk. One folder per cluster, owned by root, readable by its users."""

    def __init__(self, state_dir: Path, name: str) -> None:
        check_name(name)
        self.state_dir = state_dir.absolute()
        self.root = self.state_dir / name
        self.lock = self.state_dir / f".{name}.lock"
        self.record = self.root / "cluster.json"
        self.conf_dir = self.root / "etc"
        self.slurm_conf = self.conf_dir / "slurm.conf"
        self.hosts = self.conf_dir / "hosts"
        self.munge_dir = self.root / "munge"
        self.munge_socket = self.munge_dir / "munge.socket"
        self.munge_key = self.root / "munge-private" / "munge.key"
        self.munge_log = self.root / "munge-private" / "munged.log"
        self.ctl_state = self.root / "slurmctld"
        self.ctl_log = self.root / "log" / "slurmctld.log"
        self.ctl_pid = self.root / "slurmctld.pid"
        if len(str(self.munge_socket)) > _MAX_SOCKET_PATH:
            raise DevClusterError(f"{self.root}: too long a path for a unix socket; use a shorter --state-dir")

    def init_record(self, station: str) -> Path:
        return self.root / "init" / f"{station}.json"

    def spool(self, node: str) -> Path:
        return self.root / "nodes" / node / "spool"

    def slurmd_pid(self, node: str) -> Path:
        return self.root / "nodes" / node / "slurmd.pid"

    def slurmd_log(self, node: str) -> Path:
        return self.root / "log" / f"slurmd.{node}.log"

    def faults(self, station: str) -> Path:
        """What has been done to the station's links and not been undone."""
        return self.root / "faults" / f"{station}.json"

    def forwarder_pid(self, port: str) -> Path:
        return self.root / "faults" / f"{port}.pid"

    def forwarder_log(self, port: str) -> Path:
        return self.root / "log" / f"forwarder.{port}.log"

    def folders(self, nodes: tuple[str, ...]) -> dict[Path, int]:
        """Every folder to make, parents first, with its mode."""
        return {
            self.root: 0o755,
            self.root / "init": 0o755,
            self.root / "faults": 0o755,
            self.root / "log": 0o755,
            self.conf_dir: 0o755,
            self.conf_dir / "plugstack.conf.d": 0o755,
            self.munge_dir: 0o755,
            self.munge_key.parent: 0o700,
            self.ctl_state: 0o700,
            self.root / "nodes": 0o755,
            **{self.root / "nodes" / node: 0o755 for node in nodes},
            **{self.spool(node): 0o755 for node in nodes},
        }
