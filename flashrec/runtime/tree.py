"""Connections among all ranks along a tree, rank 0 at its root: for votes and DDP's buffers, where gradients are on the
CPU.

    count    to each neighbour goes the sum of all    one message per connection and direction
             ranks that are not beyond it, as soon
             as they are known
    spread   bytes of rank 0 go down                  one message per connection

A small all-reduce of gloo wakes three threads on each rank one after the other, and a ring has as many hops as there
are ranks. Here the main thread reads and writes the sockets itself, and a tree has at most 2 log8(ranks) hops. Whoever
votes last has been told everything else by then, and waits for nobody.

A tree belongs to one generation and is built at its first use, over the process groups of that generation. A fence
shuts its sockets like all others; whoever is then inside gets a `RuntimeError`, as from a collective that was cut.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from collections.abc import Iterator

import torch
import torch.distributed as dist

from flashrec.runtime.errors import Superseded
from flashrec.runtime.timeline import logger
from flashrec.runtime.transfer.protocol import advance, send_all
from flashrec.runtime.transfer.target import listen
from flashrec.runtime.worker import Worker
from flashrec.transport.handshake import HandshakeRefused, accept_authenticated, connect_authenticated
from flashrec.transport.readable import await_readable

FANOUT = 8
_COUNT = struct.Struct("<qii")  # step, ranks present, ranks that want a pause
_HEAD = struct.Struct("<qq")  # step, bytes that follow
_HELLO = struct.Struct("<qi")  # generation, rank
_ADDRESS = struct.Struct("<16sH")
_TIMEVAL = struct.Struct("@ll")  # seconds, microseconds
_CLOSED = "the other end closed the connection"


class Tree:
    """The connections of this rank in one generation."""

    def __init__(self, worker: Worker, generation: int) -> None:
        self._worker, self._progress, self.generation = worker, worker.progress, generation
        self._parent: socket.socket | None = None
        self._children: list[socket.socket] = []
        self._neighbours: list[socket.socket] = []  # both
        self._num_ops = 0
        self._patience_s = 0.0  # ranks come at other times: one reads its data, another one still saves
        self._peers: dict[socket.socket, str] = {}  # of what is open; "[address]:port", as in gloo's errors

    def connect(self) -> None:
        """A collective over the default group. Raises RuntimeError, Superseded; then `close` it."""
        worker, limits = self._worker, self._worker.limits
        rank, world_size = worker.env.rank, worker.env.world_size
        self._patience_s = max(limits.resume_timeout_s, worker.groups.timeout_s)
        children = range(FANOUT * rank + 1, min(FANOUT * rank + FANOUT + 1, world_size))
        with self._operation("connecting"), worker.sockets.watch(listen(worker.control.welcome.address)) as listener:
            addresses = _exchange(listener.getsockname()[:2])
            listener.settimeout(limits.connect_timeout_s)
            if rank:
                parent = socket.create_connection(addresses[(rank - 1) // FANOUT], limits.connect_timeout_s)
                self._parent = self._keep(parent)
                connect_authenticated(parent, worker.secret)
                parent.sendall(_HELLO.pack(self.generation, rank))
            accepted: dict[int, socket.socket] = {}
            while len(accepted) < len(children):
                number, child = self._accept(listener)
                if number not in children or number in accepted:
                    raise ConnectionError(f"rank {number} is no child of rank {rank}, or is so twice")
                accepted[number] = child
            self._children = [accepted[number] for number in children]
            self._neighbours = self._children if self._parent is None else [self._parent, *self._children]
            for connection in self._neighbours:
                _limit(connection, self._patience_s)

    def count(self, step: int, is_pausing: bool) -> tuple[int, int]:
        """(ranks that have called this, those of them that want a pause). Raises RuntimeError when it was cut."""
        progress = self._progress
        self._num_ops, progress.is_in_tree = self._num_ops + 1, True
        progress.tree_ops = self.generation, self._num_ops
        try:
            heard: dict[socket.socket, tuple[int, int]] = {}
            missing, told = self._neighbours, None
            num_present, num_pausing = 1, int(is_pausing)  # of this rank and of those beyond the ones that are heard
            while missing:
                if len(missing) == 1:
                    (told,) = readable = missing
                    told.sendall(_COUNT.pack(step, num_present, num_pausing))
                else:
                    readable = self._await(missing)
                for neighbour in readable:
                    its_step, present, pausing = _COUNT.unpack(self._read(neighbour, _COUNT.size))
                    if its_step != step:
                        raise _other_step(its_step, step)
                    num_present, num_pausing = num_present + present, num_pausing + pausing
                    if neighbour is not told:
                        heard[neighbour] = present, pausing
                if told is not None:
                    break
                missing = [neighbour for neighbour in missing if neighbour not in heard]
            for neighbour, (present, pausing) in heard.items():
                neighbour.sendall(_COUNT.pack(step, num_present - present, num_pausing - pausing))
            return num_present, num_pausing
        except OSError as err:
            raise _cut(f"the vote of step {step}", err) from err
        finally:
            progress.is_in_tree = False

    def spread(self, step: int, views: list[memoryview]) -> None:
        """Fill `views`, bytes one after the other, with those of rank 0. Raises RuntimeError when it was cut."""
        progress = self._progress
        self._num_ops, progress.is_in_tree = self._num_ops + 1, True
        progress.tree_ops = self.generation, self._num_ops
        try:
            num_bytes = sum(map(len, views))
            if self._parent is not None:
                head = bytearray(_HEAD.size)
                received = self._receive(self._parent, [memoryview(head), *views], _HEAD.size) - _HEAD.size
                its_step, its_num_bytes = _HEAD.unpack(head)
                if its_step != step:
                    raise _other_step(its_step, step)
                if its_num_bytes != num_bytes:
                    raise RuntimeError(f"rank 0 shares {its_num_bytes} bytes, this rank expects {num_bytes}")
                if received < num_bytes:
                    self._receive(self._parent, advance(views, received), num_bytes - received)
            for child in self._children:
                message = [memoryview(_HEAD.pack(step, num_bytes)), *views]
                sent = child.sendmsg(message)
                if sent < _HEAD.size + num_bytes:
                    send_all(child, advance(message, sent))
        except OSError as err:
            raise _cut(f"sharing in step {step}", err) from err
        finally:
            progress.is_in_tree = False

    def close(self) -> None:
        for connection in list(self._peers):
            self._drop(connection)
        self._parent, self._children, self._neighbours = None, [], []

    def _accept(self, listener: socket.socket) -> tuple[int, socket.socket]:
        """(its rank, the connection) of the next child. Whoever does not know the job's secret is sent away."""
        while True:
            child = self._keep(listener.accept()[0])
            try:
                accept_authenticated(child, self._worker.secret)
            except HandshakeRefused as err:
                logger.warning("a connection to rank %d was refused: %s", self._worker.rank, err)
                self._drop(child)
                continue
            generation, number = _HELLO.unpack(self._read(child, _HELLO.size))
            if generation == self.generation:
                return number, child
            self._drop(child)  # left over in the queue of a port that was used before

    def _drop(self, connection: socket.socket) -> None:
        self._worker.sockets.release(connection)
        self._peers.pop(connection, None)
        connection.close()

    def _keep(self, connection: socket.socket) -> socket.socket:
        """From now on a fence shuts it. Raises Superseded: it has come already."""
        self._worker.sockets.hold(connection)
        self._peers[connection] = "[{}]:{}".format(*connection.getpeername()[:2])
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(self._worker.limits.connect_timeout_s)
        if self._worker.board.announced > self.generation:
            raise Superseded(f"generation {self.generation} is superseded")
        return connection

    def _await(self, connections: list[socket.socket]) -> list[socket.socket]:
        """Those that can be read. Raises TimeoutError."""
        readable: list[socket.socket] = await_readable(connections, self._patience_s)
        if not readable:
            raise TimeoutError("timed out")
        return readable

    def _read(self, connection: socket.socket, num_bytes: int) -> bytes:
        data = b""
        try:
            while len(data) < num_bytes:
                got = connection.recv(num_bytes - len(data))
                if not got:
                    raise ConnectionError(_CLOSED)
                data += got
        except OSError as err:
            raise self._named(err, connection) from err
        return data

    def _receive(self, connection: socket.socket, views: list[memoryview], num_wanted: int) -> int:
        """Fill at least `num_wanted` bytes of the views. Returns how many have come."""
        received = 0
        try:
            while True:
                got = connection.recvmsg_into(views)[0]
                if not got:
                    raise ConnectionError(_CLOSED)
                received += got
                if received >= num_wanted:
                    return received
                views = advance(views, got)
        except OSError as err:
            raise self._named(err, connection) from err

    def _named(self, error: OSError, connection: socket.socket) -> ConnectionError:
        return ConnectionError(f"{_why(error)} (closed by peer {self._peers.get(connection, '?')})")

    @contextlib.contextmanager
    def _operation(self, what: str) -> Iterator[None]:
        """Seen by the heartbeat, and what sockets raise becomes what a cut collective raises. Where this is done in
        each step it is written out."""
        self._num_ops, self._progress.is_in_tree = self._num_ops + 1, True
        self._progress.tree_ops = self.generation, self._num_ops
        try:
            yield
        except OSError as err:
            raise _cut(what, err) from err
        finally:
            self._progress.is_in_tree = False


