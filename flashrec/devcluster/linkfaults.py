"""Faults of a station's links that are less than a pulled plug: one direction cut, packets lost, thin or slow links.

Everything is done at the switch's end of the cable, so no program on the node can see or undo it; only thinning what a
node *sends* needs a queue at its own end. Per fault:

    cut, loss   an nftables table of its own in the bridge family, on the port; undone by deleting the table
    thin        `tc tbf` at both ends of the cable
    delay       `tc netem` at both ends where the kernel has it, else a `forwarder` process of the switch

What stands is written down before it is done (`Layout.faults`), so `undo` finds it whoever did it, and after a crash.
Call everything under `record.locked`.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import msgspec

from flashrec.devcluster import forwarder, netns
from flashrec.devcluster.daemon import Daemon
from flashrec.devcluster.errors import DevClusterError
from flashrec.devcluster.spec import INTERFACES, SWITCH, ClusterSpec, Layout
from flashrec.devcluster.station import Station

Direction = Literal["both", "in", "out"]
Network = Literal["control", "fabric", "both"]
Kind = Literal["cut", "loss", "thin", "delay"]
MAX_DELAY_MS = 60_000
_RATE = re.compile(r"[1-9][0-9]*(kbit|mbit|gbit)")
_NO_NETEM = "kind is unknown"


class LinkFault(msgspec.Struct, frozen=True):
    """kind: 'cut', 'loss', 'thin' or 'delay'; text: what of it, for people; by: the program that does it."""

    kind: Kind
    network: str
    text: str
    by: str

    def __str__(self) -> str:
        return f"{self.network}: {self.kind} {self.text}"


def nft_rules(table: str, ports: Sequence[str], direction: Direction, condition: str) -> str:
    """An nftables script that drops what meets `condition`; it replaces an earlier table of that name.

    Directions are the station's: what it sends comes *in* through the switch's port.
    """
    names = ", ".join(f'"{port}"' for port in ports)
    rules = [("iifname", direction in ("both", "out")), ("oifname", direction in ("both", "in"))]
    return "\n".join(
        [
            f"add table bridge {table}",
            f"delete table bridge {table}",
            f"add table bridge {table}",
            f"add chain bridge {table} drops {{ type filter hook forward priority 0; }}",
            *(
                f"add rule bridge {table} drops {way} {{ {names} }} {condition} counter drop"
                for way, is_meant in rules
                if is_meant
            ),
            "",
        ]
    )


class LinkFaults:
    """Those of one cluster. Every fault method returns time.monotonic() just before it was done."""

    def __init__(self, spec: ClusterSpec, layout: Layout, switch: Station) -> None:
        self._spec, self._layout, self._switch = spec, layout, switch

    def networks(self, network: str) -> tuple[str, ...]:
        """Those that `network` means in this cluster; raises for one that there is not."""
        if network == "both":
            return self._spec.networks
        if network not in get_args(Network):
            raise DevClusterError(f"network {network!r} is none of {', '.join(get_args(Network))}")
        if network not in self._spec.networks:
            raise DevClusterError(f"cluster {self._spec.name} has no {network}; start it with `devcluster up --fabric`")
        return (network,)

    def standing(self, node: str) -> tuple[LinkFault, ...]:
        try:
            return msgspec.json.decode(self._layout.faults(node).read_bytes(), type=tuple[LinkFault, ...])
        except FileNotFoundError:
            return ()

    def dropped(self, node: str) -> int:
        """Packets that our cuts and losses on this node's links have dropped: how one sees that a fault fired."""
        count = 0
        for fault in self.standing(node):
            if fault.by == "nft":
                said = self._nft(["list", "table", "bridge", self._table(node, fault)])
                count += sum(int(found) for found in re.findall(r"counter packets (\d+)", said))
        return count

    def cut(self, node: str, network: str, direction: Direction) -> float:
        if direction not in get_args(Direction):
            raise DevClusterError(f"direction {direction!r} is none of {', '.join(get_args(Direction))}")
        return self._drop(node, "cut", self.networks(network), f"({direction})", direction, "")

    def lose(self, node: str, percent: int, network: str) -> float:
        if not 1 <= percent <= 100:
            raise DevClusterError(f"loss must be 1 to 100 percent, not {percent}")
        condition = f"numgen random mod 100 < {percent}"
        return self._drop(node, "loss", self.networks(network), f"{percent} %", "both", condition)

    def thin(self, node: str, rate: str, network: str, station: Station) -> float:
        if not _RATE.fullmatch(rate):
            raise DevClusterError(f"rate {rate!r}: a whole number with kbit, mbit or gbit, for example 10mbit")
        networks = self.networks(network)
        self._refuse_beside(node, networks, "delay", "netem")
        self._write(node, [LinkFault("thin", each, rate, "tc") for each in networks])
        done_at = time.monotonic()
        for each in networks:
            self._queue(node, each, station, ["tbf", "rate", rate, "burst", "32kb", "latency", "200ms"])
        return done_at

    def delay(
        self, node: str, mean_ms: float, jitter_ms: float, loss_percent: float, network: str, station: Station
    ) -> float:
        """Each direction by itself; uniform between mean - jitter and mean + jitter."""
        if not 0 <= jitter_ms <= mean_ms <= MAX_DELAY_MS or not 0 <= loss_percent < 100:
            raise DevClusterError(
                f"delay must be 0 <= jitter <= mean <= {MAX_DELAY_MS} ms and loss 0 to 99 percent, not"
                f" {mean_ms:g}, {jitter_ms:g} and {loss_percent:g}"
            )
        text = f"{mean_ms:g} ± {jitter_ms:g} ms" + (f", {loss_percent:g} % lost" if loss_percent else "")
        networks, by = self.networks(network), "netem" if self._has_netem() else "forwarder"
        if by == "netem":  # it lets packets overtake each other, unlike our forwarder
            self._refuse_beside(node, networks, "thin", "tc")
        self._write(node, [LinkFault("delay", each, text, by) for each in networks])
        done_at = time.monotonic()
        for each in networks:
            if by == "netem":
                lost = ["loss", f"{loss_percent:g}%"] if loss_percent else []
                self._queue(node, each, station, ["netem", "delay", f"{mean_ms:g}ms", f"{jitter_ms:g}ms", *lost])
            else:
                self._end_forwarder(node, each)
                self._start_forwarder(node, each, (mean_ms, jitter_ms, loss_percent))
        return done_at

    def undo(self, node: str, station: Station) -> None:
        """Everything that stands; a station without power has lost its cables, and what was done to them, already."""
        standing = self.standing(node)
        tables = {self._table(node, fault) for fault in standing if fault.by == "nft"}
        if tables:
            self._nft(["-f", "-"], "".join(f"add table bridge {t}\ndelete table bridge {t}\n" for t in tables))
        for network in {fault.network for fault in standing if fault.by == "forwarder"}:
            self._end_forwarder(node, network)
        if station.is_alive:
            for network in {fault.network for fault in standing if fault.by in ("tc", "netem")}:
                self._queue(node, network, station, None)
        self._layout.faults(node).unlink(missing_ok=True)

    # ---- inside

    def _drop(
        self, node: str, kind: Kind, networks: Iterable[str], text: str, direction: Direction, condition: str
    ) -> float:
        faults = [LinkFault(kind, network, text, "nft") for network in networks]
        self._write(node, faults)
        script = ""
        for fault in faults:
            ports = (netns.port_of(node, fault.network), self._tap(node, fault.network))
            script += nft_rules(self._table(node, fault), ports, direction, condition)
        done_at = time.monotonic()
        self._nft(["-f", "-"], script)
        return done_at

    def _write(self, node: str, faults: Sequence[LinkFault]) -> None:
        replaced = {(fault.kind, fault.network) for fault in faults}
        kept = [fault for fault in self.standing(node) if (fault.kind, fault.network) not in replaced]
        path = self._layout.faults(node)
        draft = path.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode([*kept, *faults]))
        draft.replace(path)

    def _refuse_beside(self, node: str, networks: Sequence[str], kind: Kind, by: str) -> None:
        for fault in self.standing(node):
            if (fault.kind, fault.by) == (kind, by) and fault.network in networks:
                raise DevClusterError(f"{node}: {fault} stands, and tc does one of both; `heal-node {node}` first")

    @staticmethod
    def _table(node: str, fault: LinkFault) -> str:
        return f"{fault.kind}-{netns.port_of(node, fault.network)}"

    @staticmethod
    def _tap(node: str, network: str) -> str:
        return f"{netns.port_of(node, network)}-tap"

    def _in_switch(self, argv: Sequence[str], stdin: str = "") -> str:
        return netns.run_in(self._switch.living_init().pid, SWITCH, argv, stdin=stdin)

    def _nft(self, arguments: Sequence[str], stdin: str = "") -> str:
        return self._in_switch(["nft", *arguments], stdin)

    def _queue(self, node: str, network: str, station: Station, discipline: Sequence[str] | None) -> None:
        """Set, or with None take away, the queues at both ends of the cable."""
        ends = [
            (self._switch.living_init().pid, SWITCH, netns.port_of(node, network)),
            (station.living_init().pid, node, INTERFACES[network]),
        ]
        for pid, name, device in ends:
            if discipline is None:
                # Replaced first: deleting fails if there is none, as after a crash half-way.
                netns.run_in(pid, name, ["tc", "qdisc", "replace", "dev", device, "root", "pfifo"])
                netns.run_in(pid, name, ["tc", "qdisc", "del", "dev", device, "root"])
            else:
                netns.run_in(pid, name, ["tc", "qdisc", "replace", "dev", device, "root", *discipline])

    def _has_netem(self) -> bool:
        """Tried on the switch's own loopback, which carries nothing."""
        try:
            self._in_switch(["tc", "qdisc", "replace", "dev", "lo", "root", "netem", "delay", "1ms"])
        except DevClusterError as error:
            if _NO_NETEM not in str(error):
                raise
            return False
        self._in_switch(["tc", "qdisc", "del", "dev", "lo", "root"])
        return True

    def _start_forwarder(self, node: str, network: str, settings: Sequence[float]) -> None:
        port, tap = netns.port_of(node, network), self._tap(node, network)
        self._forwarder(port, tap, settings).start()
        bridge = netns.bridge_of(network)
        netns.ip_batch(
            self._switch.living_init().pid,
            SWITCH,
            f"link set dev {port} nomaster",
            f"link set dev {tap} master {bridge} addrgenmode none up",
        )

    def _end_forwarder(self, node: str, network: str) -> None:
        """The tap goes with its process; then the port, if there still is one, is the bridge's again."""
        port = netns.port_of(node, network)
        if not self._layout.forwarder_pid(port).exists():
            return
        self._forwarder(port, self._tap(node, network), (0, 0, 0)).stop()
        self._layout.forwarder_pid(port).unlink(missing_ok=True)
        if port in self._in_switch(["ip", "-br", "link", "show"]).replace("@", " ").split():
            netns.ip_batch(
                self._switch.living_init().pid, SWITCH, f"link set dev {port} master {netns.bridge_of(network)}"
            )

    def _forwarder(self, port: str, tap: str, settings: Sequence[float]) -> Daemon:
        pid_file, log = self._layout.forwarder_pid(port), self._layout.forwarder_log(port)
        numbers = [f"{number:g}" for number in settings]
        argv = (sys.executable, "-I", "-S", forwarder.__file__, port, tap, *numbers, str(pid_file), str(log))
        return Daemon(self._switch, "forwarder", argv, pid_file, log)
