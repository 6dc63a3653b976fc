"""Network interfaces of this node: which one carries the fabric, and its address. IPv4, as fabrics over IP are."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

_SIOCGIFADDR = 0x8915  # linux/sockios.h


class NoInterface(Exception):
    """None of the interfaces that were asked for is on this node; the message says which there are."""


def addresses() -> dict[str, str]:
    """Interface name -> its IPv4 address, for those that have one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has none
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def choose(wanted: str, towards: str, there: dict[str, str]) -> tuple[str, str]:
    """Name and address of the fabric's interface.

    wanted: names, or networks as 10.1.0.0/16, separated by commas, the first that is there; '': the one that has the
    address `towards`. there: as `addresses` returns it. Raises NoInterface."""
    for word in filter(None, wanted.split(",")):
        if "/" not in word:
            if word in there:
                return word, there[word]
            continue
        network = ipaddress.ip_network(word, strict=False)
        for name, address in there.items():
            if ipaddress.ip_address(address) in network:
                return name, address
    if not wanted:
        for name, address in there.items():
            if address == towards:
                return name, address
    listed = ", ".join(f"{name} {address}" for name, address in there.items()) or "none with an IPv4 address"
    asked = f"no interface {wanted}" if wanted else f"no interface with the address {towards}"
    raise NoInterface(f"{asked} on this node (there are: {listed}); set fabric.interface")
