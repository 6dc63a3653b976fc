"""One detector for all signals about nodes: heartbeats on two paths, connection ends, probes by other nodes, workers'
errors and Slurm's states in; verdicts with a reason, and questions to other nodes, out.

Per life (incarnation) of an agent:

    state     entered when                                              left when
    alive     the agent has said hello                                  -
    suspect   the control path is silent for `suspect_after_s`, or      a heartbeat on the control path refutes it
              several nodes blame it
    dead      silence without refutation, connection end, Slurm, user   never: the node comes back as a new life
    left      the node is not the job's any more                        never

Silence becomes death after `dead_after_s`. Sooner (`hasten_after_s`), if other nodes that can look do not reach the
node; later (`probed_patience_s` more), if one does or its MPI heartbeats still come: then it lives, and the path to it
is at fault. Beside its state a life has a fabric link, which is watched once its MPI session stands (`core.links`).

We doubt ourselves first. A late `tick` did not listen: the lateness is given back to everybody. More than
`max_condemned` silent together: more likely our network, so `doubt_s` more. Pure: time is an argument, and the same
inputs give the same verdicts. docs/concepts/detection.md draws it.
"""

from __future__ import annotations

from flashrec.core.limits import Timing
from flashrec.core.links import Links
from flashrec.core.lives import CONTROL, FABRIC, Judgement, Life, Note, Path, Verdict, names
from flashrec.core.probing import FAILED, REACHED, Probe, Round, choose

BLAMERS = 2  # nodes whose workers blame a node before that counts
FEW_ROUNDS, MAX_RARELY = 3, 30  # MPI may be of no use on a node for hours: then others look there more and more rarely


def lost_states(states: frozenset[str]) -> frozenset[str]:
    """Those of Slurm's node states that mean: Slurm has taken, or will take, the node from its jobs."""
    return states & {"DOWN", "FAIL", "POWERED_DOWN", "POWERING_DOWN"}


