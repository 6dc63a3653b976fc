"""One simulated agent: what a real one says and answers, with as many workers as its node has ranks. See `agents`."""

from __future__ import annotations

import collections
import resource
import socket
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import flashrec
from flashrec.core import events as e
from flashrec.core.ranks import RankSet, compact
from flashrec.core.types import Plan, Report
from flashrec.transport.handshake import Connecting
from flashrec.wire import frames
from flashrec.wire import messages as m

STEP_S = 1.0  # one optimizer step of the simulated training
FIRST_STEP = 10
KEY_BYTES = 128  # an NCCL unique id
MAX_DECODED = 1000
_BEATS = ("AgentHeartbeat", "HeartbeatAck")


class World:
    """What all agents share: the shape of the job, the step that training is at, what was counted."""

    def __init__(self, ranks_per_node: int, num_ranks: int, rendezvous: str, secret: bytes, logs: Path) -> None:
        """rendezvous: 'root' (rank 0 of each group posts one key, as NCCL does) or 'mesh' (every rank posts one)."""
        self.ranks_per_node, self.num_ranks, self.rendezvous = ranks_per_node, num_ranks, rendezvous
        self.secret, self.logs = secret, logs
        self.lost: set[str] = set()
        self.timers: collections.deque[tuple[float, Agent, m.Message]] = collections.deque()
        self.step, self._step_at = FIRST_STEP, time.monotonic()
        self._members: dict[str, tuple[int, ...]] = {}
        self._replicas: dict[int, RankSet] = {}
        self._fenced_at: dict[int, int] = {}
        self._decoded: dict[bytes, Any] = {}
        self._served: tuple[Plan | None, dict[int, set[int]]] = (None, {})
        self.marks: dict[str, list[float]] = {}  # what -> when it first and last happened

    def groups_of(self, rank: int) -> tuple[str, ...]:
        """One group of all, one over the ranks with the same place on each node, one on the node."""
        per_node = self.ranks_per_node
        return "world", f"across/{rank % per_node}", f"node/{rank // per_node}"

    def replicas_of(self, rank: int) -> RankSet:
        """Each shard is held once a node."""
        place = rank % self.ranks_per_node
        if place not in self._replicas:
            self._replicas[place] = compact(self.members(f"across/{place}"))
        return self._replicas[place]

    def served_by(self, plan: Plan, rank: int) -> set[int]:
        """Targets that get (a part of) their state from this rank."""
        if self._served[0] is not plan:
            self._served = plan, {}
            for target in plan.sources:
                for source in _sources(plan, target):
                    self._served[1].setdefault(source, set()).add(target)
        return self._served[1].get(rank, set())

    def members(self, group: str) -> tuple[int, ...]:
        if group not in self._members:
            kind, _, number = group.partition("/")
            per_node = self.ranks_per_node
            chosen = {
                "world": lambda: range(self.num_ranks),
                "across": lambda: range(int(number), self.num_ranks, per_node),
                "node": lambda: range(int(number) * per_node, (int(number) + 1) * per_node),
            }[kind]()
            self._members[group] = tuple(chosen)
        return self._members[group]

    def keys_of(self, group: str) -> int:
        """How many keys each member waits for."""
        return len(self.members(group)) if self.rendezvous == "mesh" else 1

    def step_at(self, generation: int) -> int:
        """The step in which the fence of this generation has found all ranks."""
        if generation not in self._fenced_at:
            self._fenced_at = {generation: self.step}
        return self._fenced_at[generation]

    def train(self, now: float) -> None:
        if now - self._step_at >= STEP_S:
            self.step, self._step_at = self.step + 1, now

    def mark(self, what: str) -> None:
        now = time.monotonic()
        self.marks.setdefault(what, [now, now])[1] = now

    def decode(self, payload: bytes) -> m.ToAgent:
        """What is sent to all agents alike is decoded once: the other ends of these are on other machines."""
        if payload not in self._decoded:
            if len(self._decoded) > MAX_DECODED:
                self._decoded.clear()
            self._decoded[payload] = frames.to_agent.decode(payload)
        decoded: m.ToAgent = self._decoded[payload]
        return decoded

    def counted(self, agents: Iterable[Agent]) -> dict[str, Any]:
        """Since the last call: times, and messages and bytes of the agents that were there before and have not started
        a worker since. (The first start is counted by all.)"""
        settled = [agent for agent in agents if not agent.is_new]
        used = resource.getrusage(resource.RUSAGE_SELF)
        said = {
            "marks": self.marks,
            "cpu_s": used.ru_utime + used.ru_stime,
            "agents": {
                direction: {
                    what: _spread([counted[what] for counted in (agent.counts[direction] for agent in settled)])
                    for what in ("messages", "bytes", "beats", "beat_bytes")
                }
                for direction in ("in", "out")
            },
        }
        self.marks = {}
        for agent in agents:
            agent.forget()
        return said


