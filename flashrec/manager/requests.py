"""What the user may ask while the job runs: replace a node, drop a spare, report a node. `wishes` is how it comes."""

from __future__ import annotations

import os
from typing import Protocol

from flashrec.core.detection import Detector
from flashrec.core.machine import Machine
from flashrec.core.types import Phase
from flashrec.manager.agents import AgentKeeper
from flashrec.manager.departures import Departures
from flashrec.manager.verdicts import Verdicts
from flashrec.manager.wishes import has_room_without


class Job(Protocol):
    """The manager, as far as requests go."""

    machine: Machine
    detector: Detector
    verdicts: Verdicts


class Requests:
    """Each returns '' when it is done or begun, or why not."""

    def __init__(self, job: Job, agents: AgentKeeper, departures: Departures) -> None:
        self._job, self._agents, self._departures = job, agents, departures

    def replace_node(self, node: str, reason: str, now: bool) -> str:
        """Take the ranks off this node for good, if there is another place for them, at a step boundary or `now`."""
        if self._job.machine.phase is Phase.STOPPED:
            return "the job is over"
        if self._job.detector.state_of(node) not in ("alive", "suspect"):
            return f"node {node} runs nothing of this job (flashrec status)"
        if not has_room_without(node, self._job.machine):
            return f"no spare is free for the ranks of node {node}, and there is no pool to ask"
        if now:
            self._dismiss(node, reason)
        else:
            self._departures.ask(node, reason)
        return ""

    def drop_node(self, node: str, reason: str) -> str:
        """Use an idle spare no more."""
        if node not in self._job.machine.members.nodes:
            return f"node {node} is not part of this job"
        if any(self._job.machine.members.on_node(node)):
            return f"node {node} runs ranks; flashrec replace moves them to a spare first"
        if node == os.environ.get("SLURMD_NODENAME"):
            return f"the manager runs on node {node}"
        self._dismiss(node, reason)
        return ""

    def report_faulty(self, node: str, reason: str) -> str:
        """Tell the administrators of this cluster that a node is faulty."""
        return self._job.verdicts.report_faulty(node, reason)

    def _dismiss(self, node: str, reason: str) -> None:
        self._agents.dismiss(node)
        self._job.verdicts.dismiss(node, reason)
