"""Worlds of other sizes: who is where in them, and a job that shrinks and grows while anything fails at any moment."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrec.core import effects as fx
from flashrec.core import events as e
from flashrec.core.limits import Limits
from flashrec.core.machine import Machine
from flashrec.core.membership import Estate, Members
from flashrec.core.resize import plan_world
from flashrec.core.types import Phase, Plan, Report
from tests.core.driver import snapshot

LIMITS = Limits(
    shrink="replica_groups", max_resizes=1000, resize_interval_s=5.0, spare_wait_s=10.0, max_without_progress=1000,
    max_in_place=1000,
)  # fmt: skip


def members_of(num_nodes: int, per_node: int, num_active: int, dead: set[int] = frozenset()) -> Members:  # type: ignore[assignment]
    members = Members(tuple(f"n{i}" for i in range(num_nodes)), num_active, per_node)
    for i, node in enumerate(members.nodes.values()):
        node.alive = i not in dead or i % 2 == 1
        node.link_lost = "cannot be reached" if i in dead and i % 2 == 1 else ""
    return members


@settings(max_examples=300, deadline=None)
@given(data=st.data(), unit=st.sampled_from([1, 2, 3, 4, 8]), per_node=st.sampled_from([1, 2, 4]))
def test_a_world_is_whole_replicas_on_whole_nodes_and_nobody_changes_its_shard(
    data: st.DataObject, unit: int, per_node: int
) -> None:
    block = math.lcm(unit, per_node)
    num_active = data.draw(st.integers(1, 4)) * block // per_node
    num_nodes = num_active + data.draw(st.integers(0, 3))
    dead = data.draw(st.sets(st.integers(0, num_nodes - 1)))
    members = members_of(num_nodes, per_node, num_active, dead)
    hosts = data.draw(st.permutations(range(num_nodes)))[:num_active]
    nodes = {rank: f"n{hosts[rank // per_node]}" for rank in range(num_active * per_node)}
    gone = data.draw(st.sets(st.sampled_from(sorted(nodes)), max_size=3))
    nodes = {rank: node for rank, node in nodes.items() if rank not in gone} or nodes
    holders = tuple(sorted(data.draw(st.sets(st.sampled_from(sorted(nodes))))))
    world = plan_world(Estate(7, 3, unit, nodes, holders), members, LIMITS)
    if isinstance(world, str):
        return
    assert len(world) % block == 0 and 0 < len(world) <= members.full_size
    rows = [world[i : i + per_node] for i in range(0, len(world), per_node)]
    names = [row[0].node for row in rows]
    assert len(set(names)) == len(names), "one node twice"
    assert not {f"n{i}" for i in dead} & set(names)
    assert all(place.node == row[0].node for row in rows for place in row), "LOCAL_WORLD_SIZE"
    formers = [place.former for place in world if place.former >= 0]
    assert len(set(formers)) == len(formers), "one state twice"
    for rank, place in enumerate(world):
        if place.former >= 0:
            assert place.former in holders and nodes[place.former] == place.node
            assert place.former % unit == rank % unit, "another shard"
    assert {former % unit for former in formers} == set(range(unit)), "a shard is missing"
    idle = [name for name in members.nodes if int(name[1:]) not in dead and name not in names]
    assert len(idle) < block // per_node or len(world) == members.full_size, "there is room for another replica"


@pytest.mark.parametrize(
    ("unit", "nodes", "holders", "dead", "why"),
    [
        (3, {0: "n0", 1: "n0", 2: "n1", 3: "n1"}, (0, 1, 2, 3), set(), "do not fill nodes"),
        (1, {0: "n0", 1: "n0"}, (0, 1), {0, 1, 2}, "nodes for 0 replicas are left, at least 1"),
        (2, {0: "n0", 1: "n0", 2: "n1", 3: "n1"}, (0, 2), set(), "holds part 1 of 2"),
        (1, {0: "n0", 1: "n1"}, (0, 1), {2}, "nobody is left"),  # spread over nodes: none of them has a whole row
    ],
)  # fmt: skip
def test_why_there_is_no_world(unit: int, nodes: dict[int, str], holders: tuple[int, ...], dead: set[int], why: str):
    world = plan_world(Estate(7, 3, unit, nodes, holders), members_of(3, 2, 2, dead), LIMITS)
    assert isinstance(world, str) and why in world


# ---- a whole job


@dataclass
class Process:
    """content: steps whose update its state holds; -1: it has no state yet. mode: starting, joined, running, paused,
    fenced, planned, formed, waiting (for its end or the resume)."""

    rank: int
    incarnation: int
    node: str
    task: fx.LaunchWorkers | object
    content: int
    mode: str = "starting"
    generation: int = 0
    voted: int = -1
    in_update: bool = False
    torn: bool = False
    reported: int = 0
    plan: Plan | None = None


class Job:
    """Agents and workers of a simulated job, `unit` ranks a replica. Random choices come from `chance`."""

    def __init__(self, chance: random.Random, unit: int, per_node: int, num_active: int, num_spares: int) -> None:
        self.chance, self.unit = chance, unit
        self.names = tuple(f"n{i}" for i in range(num_active + num_spares))
        self.machine, self.now = Machine(LIMITS), 0.0
        self.history: list[tuple[e.AnyEvent, float]] = []
        self.phases: list[Phase] = []  # in which each of these came
        self.processes: dict[int, Process] = {}
        self.agents = dict.fromkeys(self.names, 1)
        self.down: set[str] = set()
        self.files: dict[tuple[str, int, int], int] = {}  # (node, generation, rank) -> step
        self.announced = 1
        self.pause = 0
        self.committed = 0
        self.resumed_at: list[tuple[int, int]] = []  # (world size, step)
        self.tell(e.JobStarted(self.names, num_active, per_node))
        for name in self.names:
            self.tell(e.AgentJoined(name, 1))

    def tell(self, event: e.AnyEvent) -> None:
        self.history.append((event, self.now))
        self.phases.append(self.machine.phase)
        for effect in self.machine.handle(event, self.now):
            self.perform(effect)

    def perform(self, effect: fx.AnyEffect) -> None:
        match effect:
            case fx.KillWorkers(_, workers, _):
                for rank, incarnation in workers:
                    if rank in self.processes and self.processes[rank].incarnation == incarnation:
                        del self.processes[rank]
            case fx.LaunchWorkers(placement, _):
                for node, tasks in placement.items():
                    assert node not in self.down
                    for task in tasks:
                        assert task.rank not in self.processes, "two lives of a rank"
                        assert task.world_size == self.machine.members.world_size
                        assert (
                            not task.resized or task.former < 0 or task.former % self.unit == task.rank % self.unit
                        ), "another shard"
                        self.processes[task.rank] = Process(
                            task.rank, task.incarnation, node, task, -1, generation=task.generation
                        )
            case fx.AnnounceFence(generation, _, at_boundary):
                assert generation > self.announced
                self.announced = generation
                if at_boundary:
                    self.pause = generation
                    return
                self.pause = 0
                for process in self.processes.values():
                    process.plan = None
                    if process.mode not in ("starting", "joined"):
                        process.mode = "fenced"
            case fx.PublishPlan(plan):
                assert plan.generation == self.announced and not plan.savers
                for process in self.processes.values():
                    process.plan, process.mode = plan, "planned"
            case fx.AnnounceResume(generation):
                self.resume(generation)

    def resume(self, generation: int) -> None:
        size = self.machine.members.world_size
        assert generation == self.announced
        assert sorted(self.processes) == list(range(size)), "a rank is missing"
        assert size % self.unit == 0
        (step,) = {process.content for process in self.processes.values()}
        assert not any(process.torn for process in self.processes.values())
        assert step >= self.committed - 1, "more than one step was lost"
        self.committed = step  # what was done of the next step is done again
        self.resumed_at.append((size, step))
        self.files.clear()
        for process in self.processes.values():
            process.mode, process.generation = "running", generation
            process.voted, process.in_update = step - 1, False

    # ---- what happens next

    def go_on(self, times: int, faults: float) -> None:
        for _ in range(times):
            if self.machine.phase is Phase.STOPPED:
                return
            if self.chance.random() < faults:
                self.fail()
            elif self.processes and self.chance.random() < 0.97:
                self.advance(self.chance.choice(sorted(self.processes.values(), key=lambda p: p.rank)))
            else:
                self.now += self.chance.choice([0.5, 4.0, 12.0])
                self.tell(e.TimePassed())

    def fail(self) -> None:
        kind = self.chance.choice(["process", "process", "node", "back", "back", "torn", "memory"])
        if kind == "process" and self.processes:
            process = self.chance.choice(list(self.processes.values()))
            del self.processes[process.rank]
            self.tell(e.WorkerExited(process.rank, process.incarnation, "none", True, "process ended"))
        elif kind == "node" and len(self.down) < len(self.names) - 1:
            self.lose(self.chance.choice([name for name in self.names if name not in self.down]))
        elif kind == "back" and self.down:
            self.bring_back(self.chance.choice(sorted(self.down)))
        elif kind == "torn":
            cut = [
                p
                for p in self.processes.values()
                if p.in_update and p.mode == "fenced" and p.reported != self.announced
            ]
            for process in cut[:1]:
                process.torn = True
        elif kind == "memory" and self.files:
            del self.files[self.chance.choice(list(self.files))]

    def lose(self, name: str) -> None:
        self.down.add(name)
        self.processes = {rank: p for rank, p in self.processes.items() if p.node != name}
        self.files = {key: step for key, step in self.files.items() if key[0] != name}
        self.tell(e.NodeCondemned(name, self.agents[name], "power"))

    def bring_back(self, name: str) -> None:
        self.down.discard(name)
        self.agents[name] += 1
        self.tell(e.AgentJoined(name, self.agents[name]))

    def advance(self, process: Process) -> None:
        who = (process.rank, process.incarnation)
        match process.mode:
            case "starting":
                process.mode = "fenced" if process.task.joins else "joined"  # type: ignore[union-attr]
                self.tell(e.WorkerStarted(*who, 1))
                self.tell(e.WorkerJoined(*who))
            case "joined":
                self.begin(process)
            case "running":
                self.train(process)
            case "fenced" | "paused" if process.reported != self.announced:
                self.report(process)
            case "planned":
                self.carry_out(process)
            case "formed":
                self.restore(process)

    def begin(self, process: Process) -> None:
        """A first life: all of them communicate, so all have to be there."""
        size = self.machine.members.world_size
        if len(self.processes) < size or any(p.mode == "starting" for p in self.processes.values()):
            return
        if not process.task.resized:  # type: ignore[union-attr]
            process.content = 0
        else:
            held = {rank: self.left_for(p) for rank, p in self.processes.items() if p.task.resized}  # type: ignore[union-attr]
            mine = [held[rank] for rank in held if rank % self.unit == process.rank % self.unit and held[rank] >= 0]
            if not mine:
                self.tell(e.NotInherited(process.rank, process.incarnation, process.generation, "nothing is there"))
                return
            assert len(set(mine)) == 1
            process.content = mine[0]
        process.mode = "waiting"
        self.tell(e.WorkerRestored(process.rank, process.incarnation, process.generation, process.content))

    def left_for(self, process: Process) -> int:
        task = process.task
        return self.files.get((process.node, task.resized, task.former), -1)  # type: ignore[union-attr]

    def train(self, process: Process) -> None:
        everybody = self.processes.values()
        if process.in_update:
            process.content, process.in_update = process.content + 1, False
            self.committed = max(self.committed, process.content)
            if self.pause and process.generation < self.pause:
                process.mode = "paused"
        elif process.voted < process.content:
            process.voted = process.content
        elif len(everybody) == self.machine.members.world_size and all(
            p.voted >= process.content and p.generation == process.generation for p in everybody
        ):
            process.in_update = True

    def report(self, process: Process) -> None:
        size = self.machine.members.world_size
        process.reported = self.announced
        if process.content < 0 or process.torn:
            said = Report(-1, -1, -1, False, self.replicas(process.rank, size))
        else:
            v = process.content
            passed = v if process.in_update else v - 1
            said = Report(v, process.voted, passed, True, self.replicas(process.rank, size), unit=self.unit)
        self.tell(e.WorkerReported(process.rank, process.incarnation, self.announced, said))

    def replicas(self, rank: int, size: int) -> tuple[int, ...]:
        return tuple(range(rank % self.unit, size, self.unit))

    def carry_out(self, process: Process) -> None:
        plan = process.plan
        assert plan is not None
        who = (process.rank, process.incarnation, plan.generation)
        if process.rank in plan.roll_forward:
            assert process.voted == process.content == plan.resume_step - 1
            process.content += 1
            self.committed = max(self.committed, process.content)
        process.voted, process.in_update = process.content - 1, False
        if not plan.hands_over:
            process.mode = "formed"
            self.tell(e.WorkerFormed(*who))
            return
        process.mode = "waiting"
        if process.rank not in plan.hands_over:
            return
        assert process.content == plan.resume_step and not process.torn, "a torn or older state is put aside"
        if self.chance.random() < 0.05:
            self.tell(e.NotHandedOver(*who, "no room"))
            return
        self.files[process.node, plan.generation, process.rank] = process.content
        self.tell(e.HandedOver(*who, process.content))

    def restore(self, process: Process) -> None:
        plan = process.plan
        assert plan is not None
        if process.rank in plan.sources:
            source = self.processes.get(plan.sources[process.rank])
            if source is None or source.mode not in ("formed", "waiting"):
                return
            assert source.content == plan.resume_step and source.rank % self.unit == process.rank % self.unit
            process.content, process.torn = source.content, False
        process.mode = "waiting"
        self.tell(e.WorkerRestored(process.rank, process.incarnation, plan.generation, process.content))


SHAPES = [(1, 1, 3, 0), (1, 2, 3, 1), (2, 2, 3, 0), (4, 2, 6, 0), (2, 1, 4, 0)]  # unit, per node, active, spares


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), shape=st.sampled_from(SHAPES))
def test_a_job_resizes_while_anything_fails(seed: int, shape: tuple[int, int, int, int]) -> None:
    """Whatever fails when, all ranks resume at one step, from states of their own shard, and at most one is redone."""
    job = Job(random.Random(seed), *shape)
    job.go_on(60, 0.0)
    job.go_on(600, 0.04)
    for name in sorted(job.down):
        job.bring_back(name)
    job.go_on(900, 0.0)
    if job.machine.phase is Phase.STOPPED:
        assert job.machine.exit_code == 75, job.machine.stop_reason
    else:
        assert job.machine.phase is Phase.RUNNING or job.resumed_at
    again = Machine(LIMITS)
    for event, now in job.history:
        again.handle(event, now)
    assert snapshot(again) == snapshot(job.machine)


def test_faults_reach_every_part_of_a_resize() -> None:
    """The simulation above would prove nothing if worlds did not shrink and grow in it, or if nothing failed then."""
    happened: set[str] = set()
    for shape in SHAPES:
        sizes = set()
        for seed in range(30):
            job = Job(random.Random(seed), *shape)
            job.go_on(60, 0.0)
            job.go_on(600, 0.04)
            sizes |= {size for size, _ in job.resumed_at}
            heard = zip(job.history, job.phases, strict=True)
            happened |= {f"{type(event).__name__} in {phase}" for (event, _), phase in heard}
        assert len(sizes) > 1, (shape, sizes)
    for what in ("HandedOver", "NotHandedOver", "WorkerExited", "NodeCondemned", "AgentJoined"):
        assert f"{what} in RESIZING" in happened
    assert "NotInherited in FORMING" in happened
