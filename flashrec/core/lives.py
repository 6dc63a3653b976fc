"""What the detector knows of one life (incarnation) of an agent, and what it says of it. Plain records."""

from __future__ import annotations

import msgspec

from flashrec.core.probing import Probe, Round

CONTROL, FABRIC = "control", "fabric"


class Verdict(msgspec.Struct, frozen=True):
    """state: 'alive', 'suspect', 'dead' or 'left'; reason: for people and for the journal. kind: 'lost', 'slurm',
    'asked', or 'link': it is about the fabric link, and the agent lives. silent_s: the silence it was judged by (0.0:
    none)."""

    node: str
    incarnation: int
    state: str
    reason: str
    kind: str = "lost"
    silent_s: float = 0.0


class Note(msgspec.Struct, frozen=True):
    """Something worth saying once that is no verdict. node '': about our own watch."""

    node: str
    text: str


class Judgement(msgspec.Struct, frozen=True):
    """What one `Detector.tick` found. probes: to be asked of other nodes; their answers go to `Detector.probed`."""

    verdicts: list[Verdict]
    probes: list[Probe]
    notes: list[Note]


class Path(msgspec.Struct):
    """One way on which a node is heard. ended: why its session is down ('': it stands). concluded: what the newest
    conclusive round of probes found ('reached', 'failed' or ''), witnesses: by whom. num_rounds: in this
    silence. noted: what was said of it."""

    heard_at: float
    ended: str = ""
    round: Round | None = None
    num_rounds: int = 0
    concluded: str = ""
    witnesses: tuple[str, ...] = ()
    noted: str = ""

    def hear(self, now: float) -> None:
        """The silence is over, and with it all that was found out about it."""
        self.heard_at = max(self.heard_at, now)
        if self.round is not None or self.noted or self.ended:
            self.forget_probes()
            self.ended = self.noted = ""

    def forget_probes(self) -> None:
        self.round, self.num_rounds, self.concluded, self.witnesses = None, 0, "", ()

    def excuse(self, late_s: float, now: float) -> None:
        """We did not listen for `late_s`."""
        self.heard_at = min(now, self.heard_at + late_s)

    def say(self, what: str, note: Note, found: Judgement) -> None:
        """Say it once in a silence."""
        if self.noted != what:
            self.noted = what
            found.notes.append(note)


class Life(msgspec.Struct):
    """fabric None: not watched. link: '' (good, or not known), 'dead', or 'inherited': dead in its former life, and not
    said of this one yet. blamed: node -> when its workers last blamed this one."""

    incarnation: int
    control: Path
    state: str = "alive"
    fabric: Path | None = None
    link: str = ""
    blamed: dict[str, float] = {}

    @property
    def is_watched(self) -> bool:
        return self.state in ("alive", "suspect")

    def paths(self) -> tuple[Path, ...]:
        return (self.control,) if self.fabric is None else (self.control, self.fabric)

    def is_heard_on_fabric(self, now: float, within_s: float) -> bool:
        """Its MPI session stands, and a heartbeat came within the last `within_s` seconds."""
        return self.fabric is not None and not self.fabric.ended and now - self.fabric.heard_at < within_s


def names(nodes: tuple[str, ...] | list[str] | dict[str, float]) -> str:
    """For a reason."""
    return ", ".join(sorted(nodes))
