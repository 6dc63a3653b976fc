"""Delays (and loses) the packets of one station's link, in user space, for kernels without netem.

It stands between the station's port and the switch's bridge: what comes from the port leaves through a tap device that
is a port of the bridge in its place, and the other way round. Each direction keeps its order: a packet leaves when its
delay is over and all before it have left, so jitter alone reorders nothing.

Run as a program (`python -I -S forwarder.py PORT TAP MEAN_MS JITTER_MS LOSS_PERCENT PID_FILE LOG`) inside the switch,
standard library only, importing nothing of ours. It is in the background and has written its pid when the call
returns. A process of the switch, so that it ends with it at the latest, however the cluster ends. Wiring the tap to the
bridge is the caller's.

Frames travel with the kernel's offload header (struct virtio_net_hdr): checksums that nobody computed yet, and segments
larger than the wire's, pass as they are.
"""

import contextlib
import errno
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import sys
import time

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x2, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6 = 1, 2, 4
SOL_PACKET, PACKET_VNET_HDR, PACKET_OUTGOING = 263, 15, 4
ETH_P_ALL = 3
FRAME_BYTES = 70_000  # a segment of 64 KiB with its headers
BUFFER_BYTES = 8 * 2**20
MAX_BATCH = 64
NICENESS = -15
# What writing to a link says that has no carrier, is down or gone: a packet lost, as on any cable.
LOST = (errno.ENETDOWN, errno.ENXIO, errno.ENODEV, errno.ENOBUFS, errno.EIO, errno.EAGAIN, errno.EINVAL)


class Direction:
    """Packets on their way from one end to the other, in order."""

    def __init__(self, mean_s: float, jitter_s: float, loss: float, draw: random.Random) -> None:
        self._mean_s, self._jitter_s, self._loss, self._draw = mean_s, jitter_s, loss, draw
        self._last = 0.0

    def due(self, now: float) -> float | None:
        """When a packet that came now leaves; None if it is lost."""
        if self._draw.random() < self._loss:
            return None
        delay_s = max(0.0, self._mean_s + self._draw.uniform(-self._jitter_s, self._jitter_s))
        self._last = max(self._last, now + delay_s)
        return self._last


def open_tap(name: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH14x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)
    return tap


def open_port(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    port.bind((name, ETH_P_ALL))
    port.setblocking(False)
    return port


def read_port(port: socket.socket) -> bytes | None:
    """One frame from the station; None if there is none."""
    try:
        frame, address = port.recvfrom(FRAME_BYTES)
    except OSError as error:
        if error.errno not in LOST:
            raise
        return None
    return b"" if address[2] == PACKET_OUTGOING else frame


def read_tap(tap: int) -> bytes | None:
    try:
        return os.read(tap, FRAME_BYTES)
    except OSError as error:
        if error.errno not in LOST:
            raise
        return None


def forward(tap: int, port: socket.socket, outward: Direction, inward: Direction) -> None:
    """For ever: until it is killed."""
    waiting: list[tuple[float, int, bool, bytes]] = []  # due, number, leaves through the tap, frame
    number = 0
    poll = select.poll()
    for descriptor in (tap, port.fileno()):
        poll.register(descriptor, select.POLLIN)
    while True:
        wait_s = waiting[0][0] - time.monotonic() if waiting else None
        poll.poll(None if wait_s is None else max(0.0, wait_s) * 1000)
        for is_outward in (True, False):
            direction = outward if is_outward else inward
            for _ in range(MAX_BATCH):
                frame = read_port(port) if is_outward else read_tap(tap)
                if frame is None:
                    break
                due = direction.due(time.monotonic()) if frame else None
                if due is not None:
                    number += 1
                    heapq.heappush(waiting, (due, number, is_outward, frame))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, is_outward, frame = heapq.heappop(waiting)
            try:
                os.write(tap, frame) if is_outward else port.send(frame)
            except OSError as error:
                if error.errno not in LOST:
                    raise


def go_into_background(pid_file: str, log: str) -> None:
    child = os.fork()
    if child != 0:
        while not os.path.exists(pid_file):
            if os.waitpid(child, os.WNOHANG)[0]:
                sys.exit(f"the forwarder ended while starting; see {log}")
            time.sleep(0.001)
        os._exit(0)
    os.setsid()
    with open("/proc/self/comm", "w", encoding="ascii") as name:
        name.write("forwarder")
    null, output = os.open(os.devnull, os.O_RDWR), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, target)
    with open(f"{pid_file}.new", "w", encoding="ascii") as file:
        file.write(str(os.getpid()))
    os.rename(f"{pid_file}.new", pid_file)


def main(port_name: str, tap_name: str, mean_ms: str, jitter_ms: str, percent: str, pid_file: str, log: str) -> None:
    tap, port = open_tap(tap_name), open_port(port_name)
    draw = random.Random()
    settings = (float(mean_ms) / 1000, float(jitter_ms) / 1000, float(percent) / 100, draw)
    go_into_background(pid_file, log)
    with contextlib.suppress(PermissionError):  # the delay is to be what was asked for, also on a busy machine
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    forward(tap, port, Direction(*settings), Direction(*settings))


if __name__ == "__main__":
    main(*sys.argv[1:])
