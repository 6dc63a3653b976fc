"""A case: a layout, its size, and what is done to it. A plain value: printed as JSON, it can be played again."""

from __future__ import annotations

import msgspec

SOURCE = -1  # as a victim: the source of the first target in the recovery that the message belongs to


class AtPlace(msgspec.Struct, frozen=True, tag="at"):
    """From within, in one life of the victim: at a place of the script or (then step is -1) of the recovery."""

    step: int
    place: str
    life: int = 1


class After(msgspec.Struct, frozen=True, tag="after"):
    """From outside, so long after training has begun."""

    seconds: float


class OnMessage(msgspec.Struct, frozen=True, tag="message"):
    """From outside, when `sender` says this in a recovery (1 is the first), before it has an effect. 'PlanPublished'
    has no sender."""

    message: str
    sender: int
    recovery: int = 1


class Together(msgspec.Struct, frozen=True, tag="together"):
    """From outside, when the loss of this rank is seen, before anything is done about it."""

    rank: int


class Fault(msgspec.Struct, frozen=True):
    """how: 'kill' or 'stop'."""

    victim: int
    when: AtPlace | After | OnMessage | Together
    how: str = "kill"


class Case(msgspec.Struct, frozen=True):
    """seed, index and attempt are where it comes from."""

    layout: str
    world_size: int
    faults: tuple[Fault, ...]
    patience_s: float = 0.0  # how long a rank that stands still is left standing after the fence
    gather_s: float = 0.0  # between the first loss and the fence
    seed: int = -1
    index: int = -1
    attempt: int = 0

    @property
    def name(self) -> str:
        return f"{self.seed}:{self.index}" + (f":{self.attempt}" if self.attempt else "")


def to_json(case: Case) -> str:
    return msgspec.json.encode(case).decode()


def from_json(text: str) -> Case:
    """Raises msgspec.MsgspecError."""
    return msgspec.json.decode(text, type=Case)


def describe(fault: Fault) -> str:
    """In a few words."""
    match fault.when:
        case AtPlace(step=-1, place=place, life=life):
            when = f"at {place} in life {life}"
        case AtPlace(step=step, place=place, life=life):
            when = f"at {step} {place}" + (f" in life {life}" if life > 1 else "")
        case After(seconds=seconds):
            when = f"after {seconds:.3f} s"
        case OnMessage(message=message, sender=sender, recovery=recovery):
            when = f"on {message}" + (f" of {sender}" if message != "PlanPublished" else "")
            when += f" in recovery {recovery}" if recovery > 1 else ""
        case Together(rank=rank):
            when = f"together with {rank}"
    return f"{fault.how} {'the source' if fault.victim == SOURCE else fault.victim} {when}"