class Detector:
    """Keeps one record per node. `now`: seconds of a monotonic clock. home: the node that the manager runs on ('': not
    known); it sees through our own network, so on the control path it is no witness."""

    def __init__(self, timing: Timing, home: str = "") -> None:
        self._timing, self._home = timing, home
        self._lives: dict[str, Life] = {}
        self._ticked_at: float | None = None
        self._num_rounds = 0
        self._fit: dict[str, tuple[list[str], frozenset[str]]] = {}  # path -> who is fit to look, in this tick
        self._rounds: dict[int, Path] = {}  # number -> whose round it is
        self._links = Links(timing, self._probe_over_fabric)

    # ---- who is watched ---------------------------------------------------------------------------------------

    def joined(self, node: str, incarnation: int, now: float) -> None:
        """A new life of the agent on `node` begins. A dead link stays dead until the fabric is heard."""
        former = self._lives.get(node)
        self._lives[node] = life = Life(incarnation, Path(now))
        if former is not None and former.link and former.state != "left":
            life.link = "inherited"

    def left(self, node: str) -> list[Verdict]:
        """The node is not the job's any more, and nobody is to blame."""
        life = self._lives.get(node)
        if life is None or not life.is_watched:
            return []
        life.state = "left"
        return [Verdict(node, life.incarnation, "left", "not the job's any more", "asked")]

    def state_of(self, node: str) -> str:
        """'alive', 'suspect', 'dead', 'left' or 'unknown' (never seen)."""
        life = self._lives.get(node)
        return life.state if life else "unknown"

    def is_link_dead(self, node: str) -> bool:
        """The fabric link of this node is lost; its agent may live."""
        life = self._lives.get(node)
        return life is not None and bool(life.link)

    def fabric_of(self, node: str, now: float) -> str:
        """'alive', 'suspect' (silent for a while, or its MPI session ended), 'dead', or 'unknown': not watched."""
        life = self._lives.get(node)
        if life is not None and life.link:
            return "dead"
        if life is None or life.fabric is None or not life.is_watched:
            return "unknown"
        return "alive" if life.is_heard_on_fabric(now, self._timing.suspect_after_s) else "suspect"

    # ---- signals ----------------------------------------------------------------------------------------------

    def heard(self, node: str, incarnation: int, now: float, path: str = CONTROL) -> list[Verdict]:
        """A heartbeat came. On the control path it refutes a suspicion, on the fabric it mends the link."""
        life = self._current(node, incarnation)
        if life is None:
            return []
        if path == FABRIC:
            return self._heard_on_fabric(node, life, now)
        if life.state != "suspect":
            life.control.hear(now)
            return []
        silent_s = max(0.0, now - life.control.heard_at)
        life.control.hear(now)
        life.state, life.blamed = "alive", {}
        return [Verdict(node, incarnation, "alive", f"heartbeat after {silent_s:.2f} s of silence")]

    def fabric_up(self, node: str, incarnation: int, now: float) -> list[Verdict]:
        """The MPI session of this life stands: its fabric is watched from now on."""
        return self.heard(node, incarnation, now, FABRIC)

    def fabric_down(self, node: str, incarnation: int, reason: str, now: float) -> list[Verdict]:
        """The MPI session ended. That decides nothing: silence goes on to count, and others look."""
        life = self._current(node, incarnation)
        if life is not None and life.fabric is not None:
            life.fabric.ended = reason or "the session ended"
        return []

    def blind(self, path: str, now: float, reason: str) -> list[Verdict]:
        """Our own side of a path was down (`reason`): nobody is to blame for it, silence counts from now."""
        for life in self._lives.values():
            watched = life.control if path == CONTROL else life.fabric
            if watched is not None:
                watched.heard_at = now
                watched.forget_probes()
        return []

    def disconnected(self, node: str, incarnation: int, reason: str) -> list[Verdict]:
        """The control connection ended. TCP hides lost packets, so an end is the end of this life of the agent."""
        return self._condemn(node, incarnation, f"control connection ended: {reason}", "lost")

    def slurm_said(self, node: str, states: frozenset[str]) -> list[Verdict]:
        """Slurm's state of a node is a verdict on it if it is one of `lost_states`."""
        life = self._lives.get(node)
        if not lost_states(states) or life is None:
            return []
        return self._condemn(node, life.incarnation, f"Slurm says {'+'.join(sorted(states))}", "slurm")

    def condemn(self, node: str, reason: str) -> list[Verdict]:
        """Somebody who may has decided so: the job's user."""
        life = self._lives.get(node)
        return [] if life is None else self._condemn(node, life.incarnation, reason, "asked")

    def blamed(self, node: str, by: str, now: float) -> list[Verdict]:
        """Workers on node `by` lost their connections to `node`. Two nodes that say so make it a suspect, which is
        probed now; they never condemn it."""
        life = self._lives.get(node)
        if life is None or not life.is_watched or by == node or self.state_of(by) != "alive":
            return []
        life.blamed = {n: at for n, at in life.blamed.items() if now - at < self._timing.blame_window_s} | {by: now}
        if len(life.blamed) < BLAMERS or life.state != "alive":
            return []
        life.state = "suspect"
        reason = f"workers on {names(life.blamed)} lost their connections to it"
        return [Verdict(node, life.incarnation, "suspect", reason)]

    def probed(self, number: int, by: str, node: str, reached: bool | None) -> None:
        """`by` answers a probe of round `number`: it reached `node`, or did not; None: it could not look. The next
        `tick` judges it."""
        path = self._rounds.get(number)
        if path is not None and path.round is not None and path.round.number == number:
            path.round.hear(by, node, reached)

    # ---- judgement --------------------------------------------------------------------------------------------

    def tick(self, now: float) -> Judgement:
        """Judge the silence of everybody. Call at least every `tick_interval_s`."""
        self._give_back_lateness(now)
        self._fit = {}
        self._rounds = {number: path for number, path in self._rounds.items() if path.round is not None}
        found = Judgement([], [], [])
        watched = {node: life for node, life in self._lives.items() if life.is_watched}
        soonest_s = min(self._timing.hasten_after_s, self._timing.dead_after_s)
        num_silent = sum(now - life.control.heard_at >= soonest_s for life in watched.values())
        for node, life in watched.items():
            if life.state != "alive" or now - life.control.heard_at >= self._timing.suspect_after_s:
                self._judge(node, life, now, num_silent > self._timing.max_condemned, found)
        has_link = {node: life for node, life in watched.items() if (life.fabric or life.link) and life.is_watched}
        if has_link:
            self._links.judge(has_link, now, found)
        return found

    def _give_back_lateness(self, now: float) -> None:
        late_s = 0.0 if self._ticked_at is None else now - self._ticked_at - self._timing.tick_interval_s
        self._ticked_at = now
        if late_s > self._timing.tick_interval_s:
            for life in self._lives.values():
                for path in life.paths():
                    path.excuse(late_s, now)

    def _judge(self, node: str, life: Life, now: float, doubt: bool, found: Judgement) -> None:
        timing, control = self._timing, life.control
        silent_s = now - control.heard_at
        beats_on_fabric = life.is_heard_on_fabric(now, timing.suspect_after_s)
        if life.state == "alive" and silent_s >= timing.suspect_after_s:
            life.state = "suspect"
            reason = f"silent for {silent_s:.2f} s{', MPI heartbeats still come' if beats_on_fabric else ''}"
            found.verdicts.append(Verdict(node, life.incarnation, "suspect", reason, silent_s=silent_s))
        if life.state != "suspect":
            return
        self._probe(node, control, CONTROL, now, found)
        lives = beats_on_fabric or control.concluded == REACHED
        dead_after_s = timing.dead_after_s
        if lives or doubt:
            dead_after_s += max(timing.probed_patience_s * lives, timing.doubt_s * doubt)
        elif control.concluded == FAILED:
            dead_after_s = min(dead_after_s, timing.hasten_after_s)
        reason = f"silent for {silent_s:.2f} s{_evidence(control, beats_on_fabric)}"
        if silent_s >= dead_after_s:
            found.verdicts.extend(self._condemn(node, life.incarnation, reason, "lost", silent_s))
        elif lives and silent_s >= timing.hasten_after_s:
            control.say("lives", Note(node, f"{reason}; condemned after {dead_after_s:g} s"), found)

    # ---- probes -----------------------------------------------------------------------------------------------

    def _probe_over_fabric(self, node: str, fabric: Path, now: float, found: Judgement) -> None:
        self._probe(node, fabric, FABRIC, now, found)

    def _probe(self, node: str, path: Path, name: str, now: float, found: Judgement) -> None:
        """Take what the round under way has found, and begin a round if there is none or it is old."""
        if name not in self._fit:
            in_order = self._fit_to_look(name, now)
            self._fit[name] = in_order, frozenset(in_order)
        fit, are_fit = self._fit[name]
        if path.round is not None:
            concluded = path.round.conclusion(are_fit)
            if concluded:
                path.concluded = concluded
                path.witnesses = path.round.reached_by() if concluded == REACHED else path.round.failed_by()
            rarely = 2 ** max(0, path.num_rounds - FEW_ROUNDS) if name == FABRIC else 1
            if now - path.round.asked_at < min(rarely, MAX_RARELY) * self._timing.probe_interval_s:
                return
            self._rounds.pop(path.round.number, None)
        self._num_rounds += 1
        self._rounds[self._num_rounds] = path
        path.num_rounds += 1
        no_witness = self._home if name == CONTROL else ""
        path.round = Round(self._num_rounds, node, choose(node, fit, self._timing.probe_peers, no_witness), now)
        for by, target in path.round.looks():
            found.probes.append(Probe(self._num_rounds, by, target, self._lives[target].incarnation, name))

    def _fit_to_look(self, name: str, now: float) -> list[str]:
        """Nodes of which nothing is doubtful on this path, in order."""
        within_s = self._timing.suspect_after_s
        return sorted(
            node
            for node, life in self._lives.items()
            if life.state == "alive"
            and now - life.control.heard_at < within_s
            and (name == CONTROL or life.is_heard_on_fabric(now, within_s))
        )

    # ---- records ----------------------------------------------------------------------------------------------

    def _current(self, node: str, incarnation: int) -> Life | None:
        life = self._lives.get(node)
        return life if life is not None and life.incarnation == incarnation and life.is_watched else None

    def _heard_on_fabric(self, node: str, life: Life, now: float) -> list[Verdict]:
        if life.fabric is None:
            life.fabric = Path(now)
        life.fabric.hear(now)
        was, life.link = life.link, ""
        if was != "dead":
            return []
        return [Verdict(node, life.incarnation, "alive", "its MPI heartbeats come again", "link")]

    def _condemn(self, node: str, incarnation: int, reason: str, kind: str, silent_s: float = 0.0) -> list[Verdict]:
        life = self._current(node, incarnation)
        if life is None:
            return []
        life.state = "dead"
        for path in life.paths():
            path.forget_probes()
        return [Verdict(node, incarnation, "dead", reason, kind, silent_s)]


def _evidence(control: Path, beats_on_fabric: bool) -> str:
    if beats_on_fabric:
        return ", but MPI heartbeats still come: the control network is lost"
    if control.concluded == REACHED:
        return f", but {names(control.witnesses)} can reach it: the path between manager and node is lost"
    if control.concluded == FAILED:
        return f", and {names(control.witnesses)} cannot reach it"
    return ""
