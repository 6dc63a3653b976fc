"""From verdicts to acts: runs the detector, has nodes probe others, and tells the machine who is lost.

A lost node is cut off, and the job steps that include it go on without it. A node whose fabric link is lost keeps its
control connection: through it its workers are killed, and over the fabric it may be heard again. Who is condemned, and
why, is decided in `core.detection` alone.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Protocol

from flashrec.config.schema import Detection
from flashrec.core import events as e
from flashrec.core.detection import Detector, lost_states
from flashrec.core.lives import Judgement, Verdict
from flashrec.core.machine import Machine
from flashrec.core.probing import Probe
from flashrec.core.types import Phase
from flashrec.manager.control import ControlPlane, Link
from flashrec.manager.faulty import report_faulty
from flashrec.manager.journal import Journal
from flashrec.manager.voice import say
from flashrec.wire import messages as m

GATHER_S = 0.005


class Job(Protocol):
    """What is needed of the job (the manager is one)."""

    job_id: int | None
    machine: Machine
    control: ControlPlane
    journal: Journal

    def emit(self, event: e.AnyEvent) -> None: ...

    def abandon(self, node: str) -> None: ...


class Verdicts:
    """detector: this class alone ticks it; others give it what they hear, and its verdicts to `judge`."""

    def __init__(self, job: Job, detector: Detector, settings: Detection) -> None:
        self._job, self._detector, self._settings = job, detector, settings
        self._condemned: list[e.NodeCondemned] = []  # the machine does not know of them yet
        self._gathering: asyncio.TimerHandle | None = None
        self._dismissed: dict[str, str] = {}  # nodes that the user wants no ranks on, and why

    async def run(self) -> None:
        """Judge silence until cancelled."""
        while True:
            self._carry_out(self._detector.tick(time.monotonic()))
            await asyncio.sleep(self._settings.tick_interval_s)

    def judge(self, verdicts: list[Verdict]) -> None:
        """Journal each, say it, and act on it."""
        if self._job.machine.phase is Phase.STOPPED:
            return  # agents end because we told them to
        self._say(verdicts)
        condemned = [verdict for verdict in verdicts if verdict.state == "dead"]
        for verdict in condemned:
            if verdict.kind != "link":
                self._job.control.cut(verdict.node, verdict.reason)
                self._job.abandon(verdict.node)
        self._condemned += [e.NodeCondemned(v.node, v.incarnation, v.reason, v.kind) for v in condemned]
        if any(verdict.kind != "lost" or verdict.silent_s for verdict in condemned):
            self.flush()
        elif condemned and self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(GATHER_S, self.flush)
        for verdict in condemned:  # otherwise Slurm knows, or an agent crashed
            if self._job.job_id is not None and verdict.silent_s:
                self.report_faulty(verdict.node, verdict.reason)

    def flush(self) -> None:
        """Tell the machine which nodes are condemned, before it is told anything else. Connections that end together
        are one failure, and those of a rack do not end in the same instant: they are waited for a moment."""
        if self._gathering is not None:
            self._gathering.cancel()
        condemned, self._condemned, self._gathering = tuple(self._condemned), [], None
        if condemned:
            self._job.emit(condemned[0] if len(condemned) == 1 else e.NodesCondemned(condemned))

    def _say(self, verdicts: list[Verdict]) -> None:
        for verdict in verdicts:
            what = "fabric link of node" if verdict.kind == "link" else "node"
            generation = self._job.machine.generation
            self._job.journal.verdict(f"{what} {verdict.node}", verdict.state, verdict.reason, generation)
            say(f"{what} {verdict.node} is {verdict.state}: {verdict.reason}")
            if verdict.kind == "link" and verdict.state == "alive":
                self._job.emit(e.NodeMended(verdict.node, verdict.incarnation, verdict.reason, "link"))

    def _carry_out(self, found: Judgement) -> None:
        self.judge(found.verdicts)
        for probe in found.probes:
            self._ask(probe)
        for note in found.notes:
            self._job.journal.note("detection", node=note.node, text=note.text)
            say(f"node {note.node}: {note.text}" if note.node else note.text)

    def _ask(self, probe: Probe) -> None:
        place = self._job.control.probe_place(probe.node, probe.path)
        self._job.journal.note(
            "probe asked", number=probe.number, by=probe.by, node=probe.node, path=probe.path, place=place
        )
        if place is None:  # its agent has no place for probes on this path
            self._detector.probed(probe.number, probe.by, probe.node, None)
            return
        question = m.ProbeAsked(
            probe.number, probe.node, probe.incarnation, probe.path, *place, self._settings.probe_timeout_s
        )
        self._job.control.send(probe.by, question)

    # ---- what workers, Slurm and the user say -----------------------------------------------------------------

    def peers_blamed(self, link: Link, blame: m.PeersBlamed) -> None:
        """Workers on a node lost their connections to others. An address that is not one node's alone says nothing."""
        if blame.generation != self._job.machine.generation:
            return
        for address in blame.addresses:
            nodes = self._job.control.nodes_at(address)
            self._job.journal.note(
                "peer blamed", node=nodes, by=link.node, rank=blame.rank, address=address, generation=blame.generation
            )
            if len(nodes) == 1:
                self.judge(self._detector.blamed(nodes[0], link.node, time.monotonic()))

    def slurm_said(self, node: str, states: frozenset[str]) -> None:
        """Slurm's state of one node, as the keeper polled it."""
        lost = lost_states(states)
        slurm = f"Slurm says {'+'.join(sorted(states))}" if lost else ""
        self._job.control.bar(node, slurm or self._dismissed.get(node, ""))
        self.judge(self._detector.slurm_said(node, states))

    def dismiss(self, node: str, reason: str) -> None:
        """The user wants no ranks on this node any more: its agent is let go and no other one admitted."""
        self._dismissed[node] = reason
        self._job.control.bar(node, reason)
        self.judge(self._detector.condemn(node, reason))

    def retire(self, node: str, reason: str) -> None:
        """Nothing of the job is to be on this node any more: its agent ends in good order, no other one is admitted."""
        self._dismissed[node] = reason
        self._job.control.bar(node, reason)
        for verdict in self._detector.left(node):
            self._job.journal.verdict(f"node {node}", verdict.state, reason, self._job.machine.generation)
        self._job.control.send(node, m.Stop(f"node {node} is not used any more: {reason}"))

    def recall(self, node: str) -> None:
        """What `retire` was for is over."""
        if self._dismissed.pop(node, ""):
            self._job.control.bar(node, "")

    def report_faulty(self, node: str, reason: str) -> str:
        """For root to drain; '' or why that could not be told."""
        said = report_faulty(self._job.job_id, node, reason, os.environ)
        self._job.journal.note("node reported", node=node, reason=reason, said=said or "done")
        return said