class Trees:
    """The tree of the generation that trains, built when it is first needed."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._tree: Tree | None = None
        worker.progress.has_tree = True

    def spread(self, views: list[memoryview]) -> None:
        """See `Tree.spread`."""
        self.current().spread(self._worker.progress.v, views)

    def current(self) -> Tree:
        """A collective in the first call of a generation. Raises RuntimeError, Superseded."""
        generation = self._worker.progress.generation
        if self._tree is not None and self._tree.generation == generation:
            return self._tree
        self.close()
        self._tree = tree = Tree(self._worker, generation)
        try:
            tree.connect()
        except BaseException:
            self.close()
            raise
        return tree

    def close(self) -> None:
        if self._tree is not None:
            self._tree.close()
        self._tree = None


def _exchange(address: tuple[str, int]) -> list[tuple[str, int]]:
    """The addresses of all ranks; ours is `address`."""
    ip = ipaddress.ip_address(address[0].partition("%")[0])
    packed = ip.packed if ip.version == 6 else b"\0" * 10 + b"\xff\xff" + ip.packed
    mine = torch.frombuffer(bytearray(_ADDRESS.pack(packed, address[1])), dtype=torch.uint8)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    found = []
    for row in every:
        raw, port = _ADDRESS.unpack(bytes(row.tolist()))
        found_ip = ipaddress.IPv6Address(raw)
        found.append((str(found_ip.ipv4_mapped or found_ip), port))
    return found


def _limit(connection: socket.socket, timeout_s: float) -> None:
    """The kernel ends what takes longer. With a time-out of Python's, each call would begin with a `poll`."""
    connection.settimeout(None)
    seconds = int(timeout_s)
    limit = _TIMEVAL.pack(seconds, int((timeout_s - seconds) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _cut(what: str, error: OSError) -> RuntimeError:
    """What a collective that was cut raises."""
    return RuntimeError(f"ProcessGroup: {what} was cut: {_why(error)}")


def _why(error: OSError) -> object:
    """The kernel says of a limit of ours that it would block."""
    return "timed out" if isinstance(error, BlockingIOError) else error


def _other_step(its_step: int, step: int) -> RuntimeError:
    return RuntimeError(f"another rank is in step {its_step}, this one in step {step}")
