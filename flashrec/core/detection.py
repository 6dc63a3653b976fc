"""Detection of lost nodes: heartbeats, connection resets and Slurm's node states in, verdicts with a reason out.

Per life (incarnation) of an agent: alive → suspect (silent for `suspect_after_s`) → dead (silent for `dead_after_s`,
or its connection was reset, or Slurm says DOWN). A heartbeat of a suspect refutes the suspicion; nothing refutes death:
a node that was condemned comes back as a new incarnation.

Two doubts about ourselves: when `tick` itself comes late we were not listening, so the lateness is given back to
everybody; and when more than `max_condemned` nodes fall silent together, the network is more likely at fault than they,
so they get `doubt_s` more. Pure: time is an argument.
"""

from __future__ import annotations

import msgspec

from flashrec.core.limits import Timing


class Verdict(msgspec.Struct, frozen=True):
    """state: 'alive', 'suspect' or 'dead'; reason: for people and for the journal."""

    node: str
    incarnation: int
    state: str
    reason: str


def lost_states(states: frozenset[str]) -> frozenset[str]:
    """Those of Slurm's node states that mean: Slurm has taken, or will take, the node from its jobs."""
    return states & {"DOWN", "FAIL", "POWERED_DOWN", "POWERING_DOWN"}


class _Watched(msgspec.Struct):
    incarnation: int
    heard_at: float
    state: str = "alive"


class Detector:
    """Keeps one record per node. Every method takes `now` in seconds of a monotonic clock."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._nodes: dict[str, _Watched] = {}
        self._ticked_at: float | None = None

    def joined(self, node: str, incarnation: int, now: float) -> None:
        """A new life of the agent on `node` begins."""
        self._nodes[node] = _Watched(incarnation, now)

    def forget(self, node: str) -> None:
        """Stop watching (the node has left the job)."""
        self._nodes.pop(node, None)

    def heard(self, node: str, incarnation: int, now: float) -> list[Verdict]:
        """A heartbeat came; refutes a suspicion of the same life."""
        watched = self._nodes.get(node)
        if watched is None or watched.incarnation != incarnation or watched.state == "dead":
            return []
        silent_s = now - watched.heard_at
        watched.heard_at = now
        if watched.state == "suspect":
            watched.state = "alive"
            return [Verdict(node, incarnation, "alive", f"heartbeat after {silent_s:.2f} s of silence")]
        return []

    def disconnected(self, node: str, incarnation: int, reason: str) -> list[Verdict]:
        """The control connection ended. TCP hides lost packets, so an end is the end of this life of the agent."""
        return self._condemn(node, incarnation, f"control connection ended: {reason}")

    def slurm_said(self, node: str, states: frozenset[str]) -> list[Verdict]:
        """Slurm's state of a node is a verdict on it if it is one of `lost_states`."""
        watched = self._nodes.get(node)
        if not lost_states(states) or watched is None:
            return []
        return self._condemn(node, watched.incarnation, f"Slurm says {'+'.join(sorted(states))}")

    def condemn(self, node: str, reason: str) -> list[Verdict]:
        """Somebody who may has decided so: the job's user."""
        watched = self._nodes.get(node)
        return [] if watched is None else self._condemn(node, watched.incarnation, reason)

    def tick(self, now: float) -> list[Verdict]:
        """Judge the silence of everybody. Call at least every `tick_interval_s`."""
        late_s = 0.0 if self._ticked_at is None else now - self._ticked_at - self._timing.tick_interval_s
        self._ticked_at = now
        if late_s > self._timing.tick_interval_s:
            for watched in self._nodes.values():
                watched.heard_at += late_s
        verdicts: list[Verdict] = []
        silent = {n: now - w.heard_at for n, w in self._nodes.items() if w.state != "dead"}
        doubt = sum(s >= self._timing.dead_after_s for s in silent.values()) > self._timing.max_condemned
        dead_after_s = self._timing.dead_after_s + (self._timing.doubt_s if doubt else 0.0)
        for node, silent_s in silent.items():
            watched = self._nodes[node]
            if silent_s >= dead_after_s:
                verdicts += self._condemn(node, watched.incarnation, f"silent for {silent_s:.2f} s")
            elif silent_s >= self._timing.suspect_after_s and watched.state == "alive":
                watched.state = "suspect"
                verdicts.append(Verdict(node, watched.incarnation, "suspect", f"silent for {silent_s:.2f} s"))
        return verdicts

    def state_of(self, node: str) -> str:
        """'alive', 'suspect', 'dead' or 'unknown' (never seen)."""
        watched = self._nodes.get(node)
        return watched.state if watched else "unknown"

    def _condemn(self, node: str, incarnation: int, reason: str) -> list[Verdict]:
        watched = self._nodes.get(node)
        if watched is None or watched.incarnation != incarnation or watched.state == "dead":
            return []
        watched.state = "dead"
        return [Verdict(node, incarnation, "dead", reason)]
