"""Every message between manager, agents and workers: closed unions of frozen structs, msgpack on the wire.

Rules: each message that can be stale carries a generation, each that speaks for a process carries its incarnation;
the receiver drops older ones in one place (`core.machine`, `runtime.control`). Nothing is unpickled. A worker talks
only to its own agent (unix socket); the agent relays between its workers and the manager (TCP).

What a worker, or its agent, says about it is the very event that the manager gives to the core (`core.events`): one
type for both, relayed as it is.
"""

from __future__ import annotations

from typing import Union

import msgspec

from flashrec.core.events import (
    CheckpointFailed,
    CheckpointKept,
    Event,
    HandedOver,
    NotHandedOver,
    NotInherited,
    WorkerCommitted,
    WorkerExited,
    WorkerFinished,
    WorkerFormed,
    WorkerJoined,
    WorkerRaised,
    WorkerReported,
    WorkerRestored,
    WorkerStarted,
)
from flashrec.core.health import HealthRules
from flashrec.core.ranks import RankSet
from flashrec.core.types import Assignment, Plan


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """Base of all messages that are not events; the class name is the tag on the wire. gc: as for events."""


Sendable = Union[Message, Event]


# ---- launcher and worker -> agent -------------------------------------------------------------------------------


class TaskStarting(Message, frozen=True):
    """The thin launcher of one task asks its agent which rank it is; it then becomes the user's command."""

    launch: int
    local_id: int
    pid: int


class TaskAssigned(Message, frozen=True):
    """Answer to TaskStarting. env: what the launcher puts into the environment before it execs."""

    assignment: Assignment
    env: dict[str, str]
    output: str  # file that gets this worker's stdout and stderr


class TaskRefused(Message, frozen=True):
    """Answer to TaskStarting: this launch is not wanted (any more)."""

    reason: str


class TaskParking(Message, frozen=True):
    """The launcher of a task that is to be parked. objection: why it cannot be ('': it can)."""

    launch: int
    local_id: int
    objection: str = ""


class ParkingAllowed(Message, frozen=True):
    """Answer to TaskParking (or TaskRefused). env: as in TaskAssigned, as far as it is known before the rank is."""

    env: dict[str, str]
    output: str  # file that gets what the task prints before it has a rank


class TaskReady(Message, frozen=True):
    """A parked task has imported what it was to import, and waits for TaskAssigned (or TaskRefused)."""

    took_s: float


class TaskTaken(Message, frozen=True):
    """Answer of a parked task to TaskAssigned: it goes on as that rank."""


class WorkerHello(Message, frozen=True):
    """First message of the runtime in a worker (pid may differ from the launched one: `bash train.sh`).

    stacks_signal: upon it the process writes its stacks into its file (`transport.paths.stacks_path`); 0: it does not.
    """

    rank: int
    incarnation: int
    pid: int
    stacks_signal: int = 0


class WorkerWelcome(Message, frozen=True):
    """Answer to WorkerHello. generation: the newest that was announced; address: where peers reach this node."""

    generation: int
    world_size: int
    address: str
    heartbeat_interval_s: float
    lease_s: float


class WorkerBeat(Message, frozen=True):
    """Heartbeat of a worker, with its step tag.

    where: 'init', 'idle' (between steps), 'step', 'vote', 'optimizer', 'recovery', 'done'. quiet: why it may stand
    still ('': no reason). waiting: some operation waits for a peer just now; None: that cannot be seen. collectives:
    how many it has issued in each process group.

    The agent adds, on its own clock: still_s since anything but `waiting` has changed; silent_s since the last
    heartbeat; process: the kernel's state letter of a silent worker.
    """

    rank: int
    incarnation: int
    v: int
    voted: int
    passed: int
    where: str
    quiet: str = ""
    waiting: bool | None = None
    collectives: dict[str, int] = {}
    still_s: float = 0.0
    silent_s: float = 0.0
    process: str = ""


class AgentBeat(Message, frozen=True):
    """Agent -> its workers: renews the workers' lease."""


# ---- worker -> agent (-> manager), beside the events ---------------------------------------------------------------


class WorkerFarewell(Message, frozen=True):
    """The interpreter of this worker ends in an orderly way (after WorkerRaised: with an exception)."""

    rank: int
    incarnation: int


class PeersBlamed(Message, frozen=True):
    """A collective of `generation` failed, and no fence has explained it so far: the addresses of peers that the error
    names. A hint for the detector."""

    rank: int
    incarnation: int
    generation: int
    addresses: tuple[str, ...]


class MirrorsMeasured(Message, frozen=True):
    """What mirrors cost a rank, for the journal: host memory for copies of its own state and for what it holds of
    others; wait_ms: per step, over `steps` of them, 0 where none has been timed yet."""

    rank: int
    incarnation: int
    generation: int
    own_bytes: int
    held_bytes: int
    wait_ms: float
    steps: int


