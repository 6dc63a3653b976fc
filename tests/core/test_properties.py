"""Any order of events. A model of the workers plays the real protocol (vote, pass, optimizer step) against the machine;
Hypothesis chooses what happens next, including deaths, torn optimizer steps, late and repeated speech.

What must hold: generations only grow, and one resumes at most once; no rank has two workers that may act; stale speech
changes nothing; whoever resumes holds exactly the state of the resume step, copied only from whole states of that
step; no committed step is lost twice, and none when all have paused for a swap; no node of the pool is asked for, kept
or used without need; the journal replays to the same state.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flashrec.core import effects as fx
from flashrec.core import events as e
from flashrec.core.limits import Limits, PoolLimits
from flashrec.core.machine import Machine
from flashrec.core.swap import MAX_FAILED
from flashrec.core.types import Phase, Plan, Report
from tests.core.driver import snapshot

RANKS_PER_NODE, ACTIVE, NODES = 2, 2, ("n1", "n2", "n3", "n0")
WORLD = RANKS_PER_NODE * ACTIVE
POOL, MAX_SWAPS = ("p1", "p2", "p3"), 6
OF_ACTING_LIVES = (e.WorkerFormed, e.WorkerRestored)


@dataclass
class Process:
    """One worker process of the model. content: the steps whose update its state holds; torn: an update was cut."""

    rank: int
    incarnation: int
    node: str
    generation: int
    joins: bool
    content: int = 0
    v: int = 0
    voted: int = -1
    passed: int = -1
    torn: bool = False
    mode: str = "starting"  # starting, running, in-optimizer, fenced, planned, formed, restored
    plan: Plan | None = None
    reported: int = 0
    paused_votes: set[int] = field(default_factory=set)  # steps in whose vote it asked for a pause
    sent: list[e.AnyEvent] = field(default_factory=list)


class RecoveryModel(RuleBasedStateMachine):
    @initialize(trained=st.sampled_from([True, True, True, False]), leaves=st.sampled_from(["", "n1", "n2"]))
    def start(self, trained: bool, leaves: str) -> None:
        limits = Limits(max_without_progress=1000, max_in_place=1000)
        self.machine = Machine(limits, PoolLimits(MAX_SWAPS, wait_s=20.0))
        self.now = 0.0
        self.history: list[tuple[e.AnyEvent, float]] = []
        self.said: list[e.AnyEvent] = []
        self.live: dict[int, Process] = {}
        self.successors: dict[int, Process] = {}
        self.former: dict[int, Process] = {}  # those that stand by
        self.zombies: list[Process] = []
        self.plan: Plan | None = None  # the newest
        self.training = -1  # the generation that trains; -1: none
        self.pause = -1  # announced, but not begun: all are to pause at the end of a step
        self.resumed: list[int] = []
        self.announced = 1
        self.committed = 0  # newest step that any process, dead or alive, has applied
        self.agents = dict.fromkeys(NODES, 1)
        self.asked: set[int] = set()  # requests that the pool has not answered
        self.granted: dict[int, str] = {}  # those whose node is the job's
        self.num_requests = 0
        self.num_granted = 0
        self.taken_away = ""
        self.tell(e.JobStarted(NODES, ACTIVE, RANKS_PER_NODE))
        for node in NODES:
            self.tell(e.AgentJoined(node, 1))
        if trained:
            self.go_on_at_random(0, 100)
            assert self.machine.phase is Phase.RUNNING
        if leaves:
            self.tell(e.NodeLeaving(leaves, "Slurm says DRAIN", "drain"))

    # ---- the edge -----------------------------------------------------------------------------------------------

    def tell(self, event: e.AnyEvent) -> None:
        self.history.append((event, self.now))
        self.said.append(event)
        for effect in self.machine.handle(event, self.now):
            self.perform(effect)

    def perform(self, effect: fx.AnyEffect) -> None:
        match effect:
            case fx.KillWorkers(_, workers, _):
                for rank, incarnation in workers:
                    self.end(rank, incarnation)
            case fx.LaunchWorkers(placement, _):
                for node, tasks in placement.items():
                    for task in tasks:
                        moves = task.rank in self.live and self.machine.phase is Phase.RUNNING
                        assert task.rank not in self.successors and task.rank not in self.former
                        assert moves or task.rank not in self.live, "a second worker while the first may act"
                        assert self.machine.members.nodes[node].alive
                        assert node in NODES or node in self.granted.values(), "a rank on a node that was given back"
                        assert not moves or not self.machine.members.nodes[node].leaving
                        (self.successors if moves else self.live)[task.rank] = Process(
                            task.rank, task.incarnation, node, task.generation, task.joins, torn=task.joins
                        )
                local = [(life.node, life.local_rank) for life in self.machine.members.lives() if life.is_live]
                assert len(local) == len(set(local)), "two workers share a local rank"
            case fx.AnnounceFence(generation, _, True):
                assert generation > self.announced and not self.former and self.successors
                self.announced = self.pause = generation
                for process in self.successors.values():
                    process.mode = "fenced" if process.mode != "starting" else process.mode
            case fx.AnnounceFence(generation, _):
                assert generation > self.announced
                self.announced, self.training, self.pause = generation, -1, -1
                for rank in range(WORLD):
                    if rank in self.former:
                        assert rank not in self.live, "two lives of a rank may act"
                        self.live[rank] = self.former.pop(rank)
                    elif rank not in self.live and rank in self.successors:
                        self.live[rank] = self.successors.pop(rank)
                for process in [*self.live.values(), *self.successors.values()]:
                    process.paused_votes.clear()
                    if process.mode not in {"in-optimizer", "starting"}:
                        process.mode = "fenced"
                    process.plan = None
            case fx.RequestNode(request, _, _):
                assert request == self.num_requests + 1, "one request, one number"
                assert self.machine.members.unplaced() or self.is_somebody_to_move(), "nobody needs a node"
                self.num_requests = request
                self.asked.add(request)
                assert self.num_granted + len(self.asked) <= MAX_SWAPS
                assert len(self.asked) <= ACTIVE, "more nodes than could be used"
            case fx.ReleaseNode(request, "", _):
                self.asked.remove(request)
            case fx.ReleaseNode(request, node, _):
                assert self.granted.pop(request) == node
                left = [p for p in self.lives() if p.node == node]
                assert not left or node == self.taken_away, "given back with ranks on it"
                for process in left:
                    self.end(process.rank, process.incarnation)
            case fx.RetireNode(node, _):
                assert not [p for p in self.lives() if p.node == node], "retired with ranks on it"
            case fx.PublishPlan(plan):
                assert plan.generation == self.announced
                self.plan = plan
                assert plan.at_boundary or not plan.successors
                for rank, incarnation in plan.successors.items():
                    assert self.successors[rank].incarnation == incarnation
                    self.former[rank] = self.live[rank]
                    self.former[rank].mode = "standing by"
                    self.live[rank] = self.successors.pop(rank)
                for process in self.live.values():
                    assert process.reported == plan.generation
                    process.plan, process.mode = plan, "planned"
            case fx.AnnounceResume(generation):
                self.check_resume(generation)

    def check_resume(self, generation: int) -> None:
        assert generation == self.announced and generation not in self.resumed, "one generation forms once"
        self.resumed.append(generation)
        self.training, self.pause = generation, -1
        assert not self.former, "a former life may act"
        assert sorted(self.live) == list(range(WORLD)), "a rank is missing"
        plan = self.plan
        assert plan is None or plan.generation == generation
        step = plan.resume_step if plan else 0
        for process in self.live.values():
            assert not process.torn, "resumed from a torn state"
            assert process.content == process.v == step, "resumed from another step"
            process.mode, process.generation, process.joins = "running", generation, False
            process.voted = process.passed = step - 1
        assert step >= self.committed - 1, "more than one step was lost"
        assert plan is None or not plan.at_boundary or step == self.committed, "a step is done again"

    def lives(self) -> list[Process]:
        return [*self.live.values(), *self.successors.values(), *self.former.values()]

    def end(self, rank: int, incarnation: int) -> None:
        """A process is no more."""
        for lives in (self.live, self.successors, self.former):
            if rank in lives and lives[rank].incarnation == incarnation:
                self.zombies.append(lives.pop(rank))

    def is_somebody_to_move(self) -> bool:
        return any(self.machine.members.nodes[p.node].leaving for p in self.live.values())

    # ---- what workers do ----------------------------------------------------------------------------------------

    @rule(seed=st.integers(0, 2**16), times=st.integers(100, 400))
    def go_on_for_long(self, seed: int, times: int) -> None:
        self.go_on_at_random(seed, times)

    @rule(seed=st.integers(0, 2**16), times=st.integers(1, 30))
    def go_on(self, seed: int, times: int) -> None:
        self.go_on_at_random(seed, times)

    def go_on_at_random(self, seed: int, times: int) -> None:
        """Workers take steps of the protocol, in any interleaving."""
        chance = random.Random(seed)
        for _ in range(times):
            if not self.live:
                return
            self.advance(chance.choice(sorted(self.lives(), key=lambda p: (p.rank, p.incarnation))))

    def advance(self, process: Process) -> None:
        match process.mode:
            case "starting":
                self.start_up(process)
            case "running" | "in-optimizer":
                self.train(process)
            case "fenced":
                self.report(process)
            case "planned":
                self.form(process)
            case "formed":
                self.restore(process)

    def start_up(self, process: Process) -> None:
        self.tell(e.WorkerStarted(process.rank, process.incarnation, 1))
        self.tell(e.WorkerJoined(process.rank, process.incarnation))
        if process not in self.lives():
            return
        if process.joins:
            process.mode = "fenced"
        else:
            process.mode = "restored"
            self.tell(e.WorkerRestored(process.rank, process.incarnation, process.generation, 0, 0))

    def train(self, process: Process) -> None:
        """One stage of a step; nobody passes before everybody has voted."""
        if process.mode == "in-optimizer":
            process.v = process.content = process.v + 1
            self.committed = max(self.committed, process.v)
            pauses = process.v - 1 in process.paused_votes
            process.mode = "running" if process.generation == self.training and not pauses else "fenced"
        elif process.voted < process.v:
            process.voted = process.v
            if self.pause > process.generation:
                process.paused_votes.add(process.v)
        elif len(self.live) == WORLD and all(
            p.voted >= process.v and p.generation == process.generation for p in self.live.values()
        ):
            process.passed, process.mode = process.v, "in-optimizer"
            if any(process.v in p.paused_votes for p in self.live.values()):
                process.paused_votes.add(process.v)

    @rule(seed=st.integers(0, 2**16))
    def tear(self, seed: int) -> None:
        """An optimizer step is cut (out of memory, a collective inside it)."""
        cut = [p for p in self.live.values() if p.mode == "in-optimizer" and self.announced > p.generation]
        if cut:
            process = random.Random(seed).choice(cut)
            process.torn, process.mode = True, "fenced"

    def report(self, process: Process) -> None:
        if process.reported == self.announced:
            return
        process.reported = self.announced
        v = -1 if process.joins and process.torn else process.v
        said = Report(v, process.voted, process.passed, not process.torn, tuple(range(WORLD)))
        self.tell(e.WorkerReported(process.rank, process.incarnation, self.announced, said))

    def form(self, process: Process) -> None:
        plan = process.plan
        assert plan is not None
        if process.rank in plan.roll_forward:
            assert process.voted == process.v == plan.resume_step - 1, "rolled forward without complete gradients"
            process.v = process.content = process.v + 1
            self.committed = max(self.committed, process.v)
        elif not process.torn and process.rank not in plan.sources:
            process.voted = process.passed = process.v - 1  # gradients are dropped
        process.mode = "formed"
        self.tell(e.WorkerFormed(process.rank, process.incarnation, plan.generation))

    def restore(self, process: Process) -> None:
        plan = process.plan
        assert plan is not None
        if process.rank in plan.sources:
            giver = plan.sources[process.rank]
            source = self.former.get(giver) if giver == process.rank else self.live.get(giver)
            if source is None or source.mode not in ("formed", "restored", "standing by"):
                return
            assert not source.torn and source.content == plan.resume_step, "copied from a torn or older state"
            further = plan.stripes.get(process.rank, ())
            assert not {giver, *further} & plan.sources.keys() or giver == process.rank, "a target is a source"
            for other in (self.live.get(rank) for rank in further):
                if other is None or other.mode not in ("formed", "restored"):
                    return
                assert not other.torn and other.content == plan.resume_step, "a part of a torn or older state"
            process.content = process.v = source.content
            process.torn, process.voted, process.passed = False, source.v - 1, source.v - 1
        process.mode = "restored"
        self.tell(e.WorkerRestored(process.rank, process.incarnation, plan.generation, process.v, 0))

    # ---- what goes wrong ----------------------------------------------------------------------------------------

    @precondition(lambda self: self.machine.phase is not Phase.STOPPED)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        if len([p for p in self.live.values() if not p.torn and p.mode != "starting"]) < 2:
            return
        process = data.draw(st.sampled_from(sorted(self.lives(), key=lambda p: (p.rank, p.incarnation))))
        self.end(process.rank, process.incarnation)
        self.tell(e.WorkerExited(process.rank, process.incarnation, "none", True, "killed"))

    @precondition(lambda self: self.machine.phase is not Phase.STOPPED)
    @rule(data=st.data(), cause=st.sampled_from(["drain", "health"]))
    def a_node_is_to_leave(self, data: st.DataObject, cause: str) -> None:
        self.tell(e.NodeLeaving(data.draw(st.sampled_from(sorted(self.machine.members.nodes))), "sick", cause))

    @precondition(lambda self: any(node.leaving for node in self.machine.members.nodes.values()))
    @rule(data=st.data())
    def a_node_is_mended(self, data: st.DataObject) -> None:
        leaving = sorted(node.name for node in self.machine.members.nodes.values() if node.leaving)
        node = self.machine.members.nodes[data.draw(st.sampled_from(leaving))]
        self.tell(e.NodeMended(node.name, node.incarnation, "well", data.draw(st.sampled_from(sorted(node.leaving)))))

    @precondition(lambda self: self.machine.phase is not Phase.STOPPED)
    @rule(data=st.data(), back=st.booleans())
    def lose_node(self, data: st.DataObject, back: bool) -> None:
        alive = sorted(n.name for n in self.machine.members.nodes.values() if n.alive and self.is_spared_by(n.name))
        if not alive:
            return
        node = data.draw(st.sampled_from(alive))
        for process in [p for p in self.lives() if p.node == node]:
            self.end(process.rank, process.incarnation)
        self.tell(e.NodeCondemned(node, self.agents[node], "silent"))
        if back:
            self.agents[node] += 1
            self.tell(e.AgentJoined(node, self.agents[node]))

    def is_spared_by(self, node: str) -> bool:
        """Some rank keeps its state when this node is lost."""
        return any(p.node != node and not p.torn and p.mode != "starting" for p in self.lives())

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), answer=st.sampled_from(["node", "node", "node", "no", "wait"]))
    def pool_answers(self, data: st.DataObject, answer: str) -> None:
        request = data.draw(st.sampled_from(sorted(self.asked)))
        if answer != "node":
            self.asked -= {request} if answer == "no" else set()
            self.tell(e.NodeRefused(request, "none free", answer == "wait"))
            return
        node = data.draw(st.sampled_from(sorted(set(POOL) - set(self.granted.values()))))
        self.asked.remove(request)
        self.granted[request] = node
        self.num_granted += 1
        self.tell(e.NodeGranted(request, node))

    @precondition(lambda self: self.machine.phase is not Phase.STOPPED and self.granted)
    @rule(data=st.data())
    def pool_takes_away(self, data: st.DataObject) -> None:
        may_go = [request for request, node in sorted(self.granted.items()) if self.is_spared_by(node)]
        if may_go:
            request = data.draw(st.sampled_from(may_go))
            self.taken_away = self.granted[request]
            self.tell(e.NodeLeft(request, self.granted[request], "preempted"))
            assert request not in self.granted, "not given back"
            self.taken_away = ""

    @rule(data=st.data())
    def return_nodes(self, data: st.DataObject) -> None:
        for node in self.machine.members.nodes.values():
            if not node.alive and data.draw(st.booleans()):
                self.agents[node.name] = self.agents.get(node.name, 0) + 1
                self.tell(e.AgentJoined(node.name, self.agents[node.name]))
                assert node.alive or node.left or node.leaving or self.machine.phase is Phase.STOPPED

    @rule(data=st.data())
    def repeat_old_speech(self, data: st.DataObject) -> None:
        """A zombie or the network says something again: of an older generation or a former life, it has no effect."""
        old = [event for event in self.said if self.is_old(event)]
        if not old:
            return
        event = data.draw(st.sampled_from(old[-20:]))
        before = snapshot(self.machine)
        assert self.machine.handle(event, self.now) == []
        assert snapshot(self.machine) == before

    def is_old(self, event: e.AnyEvent) -> bool:
        if isinstance(event, e.NodeCondemned):
            return event.incarnation < self.agents[event.node]
        if isinstance(event, e.NodeGranted | e.NodeRefused):
            return event.request not in self.asked
        if isinstance(event, e.NodeLeft):
            return event.request not in self.granted
        rank = getattr(event, "rank", None)
        if rank is None:
            return False
        process = next((p for p in self.lives() if (p.rank, p.incarnation) == (rank, event.incarnation)), None)
        if process is None or (process is not self.live.get(rank) and isinstance(event, OF_ACTING_LIVES)):
            return True
        return getattr(event, "generation", self.announced) < self.announced

    @rule(seconds=st.sampled_from([0.1, 5.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        if seconds < 31.0:
            self.tell(e.TimePassed())

    # ---- always -------------------------------------------------------------------------------------------------

    @invariant()
    def generation_is_the_announced_one(self) -> None:
        assert self.machine.generation == self.announced

    @invariant()
    def a_running_job_is_whole(self) -> None:
        if self.machine.phase is Phase.RUNNING:
            assert sorted(self.live) == list(range(WORLD))

    @invariant()
    def a_running_job_takes_nothing_from_the_pool_that_it_does_not_use(self) -> None:
        # A pause that is announced ends in a step or so; what it leaves over is settled when training goes on.
        is_pausing = self.machine.training != self.machine.generation
        if self.machine.phase is Phase.RUNNING and not is_pausing and not self.is_somebody_to_move():
            assert not self.asked
            assert set(self.granted.values()) <= {p.node for p in self.lives()}

    @invariant()
    def model_and_machine_agree_on_who_acts(self) -> None:
        if self.machine.phase is Phase.STOPPED:
            return
        members = self.machine.members
        assert {(s.rank, s.incarnation) for s in members.slots if s.is_live} == {
            (p.rank, p.incarnation) for p in self.live.values()
        }
        assert {(s.rank, s.incarnation) for s in members.successors()} == {
            (p.rank, p.incarnation) for p in self.successors.values()
        }
        standing_by = {(s.rank, s.predecessor.incarnation) for s in members.slots if s.predecessor}
        assert standing_by == {(p.rank, p.incarnation) for p in self.former.values()}

    @invariant()
    def who_is_to_move_moves_if_there_is_room(self) -> None:
        """While training goes on, a leaving node has successors elsewhere, or there is no trusted node for them."""
        machine = self.machine
        if machine.phase is not Phase.RUNNING or self.pause > 0:
            return
        for node in machine.members.nodes.values():
            staying = [p for p in self.live.values() if p.node == node.name and p.rank not in self.successors]
            if node.leaving and staying and node.failed_swaps < MAX_FAILED:
                rooms = [r for r in machine.members.rooms(machine.limits.max_in_place) if r.trusted]
                assert all(len(r.free_local_ranks) < len(staying) for r in rooms), "there was room"

    def teardown(self) -> None:
        again = Machine(self.machine.limits, self.machine.pool.limits)
        for event, now in self.history:
            again.handle(event, now)
        assert snapshot(again) == snapshot(self.machine)


RecoveryModel.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRecovery = RecoveryModel.TestCase
