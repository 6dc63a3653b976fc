"""Is the fabric link of a node lost, although its control path answers?

MPI alone decides nothing: it may hang or crash. A link is dead when no MPI heartbeat has come for
`fabric_dead_after_s`, other nodes do not reach the node over the fabric, and the same nodes reach each other there. If
more than `max_condemned` are silent, or nobody is heard on the fabric, the fault is more likely ours, and no link is
judged. Pure; part of `core.detection`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flashrec.core.limits import Timing
from flashrec.core.lives import Judgement, Life, Note, Path, Verdict, names
from flashrec.core.probing import FAILED, REACHED


class Links:
    """probe(node, path, now, found) keeps the rounds of probes over the fabric going."""

    def __init__(self, timing: Timing, probe: Callable[[str, Path, float, Judgement], None]) -> None:
        self._timing, self._probe = timing, probe
        self._doubts_itself = False

    def judge(self, watched: Mapping[str, Life], now: float, found: Judgement) -> None:
        """watched: all lives that are alive or suspect."""
        timing = self._timing
        for node, life in watched.items():
            if life.link == "inherited":
                life.link = "dead"
                reason = "the fabric link was lost in its former life and has not been heard since"
                found.verdicts.append(Verdict(node, life.incarnation, "dead", reason, "link"))
        silent: dict[str, tuple[Life, Path]] = {}
        for node, life in watched.items():
            fabric, may_be_link = life.fabric, life.state == "alive" and not life.link
            if fabric is not None and may_be_link and now - fabric.heard_at >= timing.suspect_after_s:
                silent[node] = (life, fabric)
        standing = [n for n, life in watched.items() if life.is_heard_on_fabric(now, timing.suspect_after_s)]
        lasting = [n for n, (_, fabric) in silent.items() if now - fabric.heard_at >= timing.fabric_dead_after_s]
        if len(silent) > timing.max_condemned or not standing:
            self._doubt(lasting, standing, found)
            return
        self._doubts_itself = False
        for node, (life, fabric) in silent.items():
            self._probe(node, fabric, now, found)
            if node in lasting:
                self._judge(node, life, fabric, now - fabric.heard_at, found)

    def _doubt(self, lasting: list[str], standing: list[str], found: Judgement) -> None:
        if lasting and not self._doubts_itself:
            self._doubts_itself = True
            heard = f"only {names(standing)} is heard" if standing else "nobody is heard"
            found.notes.append(
                Note(
                    "", f"no MPI heartbeats of {names(lasting)}, {heard}: more likely our own watch, no link is judged"
                )
            )

    def _judge(self, node: str, life: Life, fabric: Path, silent_s: float, found: Judgement) -> None:
        silence = f"no MPI heartbeat for {silent_s:.2f} s{f' ({fabric.ended})' if fabric.ended else ''}"
        others = names(fabric.witnesses)
        if fabric.concluded == FAILED:
            life.link = "dead"
            reason = f"fabric link lost: {silence}, the control path answers, {others} cannot reach it over the fabric"
            found.verdicts.append(Verdict(node, life.incarnation, "dead", reason, "link", silent_s))
        elif fabric.concluded == REACHED:
            text = f"{silence}, but {others} can reach it over the fabric: MPI is at fault there, not the link"
            fabric.say(REACHED, Note(node, text), found)
        elif fabric.num_rounds > 1:
            text = f"{silence}, and nobody could look over the fabric: nothing is concluded"
            fabric.say("unknown", Note(node, text), found)