class KeyPosted(Message, frozen=True):
    """Rendezvous: `members` (ranks) shall see key = value in `group` of `generation`."""

    rank: int
    incarnation: int
    generation: int
    group: str
    key: str
    value: bytes
    members: RankSet


class CounterAdded(Message, frozen=True):
    """Rendezvous: add to a counter of `group`; answered by CounterValue with the same request number."""

    rank: int
    incarnation: int
    generation: int
    group: str
    key: str
    amount: int
    request: int


class CommitAsked(Message, frozen=True):
    """May this rank put its checkpoint of `step` in place? Answered by CommitAnswered with the same request number."""

    rank: int
    incarnation: int
    generation: int
    step: int
    request: int


FromWorkers = Union[
    WorkerStarted, WorkerJoined, WorkerReported, WorkerFormed, WorkerRestored, WorkerCommitted, KeyPosted,
]  # fmt: skip


# ---- agent -> manager ---------------------------------------------------------------------------------------------


class AgentHello(Message, frozen=True):
    """First message on an authenticated control connection. launch: number of the job step that started the agent."""

    node: str
    launch: int
    pid: int
    address: str
    version: str


class AgentHeartbeat(Message, frozen=True):
    """Heartbeat, every `tags_every`th with the step tags of the node's workers."""

    incarnation: int
    sequence: int
    tags: tuple[WorkerBeat, ...] = ()
    fabric: tuple[int, int] = (0, 0)  # MPI session, and how many heartbeats were sent in it


class Relayed(Message, frozen=True):
    """What workers of this node have said at nearly the same time, in the order in which it came."""

    said: tuple[FromWorkers, ...]


class NodeHealth(Message, frozen=True):
    """First result of the node's health checks in this life of the agent, and every change of it. state: 'well',
    'sick', 'unknown' (nothing could be looked at). reasons: check and finding of each."""

    incarnation: int
    state: str
    reasons: tuple[str, ...] = ()


class FabricReady(Message, frozen=True):
    """Answer to FabricOffered: what the agent's beater is. problem: why it is of no use ('': it is)."""

    hub: int
    library: str = ""
    provider: str = ""
    interface: str = ""
    address: str = ""
    problem: str = ""


class FabricGoing(Message, frozen=True):
    """The beater connects to the hub from this moment on."""

    session: int


class FabricEnded(Message, frozen=True):
    """The session is over on the agent's side, or never came to be."""

    session: int
    reason: str


class ProbesOffered(Message, frozen=True):
    """Where this agent answers probes: path ('control', 'fabric') -> (host, UDP port). Replaces what it said before."""

    places: dict[str, tuple[str, int]]


class ProbeAnswered(Message, frozen=True):
    """Answer to ProbeAsked. reached None: could not look; said: why."""

    number: int
    node: str
    path: str
    reached: bool | None
    said: str = ""


class ParkedReady(Message, frozen=True):
    """A parked task of this node has its imports done. took_s: since its interpreter started."""

    launch: int
    local_id: int
    took_s: float


class ParkedEnded(Message, frozen=True):
    """There is no such parked task on this node (any more); an assignment for it, if there was one, was not taken.

    ran: its interpreter had been started, so it may be the script's fault."""

    launch: int
    local_id: int
    reason: str
    ran: bool = False


class WorkerUnlikeParked(Message, frozen=True):
    """A worker that started the ordinary way has done what comes too late in a process that was parked before.
    only_cuda: in one that has a CUDA context."""

    rank: int
    incarnation: int
    reason: str
    only_cuda: bool = False


class StacksTaken(Message, frozen=True):
    """Where the threads of a worker are. how: 'py-spy', 'faulthandler', '/proc' or 'none'; text: the stacks, or why
    there are none. Without being asked, too, before the agent kills a worker that is silent or stopped."""

    rank: int
    incarnation: int
    how: str
    text: str


# ---- manager -> agent (-> worker) ---------------------------------------------------------------------------------


class AgentWelcome(Message, frozen=True):
    """Answer to AgentHello: the incarnation this agent now has, and the timing rules. tags_every: every so many
    heartbeats one has the workers' tags."""

    incarnation: int
    generation: int
    world_size: int
    heartbeat_interval_s: float
    lease_s: float
    worker_silent_s: float
    worker_stopped_s: float
    output_dir: str
    env: dict[str, str]
    health: HealthRules = HealthRules()
    tags_every: int = 1


class AgentRefused(Message, frozen=True):
    """Answer to AgentHello: this agent is not wanted; it ends."""

    reason: str


class FabricOffered(Message, frozen=True):
    """A hub is there to be met over MPI (hub: its number). How: as the configuration says (section fabric)."""

    hub: int
    provider: str
    interface: str
    library: str
    ports: tuple[int, int]
    interval_s: float


