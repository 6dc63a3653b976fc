"""The recovery machine of one job. No I/O, no clock, no threads: `handle(event, now)` returns effects.

Here is what each event means; `core.phases` has the table of phases and moves between them. Stale speech is dropped in
`_is_stale`, and only there.
"""

from __future__ import annotations

from itertools import islice
from typing import get_args

from flashrec.core import endings, events
from flashrec.core.effects import AnyEffect
from flashrec.core.endings import EXIT_BUG
from flashrec.core.events import AnyEvent
from flashrec.core.membership import Members, Slot
from flashrec.core.phases import Phases
from flashrec.core.types import Phase

_OF_A_RANK = {kind for kind in get_args(AnyEvent) if "rank" in kind.__struct_fields__} - {events.CheckpointKept}
# Others of the same rank have no part in the training, whatever they say.
_OF_ACTING_LIVES = {events.WorkerFormed, events.WorkerRestored, events.WorkerCommitted, events.WorkerFinished}
# Every rank says so while the job trains, and no planned swap depends on it.
_OF_NO_SWAP = {events.WorkerCommitted, events.CheckpointKept}
_RUNNING, _STOPPED = Phase.RUNNING, Phase.STOPPED  # asked at every event, and Python 3.11 looks long for them


class Machine(Phases):
    """State of one job; `next_deadline()` says when `tick(now)` wants to be called."""

    # ---- the whole interface ----------------------------------------------------------------------------------

    def handle(self, event: AnyEvent, now: float) -> list[AnyEffect]:
        """Take one event, return what is to be done. Events after STOPPED and stale ones return nothing."""
        self._out = []
        if self.phase is not _STOPPED and not self._is_stale(event):
            self._apply(event, now)
            if self.phase is _RUNNING and type(event) not in _OF_NO_SWAP:
                self._go_on_with_swap(now)
        return self._out

    def tick(self, now: float) -> list[AnyEffect]:
        """Call at `next_deadline()`; harmless at other times."""
        return self.handle(events.TimePassed(), now)

    def next_deadline(self) -> float | None:
        if self.phase is _STOPPED:
            return None
        if self.phase is not _RUNNING:
            return self._deadline
        waits = [self._deadline, self._swap.deadline(self.pool), self._resize.deadline(self.members)]
        return min((deadline for deadline in waits if deadline is not None), default=None)

    # ---- what is stale ----------------------------------------------------------------------------------------

    def _is_stale(self, event: AnyEvent) -> bool:
        """True for speech of an older generation, of a former life of a worker or node, or of an unknown rank."""
        if type(event) in _OF_A_RANK:
            life = self.members.life(event.rank, event.incarnation)  # type: ignore[union-attr]
            if life is None or (type(event) in _OF_ACTING_LIVES and not self.members.acts(life)):
                return True
        elif isinstance(event, events.CheckpointKept):
            return False  # it was permitted, and is there, whoever says so
        elif isinstance(event, events.NodeCondemned):
            node = self.members.nodes.get(event.node)
            return node is None or not node.alive or node.incarnation != event.incarnation
        elif isinstance(event, events.NodeLeaving | events.NodeMended):
            node = self.members.nodes.get(event.node)
            return node is None or node.left
        elif isinstance(event, events.NodeGranted | events.NodeRefused):
            return event.request not in self.pool.open
        elif isinstance(event, events.NodeLeft):
            node = self.members.nodes.get(event.node)
            return node is None or node.left or node.request != event.request
        current = self.training if isinstance(event, events.WorkerCommitted) else self.generation
        return getattr(event, "generation", current) != current

    # ---- transitions ------------------------------------------------------------------------------------------

    def _apply(self, event: AnyEvent, now: float) -> None:
        match event:  # in every recovery each rank says the first four
            case events.WorkerReported():
                self._worker_reported(event, now)
            case events.WorkerFormed():
                self.members.slots[event.rank].formed = True
                self._advance(now)
            case events.WorkerRestored():
                self._worker_restored(event, now)
            case events.WorkerCommitted():
                self._without_progress = 0
                self._kept.reached = max(self._kept.reached, event.v)
            case events.JobStarted():
                self.members = Members(event.nodes, event.num_active, event.ranks_per_node)
                self._deadline = now + self.limits.start_timeout_s
            case events.AgentJoined():
                self._agent_joined(event, now)
            case events.NodeCondemned():
                self._nodes_lost((event,), now)
            case events.NodesCondemned():
                self._nodes_lost(tuple(one for one in event.verdicts if not self._is_stale(one)), now)
            case events.NodeLeaving():
                node = self.members.nodes[event.node]
                node.leaving[event.cause], node.failed_swaps = event.reason, 0
                self._swap.told.discard(node.name)
            case events.NodeMended():
                self._node_mended(event, now)
            case events.WorkerStarted():
                self._life(event).state = "up"
            case events.WorkerJoined():
                self._worker_joined(event, now)
            case events.WorkerExited():
                self._worker_exited(event, now)
            case events.WorkerRaised():
                if self.members.acts(self._life(event)):
                    self._last_words.hear(event)
            case events.CheckpointKept():
                self._kept.hear(event.step)
                if self.phase is Phase.SAVING and event.how == "dying" and event.generation == self.generation:
                    self._end_saving(f"a checkpoint of step {event.step} is complete, no step is lost", now)
            case events.CheckpointFailed():
                if self.phase is Phase.SAVING:
                    self._end_saving(f"the last checkpoint failed on rank {event.rank}: {event.reason}", now)
            case events.HandedOver():
                self.members.slots[event.rank].restored_v = event.v
                self._advance(now)
            case events.NotHandedOver():
                self._not_put_aside(f"rank {event.rank}: {event.reason}", now)
            case events.NotInherited():
                self._lose_estate(f"rank {event.rank}: {event.reason}", now)
            case events.WorkerFinished():
                self._worker_finished(event)
            case events.TrainingStalled():
                if self.phase is Phase.RUNNING and self._trained and not self.members.is_complete:
                    self._fence(event.reason, now)
            case events.LaunchFailed():
                self._launch_failed(event, now)
            case events.NodeGranted():
                self._node_granted(event, now)
            case events.NodeRefused():
                self.pool.refused(event.request, event.reason, event.may_retry)
                self._search_again(event.reason, now)
            case events.NodeLeft():
                self._node_left(event, now)
            case events.StopRequested():
                self._stop(event.reason, event.exit_code)
            case events.TimePassed():
                if self._deadline is not None and now >= self._deadline:
                    self._timed_out(now)
                elif self.phase is Phase.RUNNING:
                    self._resize.tick(now)
                    self._lose(self._swap.late(self.members, self.pool, self.limits, now), "not ready in time", now)
                    self._out += self.pool.give_up(self.members, self.limits.start_timeout_s, now)

    def _agent_joined(self, event: events.AgentJoined, now: float) -> None:
        node = self.members.nodes.get(event.node)
        if node is None or node.left or event.incarnation <= node.incarnation:
            return
        node.incarnation, node.alive, node.link_lost = event.incarnation, True, ""
        node.process_failures = node.launch_failures = 0
        is_new = node.name in self.pool.joining
        self.pool.joined(node.name)
        if not self.members.has_launched:
            active = list(islice(self.members.nodes, self.members.num_active))
            if self._active.is_met(active, lambda name: self.members.nodes[name].alive):
                self._launch_unplaced("all active nodes are ready", now)
                return
        self._search_again(f"node {node.name} {'came from the pool' if is_new else 'is back'}", now)

    def _nodes_lost(self, verdicts: tuple[events.NodeCondemned, ...], now: float) -> None:
        lost: list[Slot] = []
        lives = self.members.by_node()
        for verdict in verdicts:
            node = self.members.nodes[verdict.node]
            node.lost_because = verdict.reason
            if verdict.kind == "link":
                node.link_lost = verdict.reason
            else:
                node.alive = False
            lost += [slot for slot in lives.get(node.name, ()) if slot.is_live]
        if verdicts:
            others = f" (and {len(verdicts) - 1} more nodes)" if len(verdicts) > 1 else ""
            self._lose(lost, f"node {verdicts[0].node}: {verdicts[0].reason}{others}", now)

    def _node_mended(self, event: events.NodeMended, now: float) -> None:
        """A lost link belongs to one life of the agent; who wants a node to leave speaks of the node."""
        node = self.members.nodes[event.node]
        if event.cause in ("", "link") and event.incarnation == node.incarnation:
            node.link_lost = ""
        if event.cause:
            node.leaving.pop(event.cause, None)
        else:
            node.leaving.clear()
        node.failed_swaps = 0
        self._search_again(f"node {node.name}: {event.reason}", now)

    def _node_granted(self, event: events.NodeGranted, now: float) -> None:
        """Its agent is given the time that the first agents get."""
        self.pool.granted(self.members.add(event.node, event.request), now + self.limits.start_timeout_s)
        self._search_again(f"node {event.node} came from the pool", now)

    def _node_left(self, event: events.NodeLeft, now: float) -> None:
        node = self.members.nodes[event.node]
        node.lost_because = event.reason
        self._out += self.pool.give_back(node, event.reason)
        reason = f"node {node.name}: {event.reason}"
        lost = [slot for slot in self.members.on_node(node.name) if slot.is_live]
        if lost:
            self._lose(lost, reason, now)
        else:
            self._search_again(reason, now)

    def _worker_joined(self, event: events.WorkerJoined, now: float) -> None:
        self._life(event).state = "up"
        self._is_supervised = True
        if not self._trained and self._deadline is None:
            self._deadline = now + self.limits.launch_timeout_s
        if self._trained or not self._has_left:
            return
        silent = [slot for slot in self.members.slots if slot.state == "gone" and not slot.finished]
        if silent:
            self._lose(silent, f"rank {silent[0].rank} ended before it called flashrec.init()", now)

    def _worker_exited(self, event: events.WorkerExited, now: float) -> None:
        slot = self._life(event)
        if not self.members.acts(slot):
            self.members.nodes[slot.node].process_failures += 1
            self._lose([slot], f"rank {slot.rank} on node {slot.node}: {event.reason}", now)
            return
        if slot.finished or event.farewell == "orderly" or not self._is_supervised:
            slot.state, self._has_left = "gone", True
            if self._trained and self.phase is not Phase.RUNNING and not self.members.is_complete:
                self._stop(*endings.left_early(slot.rank, "during a recovery"))
            else:
                self._stop_if_over()
            return
        words = self._last_words.of(event.rank)
        if event.farewell == "raised" and words is not None and self._is_bug(words):
            return
        self.members.nodes[slot.node].process_failures += 1
        self._lose([slot], f"rank {slot.rank} on node {slot.node}: {event.reason}", now)

    def _worker_finished(self, event: events.WorkerFinished) -> None:
        was_complete = self.members.is_complete
        self.members.finish(event.rank)
        if not was_complete:
            self._drop(self.members.successors(), "all steps are done: nobody is restored any more")
        if self._trained and self.phase is not Phase.RUNNING and not was_complete:
            self._complete()  # the fence was faster than this news

    def _is_bug(self, words: events.WorkerRaised) -> bool:
        """The same exception at the same step in a later attempt: a retry does not help, so stop and show it."""
        if not self._last_words.is_repeated(words):
            return False
        self._stop(
            f"rank {words.rank} raised the same exception again at step {words.raised.step}: this is an error "
            f"in the training script, not a fault\n{words.raised.traceback}",
            EXIT_BUG,
        )
        return True

    def _launch_failed(self, event: events.LaunchFailed, now: float) -> None:
        slots = [life for who in event.workers if (life := self.members.life(*who)) is not None]
        node = self.members.nodes.get(event.node)
        if node is not None and slots:
            node.launch_failures += 1
            self._lose(slots, f"launch on node {event.node} failed: {event.reason}", now)

    def _worker_reported(self, event: events.WorkerReported, now: float) -> None:
        slot = self._life(event)
        slot.state, slot.report = "up", event.report
        self._kept.reached = max(self._kept.reached, event.report.v)
        if self._swap.pausing and self.phase is Phase.RUNNING and self.members.acts(slot):
            self._move(Phase.FENCING, self._swap.why)
            self._deadline = now + self.limits.launch_timeout_s  # they pause at the end of a block, however long
        self._advance(now)

    def _worker_restored(self, event: events.WorkerRestored, now: float) -> None:
        slot, estate = self.members.slots[event.rank], self._resize.estate
        expected = self.plan.resume_step if self.plan is not None else estate.step if estate is not None else event.v
        if event.v != expected:
            self._lose([slot], f"rank {slot.rank} came back at step {event.v}, not {expected}", now)
            return
        slot.state, slot.formed, slot.restored_v, slot.joins = "up", True, event.v, False
        self._advance(now)

    def _life(self, event: AnyEvent) -> Slot:
        """Whom a worker's event speaks for; it is not stale."""
        life = self.members.life(event.rank, event.incarnation)  # type: ignore[union-attr]
        assert life is not None
        return life
