"""The network of a cluster: a bridge in the switch's namespace, one veth pair per station, and pulling its plug.

A station's cable is a veth pair: `eth0` in the station, a port named after the station at the switch. Taking the
*port* down is what a pulled plug is: from then on no packet leaves the station, also none that the kernel sends for
processes that are dying (FIN, RST).

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

from flashrec.devcluster.errors import DevClusterError
from flashrec.devcluster.spec import PREFIX_LENGTH, SWITCH

_BRIDGE = "br0"
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


def make_switch(switch_pid: int) -> None:
    _ip_batch(
        switch_pid,
        SWITCH,
        "link set dev lo up",
        f"link add name {_BRIDGE} type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
        f"link set dev {_BRIDGE} addrgenmode none up",
    )


def plug_in(switch_pid: int, station: str, station_pid: int, *, address: str, mac: str) -> None:
    """Lay the cable from a station that has none to the switch and bring it up. Pids are the two inits'."""
    _ip_batch(
        switch_pid,
        SWITCH,
        f"link add name {station} type veth peer name eth0 address {mac} netns {station_pid}",
        f"link set dev {station} master {_BRIDGE} addrgenmode none up",
    )
    _ip_batch(
        station_pid,
        station,
        "link set dev lo up",
        "link set dev eth0 addrgenmode none",
        f"addr add {address}/{PREFIX_LENGTH} dev eth0",
        "link set dev eth0 up",
    )


def _ip_batch(pid: int, station: str, *commands: str) -> None:
    done = subprocess.run(
        ["nsenter", f"--net=/proc/{pid}/ns/net", "ip", "-batch", "-"],
        input="".join(f"{command}\n" for command in commands),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if done.returncode != 0:
        raise DevClusterError(f"{station}: cannot set up the network: {done.stderr.strip()}")