class FabricPort(Message, frozen=True):
    """Connect to this MPI port, say FabricGoing when you do. address, knock: TCP, must answer first ('', 0: none).

    session: a random number that belongs to this attempt and this life of the agent."""

    session: int
    port: str
    address: str
    knock: int


class HeartbeatAck(Message, frozen=True):
    """Renews the agent's lease."""

    sequence: int


class ProbeAsked(Message, frozen=True):
    """Find out within `timeout_s` whether this life of `node` answers at host:port over `path`. number: the round."""

    number: int
    node: str
    incarnation: int
    path: str
    host: str
    port: int
    timeout_s: float


class ExpectTasks(Message, frozen=True):
    """Tasks of `launch` will start on your node: local id -> assignment."""

    launch: int
    tasks: tuple[Assignment, ...]


class UseParked(Message, frozen=True):
    """This parked task of your node gets a rank. Answered by WorkerStarted, or by ParkedEnded."""

    launch: int
    local_id: int
    task: Assignment


class ParkingOver(Message, frozen=True):
    """End the parked tasks of this launch. launch 0: all, and park nothing any more."""

    reason: str
    launch: int = 0


class KillWorkers(Message, frozen=True):
    """SIGKILL these workers: (rank, incarnation) pairs."""

    workers: tuple[tuple[int, int], ...]
    reason: str


class StacksAsked(Message, frozen=True):
    """Look what this worker is doing; answered by StacksTaken within `timeout_s`."""

    rank: int
    incarnation: int
    timeout_s: float


class Fence(Message, frozen=True):
    """Generation `generation` supersedes everything older: leave collectives at once, then report. at_boundary: train
    on, and ask in the next vote that everybody pauses at the end of that step; then report."""

    generation: int
    reason: str
    at_boundary: bool = False


class PlanPublished(Message, frozen=True):
    """The commit decision: everybody forms groups for plan.generation, then restores."""

    plan: Plan


class KeysPushed(Message, frozen=True):
    """Rendezvous keys for the members (ranks) of one group: the same message for all nodes that have some."""

    generation: int
    group: str
    items: dict[str, bytes]
    members: RankSet


class CounterValue(Message, frozen=True):
    """Answer to CounterAdded."""

    rank: int
    incarnation: int
    request: int
    value: int


class CommitAnswered(Message, frozen=True):
    """Answer to CommitAsked. valid_s: for so long after the question nobody else is told yes for a newer step."""

    rank: int
    incarnation: int
    request: int
    granted: bool
    reason: str
    valid_s: float


class Resume(Message, frozen=True):
    """Everybody is restored: go on with the step of the plan."""

    generation: int


class Complete(Message, frozen=True):
    """Some rank has passed the final vote, so all steps are done everywhere: leave the step loop without recovery."""

    generation: int


class Stop(Message, frozen=True):
    """The job ends: kill what still runs and leave."""

    reason: str


ToAgentFromWorker = Union[
    TaskStarting, TaskParking, TaskReady, TaskTaken, WorkerUnlikeParked,
    WorkerHello, WorkerBeat, WorkerReported, WorkerFormed, WorkerRestored, WorkerCommitted, WorkerFinished,
    WorkerRaised, WorkerFarewell, PeersBlamed, KeyPosted, CounterAdded, CommitAsked,
    CheckpointKept, CheckpointFailed, HandedOver, NotHandedOver, NotInherited, MirrorsMeasured,
]  # fmt: skip
ToWorker = Union[
    TaskAssigned, TaskRefused, ParkingAllowed, WorkerWelcome, AgentBeat, Fence, PlanPublished, KeysPushed, CounterValue,
    CommitAnswered, Resume, Complete, Stop,
]  # fmt: skip
ToManager = Union[
    AgentHello, AgentHeartbeat, WorkerStarted, WorkerJoined, WorkerExited, WorkerReported, WorkerFormed, WorkerRestored,
    WorkerCommitted, WorkerFinished, WorkerRaised, PeersBlamed, KeyPosted, CounterAdded, CommitAsked,
    CheckpointKept, CheckpointFailed, HandedOver, NotHandedOver, NotInherited, MirrorsMeasured,
    NodeHealth,
    FabricReady, FabricGoing, FabricEnded, ProbesOffered, ProbeAnswered, StacksTaken, Relayed,
    ParkedReady, ParkedEnded, WorkerUnlikeParked,
]  # fmt: skip
ToAgent = Union[
    AgentWelcome, AgentRefused, HeartbeatAck, ExpectTasks, KillWorkers, Fence, PlanPublished, KeysPushed,
    CounterValue, CommitAnswered, Resume, Complete, Stop,
    FabricOffered, FabricPort, ProbeAsked, StacksAsked, UseParked, ParkingOver,
]  # fmt: skip