def _spread(values: list[int]) -> dict[str, float]:
    if not values:
        return {}
    return {"median": statistics.median(values), "max": max(values), "sum": sum(values)}


class Agent:
    """One connection. `receive` takes bytes, `unsent` is what is to be sent."""

    def __init__(self, world: World, node: str, launch: int, sock: socket.socket) -> None:
        self.world, self.node, self._launch, self.sock = world, node, launch, sock
        self.lost = self.is_greeted = self.is_live = self.is_new = False
        self.wanted, self.interval_s, self._tags_every = 0, 0.25, 1
        self.unsent = bytearray()
        self._side: Connecting | None = Connecting(world.secret)
        self._reply = b""
        self._frames = frames.FrameReader()
        self._incarnation = self._generation = self._sequence = 0
        self._ranks: dict[int, tuple[int, bool]] = {}  # rank -> incarnation, and whether it joins
        self._plan: Plan | None = None
        self._keys: dict[str, set[str]] = {}
        self._missing: dict[str, int] = {}  # groups without all their keys, and how many they have in all
        self._formed = True
        self._owed: set[int] = set()  # ranks that are still to be restored
        self._tags: tuple[int, tuple[m.WorkerBeat, ...]] = (-1, ())
        self.forget()

    def forget(self) -> None:
        """Count from zero."""
        self.counts = {way: dict.fromkeys(("messages", "bytes", "beats", "beat_bytes"), 0) for way in ("in", "out")}
        self.is_new = False

    # ---- the connection -------------------------------------------------------------------------------------------

    def greet(self) -> None:
        assert self._side is not None
        self.is_greeted = True
        self.unsent += self._side.hello()

    def receive(self, data: bytes) -> None:
        if self._side is not None:
            self._reply += data
            if not self._shake_hands(self._side):
                return
            data, self._reply = self._reply, b""
        for payload in self._frames.feed(data):
            self._hear(self.world.decode(payload), len(payload) + 4)

    def _shake_hands(self, side: Connecting) -> bool:
        """True once the handshake is over; what came behind it is left in `_reply`."""
        if not self.is_live and len(self._reply) == side.reply_bytes:
            self.unsent += side.prove(self._reply)
        if len(self._reply) <= side.reply_bytes:
            return False
        self._reply = self._reply[side.reply_bytes + 1 :]
        self._side, self.is_live = None, True
        self.say(m.AgentHello(self.node, self._launch, 1, "127.0.0.1", flashrec.__version__))
        return True

    def say_together(self, messages: list[Any]) -> None:
        """What workers say at the same time, as a real agent sends it."""
        if messages:
            self.say(messages[0] if len(messages) == 1 else m.Relayed(tuple(messages)))

    def say(self, *messages: m.Sendable) -> None:
        for message in messages:
            data = frames.frame(frames.encode(message))
            self._count("out", type(message).__name__, len(data))
            self.unsent += data

    def flush(self) -> None:
        """Raises OSError."""
        if self.unsent:
            try:
                del self.unsent[: self.sock.send(self.unsent)]
            except BlockingIOError:
                pass

    def _count(self, way: str, kind: str, size: int) -> None:
        counts = self.counts[way]
        if kind in _BEATS:
            counts["beats"] += 1
            counts["beat_bytes"] += size
        else:
            counts["messages"] += 1
            counts["bytes"] += size

    def beat(self, now: float) -> None:
        self.world.train(now)
        self._sequence += 1
        if self._tags[0] != self.world.step:
            self._tags = self.world.step, tuple(self._tag(rank, self.world.step) for rank in self._ranks)
        tags = () if self._sequence % self._tags_every else self._tags[1]
        self.say(m.AgentHeartbeat(self._incarnation, self._sequence, tags))

    def _tag(self, rank: int, step: int) -> m.WorkerBeat:
        groups = dict.fromkeys((group.partition("/")[0] for group in self.world.groups_of(rank)), 10 * step)
        return m.WorkerBeat(
            rank, self._ranks[rank][0], step, step - 1, step - 1, "step", waiting=False, collectives=groups, still_s=0.1
        )

    # ---- what the manager says ------------------------------------------------------------------------------------

    def _hear(self, message: m.ToAgent, size: int) -> None:
        world = self.world
        self._count("in", type(message).__name__, size)
        match message:
            case m.AgentWelcome():
                self._incarnation, self._generation = message.incarnation, message.generation
                self.interval_s, self._tags_every = message.heartbeat_interval_s, message.tags_every
                self.say(
                    m.NodeHealth(self._incarnation, "well"), m.ProbesOffered({"control": ("127.0.0.1", 9)})
                )  # the port is not used: see above
                self.is_new = True
            case m.ExpectTasks():
                self._start(message)
            case m.Fence():
                world.mark("fence")
                self._generation = message.generation
                self._report()
            case m.PlanPublished():
                world.mark("plan")
                self._follow(message.plan)
            case m.KeysPushed() if message.generation == self._generation:
                world.mark("keys")
                self._have(message.group, message.items)
                self._go_on()
            case m.Resume():
                world.mark("resume")
                self._commit()
            case m.KillWorkers():
                for rank, incarnation in message.workers:
                    if self._ranks.pop(rank, None) is not None:
                        self.say(e.WorkerExited(rank, incarnation, "none", True, "killed"))
            case m.ProbeAsked():
                self._probe(message)

    def _start(self, order: m.ExpectTasks) -> None:
        self.is_new = True
        for task in order.tasks:
            self._ranks[task.rank] = task.incarnation, task.joins
            (self.world.logs / f"rank-{task.rank}.{task.incarnation}.log").write_text("hello\n")
            self.say(e.WorkerStarted(task.rank, task.incarnation, 1))
        self.say_together([e.WorkerJoined(task.rank, task.incarnation) for task in order.tasks])
        self._tags = (-1, ())
        if any(task.joins for task in order.tasks):
            self._report()
            return
        self._plan = Plan(self._generation, FIRST_STEP, (), {}, "first start")
        self._begin()

    def _report(self) -> None:
        self._plan, self._keys = None, {}
        step, reports = self.world.step_at(self._generation), []
        for rank, (incarnation, joins) in self._ranks.items():
            replicas = self.world.replicas_of(rank)
            report = Report(-1, -1, -1, False, replicas) if joins else Report(step, step, step - 1, True, replicas)
            reports.append(e.WorkerReported(rank, incarnation, self._generation, report))
        self.say_together(reports)

    def _follow(self, plan: Plan) -> None:
        self._plan, self._generation = plan, plan.generation
        self._begin()

    def _begin(self) -> None:
        """Post what this node's ranks have to post, then wait for the keys of all their groups."""
        self._formed, self._owed, posted = False, set(self._ranks), []
        groups = {rank: self.world.groups_of(rank) for rank in self._ranks}
        self._missing = {group: self.world.keys_of(group) for of_rank in groups.values() for group in of_rank}
        for group, known in self._keys.items():  # that came before the plan
            self._have(group, known)
        for rank, of_rank in groups.items():
            for group in of_rank:
                members = self.world.members(group)
                if self.world.rendezvous == "mesh" or members[0] == rank:
                    self._have(group, (str(rank),))
                    posted.append(self._key(rank, group, str(rank), members))
        self.say_together(posted)
        self._go_on()

    def _have(self, group: str, keys: Iterable[str]) -> None:
        known = self._keys.setdefault(group, set())
        known.update(keys)
        if len(known) >= self._missing.get(group, len(known) + 1):
            del self._missing[group]

    def _key(self, rank: int, group: str, key: str, members: tuple[int, ...]) -> m.KeyPosted:
        self.world.mark("posted")
        value = bytes(KEY_BYTES)
        return m.KeyPosted(rank, self._ranks[rank][0], self._generation, group, key, value, compact(members))

    def _go_on(self) -> None:
        plan = self._plan
        if plan is None or not self._owed or self._missing:
            return
        if not self._formed:
            self._formed = True
            if plan.reason != "first start":
                self.say_together([e.WorkerFormed(r, life, plan.generation) for r, (life, _) in self._ranks.items()])
            targets = [rank for rank in self._ranks if rank in plan.sources]
            self.say_together([self._key(r, f"restore/{r}", "address", (*_sources(plan, r), r)) for r in targets])
        served = {rank: self.world.served_by(plan, rank) for rank in self._owed}
        ready = [rank for rank in self._owed if all(f"restore/{target}" in self._keys for target in served[rank])]
        self._owed.difference_update(ready)
        self.say_together(
            [e.WorkerRestored(r, self._ranks[r][0], plan.generation, plan.resume_step) for r in sorted(ready)]
        )

    def _commit(self) -> None:
        self._ranks = {rank: (incarnation, False) for rank, (incarnation, _) in self._ranks.items()}
        step, generation = self.world.step + 1, self._generation
        self.say_together([e.WorkerCommitted(rank, life, generation, step) for rank, (life, _) in self._ranks.items()])

    def _probe(self, asked: m.ProbeAsked) -> None:
        reached = asked.node not in self.world.lost
        answer = m.ProbeAnswered(asked.number, asked.node, asked.path, reached)
        if reached:
            self.say(answer)
        else:
            self.world.timers.append((time.monotonic() + asked.timeout_s, self, answer))


def _sources(plan: Plan, target: int) -> tuple[int, ...]:
    return (plan.sources[target], *plan.stripes.get(target, ()))
