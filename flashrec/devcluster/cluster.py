"""A dev cluster: real munged, slurmctld and slurmd on one machine, every node in namespaces of its own.

    cluster = DevCluster.up(ClusterSpec(name="dev", num_nodes=5), progress=print)
    cluster.run(["srun", "-N3", "hostname"])
    when = cluster.cut_power("n2")    # link first, then every process: the peers see silence
    cluster.heal("n2")                # a reboot: same name, address and MAC, new kernel state
    cluster.down()

Words: a *station* is the switch, the control node (`ctl`) or a node (`n0`, `n1`, …); see `station`, `netns`, `daemon`.
`docs/guides/devcluster.md` is for users; `docs/decisions/0002-devcluster-namespaces.md` says why it is built so.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from flashrec.devcluster import daemon, netns, record, station
from flashrec.devcluster.daemon import Daemon
from flashrec.devcluster.errors import DevClusterError, NotReadyError
from flashrec.devcluster.files import write_cgroup_conf, write_files
from flashrec.devcluster.linkfaults import Direction, LinkFaults, Network
from flashrec.devcluster.requirements import SEARCH_PATH, check_requirements
from flashrec.devcluster.slurmconf import CGROUP_CANDIDATES
from flashrec.devcluster.slurmview import SlurmView
from flashrec.devcluster.spec import (
    CONTROL,
    CONTROL_NETWORK,
    DEFAULT_STATE_DIR,
    FABRIC_NETWORK,
    SWITCH,
    ClusterSpec,
    Layout,
)
from flashrec.devcluster.station import Station
from flashrec.devcluster.status import ClusterStatus, NodeStatus, is_usable

_IDLE_TIMEOUT_S = 60.0
_HEAL_TIMEOUT_S = 30.0

Progress = Callable[[str], None]


class DevCluster:
    """A running cluster. Make one with `up` or `attach`; safe to use from several processes and threads at once."""

    def __init__(self, spec: ClusterSpec, layout: Layout) -> None:
        self.spec = spec
        self.layout = layout
        self._stations = {name: Station(name, layout) for name in (SWITCH, *spec.stations)}
        self._links: netns.LinkControl | None = None
        self._faults = LinkFaults(spec, layout, self._stations[SWITCH])
        self._view = SlurmView(self.run, self._slurmctld, layout, self._lacks_nothing)

    # ---- life

    @classmethod
    def up(
        cls,
        spec: ClusterSpec,
        *,
        state_dir: Path = DEFAULT_STATE_DIR,
        progress: Progress = lambda _: None,
    ) -> Self:
        """Start a cluster and return when every node is idle. What a crashed one of that name left is cleaned first.

        Raises MissingRequirementError, or DevClusterError after taking away what was started.
        """
        check_requirements()
        layout = Layout(state_dir, spec.name)
        with record.locked(layout):
            if record.is_running(layout, record.read_record(layout)):
                raise DevClusterError(f"cluster {spec.name} is up already; take it down first, or use another --name")
            if record.remove(layout):
                progress(f"removed what an earlier cluster {spec.name} left behind")
            cluster = cls(spec, layout)
            try:
                cluster._start(progress)
            except BaseException:
                cluster._release()
                record.remove(layout)
                raise
        return cluster

    @classmethod
    def attach(cls, name: str = "dev", *, state_dir: Path = DEFAULT_STATE_DIR) -> Self:
        """The running cluster of that name, started by whomever."""
        layout = Layout(state_dir, name)
        found = record.read_record(layout)
        if found is None:
            raise DevClusterError(f"no cluster {name}; start one with `flashrec devcluster up --name {name}`")
        if not record.is_running(layout, found):
            raise DevClusterError(f"cluster {name} died or is not up yet; `up` starts it anew, `down` removes its rest")
        return cls(found.spec, layout)

    def down(self) -> None:
        """End every process of the cluster and delete its folder. Nothing to do if that is done already."""
        self._release()
        take_down(self.spec.name, state_dir=self.layout.state_dir)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    # ---- use

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.spec.nodes

    def command(
        self,
        argv: Sequence[str],
        *,
        node: str = CONTROL,
        user: str | None = None,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[str]:
        """The command line that runs `argv` on a node, with SLURM_CONF set; its exit code is that of `argv`.

        `env` is added to the caller's environment. Without `cwd` the caller's folder is kept.
        """
        wanted = {"SLURM_CONF": str(self.layout.slurm_conf), "PATH": SEARCH_PATH}
        ids = None
        if user is not None:
            try:
                entry = pwd.getpwnam(user)
            except KeyError:
                raise DevClusterError(f"no user {user} on this machine") from None
            ids = (entry.pw_uid, entry.pw_gid)
            wanted |= {"USER": user, "LOGNAME": user, "HOME": entry.pw_dir}
        return self._station(node).command(argv, cwd=cwd or os.getcwd(), env=wanted | dict(env or {}), user=ids)

    def run(
        self,
        argv: Sequence[str],
        *,
        node: str = CONTROL,
        user: str | None = None,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end and capture both outputs. A failure raises DevClusterError with them, unless `check=False`;
        subprocess.TimeoutExpired after `timeout_s`, and the command is killed."""
        done = subprocess.run(
            self.command(argv, node=node, user=user, cwd=cwd, env=env),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode != 0:
            output = (done.stdout + done.stderr).strip()
            raise DevClusterError(f"{node}: {' '.join(argv)}: exit code {done.returncode}\n{output}")
        return done

    def popen(
        self,
        argv: Sequence[str],
        *,
        node: str = CONTROL,
        user: str | None = None,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """As `run`, in the background; `options` are subprocess.Popen's. Killing it kills the command inside."""
        return subprocess.Popen(self.command(argv, node=node, user=user, cwd=cwd, env=env), **options)

    def processes(self, node: str) -> dict[int, int]:
        """Every process of a node: pid on this machine to pid inside. Empty if it has no power."""
        return self._station(node).processes()

    # ---- faults

    def cut_power(self, node: str) -> float:
        """Power loss: its links go down, then everything on the node dies; on return all of it is gone.

        Returns time.monotonic() just before the first link went down, so that no time measured from it is too short.
        """
        target = self._node(node)
        links = self._link_control()
        target.living_init()
        cut_at = time.monotonic()
        for network in self.spec.networks:
            links.set_up(netns.port_of(node, network), False)
        target.kill()
        return cut_at

    def partition(self, node: str, network: Network = "both", direction: Direction = "both") -> float:
        """A link goes down and nothing else: processes live on, unheard. Also for `ctl`. Returns as `cut_power`.

        `network`: 'control', 'fabric' or 'both', which is all there are. `direction`: 'in' leaves the node deaf, 'out'
        dumb.
        """
        self._station(node).living_init()
        networks = self._faults.networks(network)
        if direction != "both":
            with record.locked(self.layout):
                return self._faults.cut(node, network, direction)
        links = self._link_control()
        cut_at = time.monotonic()
        for each in networks:
            links.set_up(netns.port_of(node, each), False)
        return cut_at

    def lose(self, node: str, percent: int, network: Network = "both") -> float:
        """Drop each packet of a node's links, in both directions, with this probability. Returns as `cut_power`."""
        with record.locked(self.layout):
            self._station(node).living_init()
            return self._faults.lose(node, percent, network)

    def thin(self, node: str, rate: str, network: Network = "both") -> float:
        """Limit what a node sends and receives, each, to `rate` ('10mbit'). Returns as `cut_power`."""
        with record.locked(self.layout):
            return self._faults.thin(node, rate, network, self._station(node))

    def delay(
        self, node: str, mean_ms: float, jitter_ms: float = 0, loss_percent: float = 0, network: Network = "both"
    ) -> float:
        """Delay each packet of a node's links, in both directions, by mean ± jitter, and lose some. Returns as
        `cut_power`."""
        with record.locked(self.layout):
            return self._faults.delay(node, mean_ms, jitter_ms, loss_percent, network, self._station(node))

    def dropped(self, node: str) -> int:
        """Packets dropped so far by `lose` and by one-way partitions that stand on this node's links."""
        self._station(node)
        return self._faults.dropped(node)

    def heal(self, node: str, *, timeout_s: float = _HEAL_TIMEOUT_S) -> None:
        """Undo every fault of a node's links, or boot one that has no power; return when Slurm can use it.

        A booted one has its name, addresses and MACs again, and nothing else of its earlier life but its disk. Not
        waited for Slurm's view while slurmctld is stopped.
        """
        target = self._station(node)
        with record.locked(self.layout):
            self._faults.undo(node, target)
            ports = [netns.port_of(node, network) for network in self.spec.networks]
            if target.is_alive:
                for port in ports:
                    self._link_control().set_up(port, True)
                self._register(node)
            else:
                self._node(node)
                # The kernel takes the cables away with the last process, but not at once.
                for port in ports:
                    self._link_control().remove(port)
                target.boot()
                self._plug_in(target)
                self._slurmd(node).start()
        if node != CONTROL:
            self._view.await_reachable([node], timeout_s)

    def stop_daemon(self, name: str) -> None:
        """`slurmctld`, or a node's slurmd by the node's name. Job steps of the node go on without it."""
        self._daemon(name).stop()

    def start_daemon(self, name: str) -> None:
        """Start it again with the state it kept; return when it answers."""
        self._daemon(name).start()
        nodes = self.nodes if name == "slurmctld" else [name]
        self._view.await_reachable(nodes, _HEAL_TIMEOUT_S)

    # ---- looking

    def status(self) -> ClusterStatus:
        states = self._view.states() or {}
        links = self._link_control()
        return ClusterStatus(
            name=self.spec.name,
            slurm_conf=str(self.layout.slurm_conf),
            slurmctld_pid=self._slurmctld().pid,
            nodes=[
                NodeStatus(
                    name=name,
                    slurm_state=states.get(name),
                    has_power=self._stations[name].is_alive,
                    link_up=self._stations[name].is_alive and links.is_up(name),
                    slurmd_pid=self._slurmd(name).pid,
                    fabric_up=self._is_fabric_up(name) if self.spec.fabric else None,
                    faults=tuple(str(fault) for fault in self._faults.standing(name)),
                )
                for name in self.nodes
            ],
        )

    def slurm_state(self, node: str) -> str | None:
        """As sinfo says it now; None if slurmctld gave no answer."""
        return (self._view.states() or {}).get(self._node(node).name)

    # ---- inside

    def _start(self, progress: Progress) -> None:
        write_files(self.spec, self.layout)
        progress(f"booting {len(self._stations)} stations")
        station.boot_all(list(self._stations.values()))
        netns.make_switch(self._stations[SWITCH].living_init().pid, self.spec)
        for name in self.spec.stations:
            self._plug_in(self._stations[name])
        progress("starting munged and slurmctld")
        daemon.munged(self._stations[SWITCH], self.layout).start()
        self._slurmctld().start()
        progress(f"starting slurmd on {self.spec.num_nodes} nodes")
        self._probe_cgroup_conf()
        daemon.start_all([self._slurmd(name) for name in self.nodes])
        progress("waiting until Slurm says that every node is idle")
        self._view.await_usable(self.nodes, _IDLE_TIMEOUT_S)
        done = msgspec.structs.replace(record.new_record(self.spec), is_complete=True)
        record.write_record(self.layout, done)

    def _probe_cgroup_conf(self) -> None:
        """Leave the first cgroup.conf with which this release's slurmd starts, and n0's slurmd running with it."""
        probe = self._slurmd(self.nodes[0])
        reasons = []
        for candidate in CGROUP_CANDIDATES:
            write_cgroup_conf(self.layout, candidate)
            try:
                probe.start()
            except NotReadyError:
                raise
            except DevClusterError as error:
                reasons.append(f"with {candidate.splitlines()[0]}: {error}")
                continue
            return
        raise DevClusterError("slurmd starts with none of the cgroup settings we know\n" + "\n".join(reasons))

    def _plug_in(self, target: Station) -> None:
        netns.plug_in(self._stations[SWITCH].living_init().pid, self.spec, target.name, target.living_init().pid)

    def _station(self, name: str) -> Station:
        if name not in self.spec.stations:
            raise DevClusterError(f"no node {name}; there are {', '.join(self.spec.stations)}")
        return self._stations[name]

    def _node(self, name: str) -> Station:
        if name == CONTROL:
            raise DevClusterError("ctl is not a Slurm node; for a lost controller use stop-daemon slurmctld")
        return self._station(name)

    def _slurmctld(self) -> Daemon:
        return daemon.slurmctld(self._stations[CONTROL], self.layout)

    def _slurmd(self, node: str) -> Daemon:
        return daemon.slurmd(self._node(node), self.layout)

    def _daemon(self, name: str) -> Daemon:
        return self._slurmctld() if name == "slurmctld" else self._slurmd(name)

    def _link_control(self) -> netns.LinkControl:
        if self._links is None:
            self._links = netns.LinkControl(self._stations[SWITCH].living_init().pid)
        return self._links

    def _is_fabric_up(self, node: str) -> bool:
        port = netns.port_of(node, FABRIC_NETWORK)
        return self._stations[node].is_alive and self._link_control().is_up(port)

    def _register(self, node: str) -> None:
        """Make a node that slurmctld gave up on known to it again: it looks after such nodes only every 45 s or so."""
        if node == CONTROL or self._slurmd(node).pid is None:
            return
        state = (self._view.states() or {}).get(node)
        if state is not None and not is_usable(state):
            self._slurmd(node).stop()
            self._slurmd(node).start()

    def _lacks_nothing(self, node: str) -> bool:
        """It has power, its link and slurmd: Slurm can use it, once it has noticed."""
        cut = any((fault.kind, fault.network) == ("cut", CONTROL_NETWORK) for fault in self._faults.standing(node))
        return self._slurmd(node).pid is not None and self._link_control().is_up(node) and not cut

    def _release(self) -> None:
        if self._links is not None:
            self._links.close()
            self._links = None


def take_down(name: str, *, state_dir: Path = DEFAULT_STATE_DIR) -> bool:
    """End and delete the cluster of that name, running, half-made or dead; False if there is none."""
    layout = Layout(state_dir, name)
    if not (layout.root.exists() or layout.lock.exists()):
        return False
    with record.locked(layout):
        return record.remove(layout)
