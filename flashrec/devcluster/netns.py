"""The networks of a cluster: a bridge each in the switch's namespace, one veth pair per station, and pulling its plug.

A station's cable is a veth pair: `eth0` (control network) or `fab0` (fabric) in the station, and a *port* of the
switch's bridge, `n0` or `n0-fab`. Taking the port down is what a pulled plug is: from then on no packet leaves the
station, also none that the kernel sends for processes that are dying (FIN, RST).

Wiring goes through `ip`, in one batch per namespace. Pulling the plug does not: it must be over in a moment, so it is
one message on a netlink socket that was opened inside the switch's namespace and works from anywhere.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Sequence

from flashrec.devcluster.errors import DevClusterError
from flashrec.devcluster.requirements import find_program
from flashrec.devcluster.spec import CONTROL_NETWORK, INTERFACES, PREFIX_LENGTH, SWITCH, ClusterSpec

_BRIDGES = {network: f"br-{interface}" for network, interface in INTERFACES.items()}
_CLONE_NEWNET = 0x40000000

# linux/netlink.h, linux/rtnetlink.h, linux/if_link.h
_NLM_F_REQUEST_ACK = 0x1 | 0x4
_NLMSG_ERROR = 2
_RTM_NEWLINK, _RTM_DELLINK, _RTM_GETLINK = 16, 17, 18
_IFLA_IFNAME = 3
_IFF_UP = 0x1
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_IFINFO = struct.Struct("=BxHiII")  # family, device type, index, flags, mask of flags that change
_REPLY_TIMEOUT_S = 5.0


class LinkControl:
    """Ports of one switch: up, down, gone. Holds a socket, and with it the switch's namespace, until `close()`."""

    def __init__(self, switch_pid: int) -> None:
        self._socket = _netlink_socket_in(switch_pid)
        self._socket.settimeout(_REPLY_TIMEOUT_S)
        self._lock = threading.Lock()

    def close(self) -> None:
        self._socket.close()

    def set_up(self, port: str, is_up: bool) -> None:
        flags = _IFF_UP if is_up else 0
        self._request(_RTM_NEWLINK, port, flags, _IFF_UP)

    def is_up(self, port: str) -> bool:
        """False also for a port that is not there: the station lost its power and the kernel took the cable away."""
        try:
            reply = self._request(_RTM_GETLINK, port)
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise
            return False
        return bool(_IFINFO.unpack_from(reply, _HEADER.size)[3] & _IFF_UP)

    def remove(self, port: str) -> None:
        """Both ends of the cable; nothing to do if it is gone already."""
        try:
            self._request(_RTM_DELLINK, port)
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise

    def _request(self, kind: int, port: str, flags: int = 0, changed: int = 0) -> bytes:
        name = port.encode() + b"\0"
        attribute = struct.pack("=HH", 4 + len(name), _IFLA_IFNAME) + name.ljust((len(name) + 3) & ~3, b"\0")
        body = _IFINFO.pack(socket.AF_UNSPEC, 0, 0, flags, changed) + attribute
        # A GETLINK is answered by its data alone, unless an ACK is asked for too: then there would be two answers.
        wanted = 0x1 if kind == _RTM_GETLINK else _NLM_F_REQUEST_ACK
        with self._lock:
            self._socket.send(_HEADER.pack(_HEADER.size + len(body), kind, wanted, 0, 0) + body)
            reply = self._socket.recv(65536)
        if _HEADER.unpack_from(reply)[1] == _NLMSG_ERROR:
            (code,) = struct.unpack_from("=i", reply, _HEADER.size)
            if code:
                raise OSError(-code, f"{os.strerror(-code)}: port {port}")
        return reply


def _netlink_socket_in(pid: int) -> socket.socket:
    """A socket belongs to the namespace it was made in, and setns(2) moves one thread only: so a thread makes it."""
    result: list[socket.socket | OSError] = []

    def make() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                if libc.setns(namespace, _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), f"cannot enter the network of process {pid}")
            finally:
                os.close(namespace)
            result.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE))
        except OSError as error:
            result.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if isinstance(result[0], OSError):
        raise DevClusterError(f"switch: {result[0].strerror}") from result[0]
    return result[0]


def port_of(station: str, network: str) -> str:
    """The switch's end of a station's cable."""
    return station if network == CONTROL_NETWORK else f"{station}-fab"


def bridge_of(network: str) -> str:
    return _BRIDGES[network]


def make_switch(switch_pid: int, spec: ClusterSpec) -> None:
    commands = ["link set dev lo up"]
    for network in spec.networks:
        commands.append(f"link add name {_BRIDGES[network]} type bridge stp_state 0 forward_delay 0 mcast_snooping 0")
        commands.append(f"link set dev {_BRIDGES[network]} addrgenmode none up")
    ip_batch(switch_pid, SWITCH, *commands)


def plug_in(switch_pid: int, spec: ClusterSpec, station: str, station_pid: int) -> None:
    """Lay the cables from a station that has none to the switch and bring them up. Pids are the two inits'."""
    at_switch, at_station = [], ["link set dev lo up"]
    for network in spec.networks:
        port, interface, mac = port_of(station, network), INTERFACES[network], spec.mac(station, network)
        at_switch.append(f"link add name {port} type veth peer name {interface} address {mac} netns {station_pid}")
        at_switch.append(f"link set dev {port} master {_BRIDGES[network]} addrgenmode none up")
        at_station.append(f"link set dev {interface} addrgenmode none")
        at_station.append(f"addr add {spec.address(station, network)}/{PREFIX_LENGTH} dev {interface}")
        at_station.append(f"link set dev {interface} up")
    ip_batch(switch_pid, SWITCH, *at_switch)
    ip_batch(station_pid, station, *at_station)


def ip_batch(pid: int, station: str, *commands: str) -> None:
    """Commands of `ip` in the network of a process; DevClusterError with what it said if one fails."""
    run_in(pid, station, ["ip", "-batch", "-"], stdin="".join(f"{command}\n" for command in commands))


def run_in(pid: int, station: str, argv: Sequence[str], *, stdin: str = "") -> str:
    """Run a program of the machine in the network of a process; its output, or DevClusterError if it fails."""
    done = subprocess.run(
        ["nsenter", f"--net=/proc/{pid}/ns/net", find_program(argv[0]), *argv[1:]],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise DevClusterError(f"{station}: cannot set up the network: {argv[0]}: {said}")
    return done.stdout
