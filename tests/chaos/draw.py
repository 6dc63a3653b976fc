"""Draws cases. The same seed, index, attempt and table of layouts give the same case."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from tests.chaos.case import SOURCE, After, AtPlace, Case, Fault, OnMessage, Together
from tests.runtime.layouts import recovery_faults
from tests.runtime.layouts.layout import Layout
from tests.runtime.layouts.program import PLACES

STEPS = 6
SPAN_S = 0.3  # about as long as those steps take
_OWN_PLACES = {  # of the layouts of a module
    "zero1": ("amid-optimizer",),
    "muon": ("amid-optimizer",),
    "pipelines": ("micro-1", "micro-2"),
}
_STOPS = 0.2  # share of faults that stop the victim instead of killing it
_MESSAGES = ("WorkerReported", "KeyPosted", "WorkerFormed", "WorkerRestored")


def draw(seed: int, index: int, attempt: int, table: Mapping[str, Layout]) -> Case:
    """A layout without replicas is drawn less often, because whatever hits it is refused, and one that is compiled,
    because it takes ten times as long."""
    rng = random.Random(f"{seed}:{index}:{attempt}")
    names = sorted(table)
    (name,) = rng.choices(names, [_weight(table[name]) for name in names])
    world_size = rng.choice(table[name].sizes)
    places = places_of(table[name])
    faults = [_first(rng, world_size, places)]
    for _ in range(rng.choices((0, 1, 2), (0.45, 0.35, 0.2))[0]):
        faults.append(_further(rng, world_size, places, faults))
    return Case(
        name,
        world_size,
        tuple(dict.fromkeys(faults)),
        patience_s=rng.choice((0.0, 0.05, 2.0)),
        gather_s=rng.choice((0.0, 0.0, 0.02)),
        seed=seed,
        index=index,
        attempt=attempt,
    )


def _weight(layout: Layout) -> float:
    if not layout.is_protected:
        return 0.1
    return 0.25 if layout.name.endswith("compiled") else 1.0


def places_of(layout: Layout) -> tuple[str, ...]:
    """Where a step of this layout can be hit from within."""
    return (*PLACES, "end-of-optimizer", *2 * _OWN_PLACES.get(layout.module, ()))


def _how(rng: random.Random) -> str:
    return "stop" if rng.random() < _STOPS else "kill"


def _first(rng: random.Random, world_size: int, places: Sequence[str]) -> Fault:
    victim = rng.randrange(world_size)
    if rng.random() < 0.25:
        return Fault(victim, After(round(rng.uniform(0, SPAN_S), 4)), _how(rng))
    return Fault(victim, AtPlace(rng.randrange(STEPS), rng.choice(places)), _how(rng))


def _further(rng: random.Random, world_size: int, places: Sequence[str], faults: Sequence[Fault]) -> Fault:
    first = faults[0]
    other = (first.victim + rng.randrange(1, world_size)) % world_size
    kind = rng.choice(("together", "same place", "target", "source", "bystander", "later", "whenever"))
    match kind, first.when:
        case "together", _:
            return Fault(other, Together(first.victim), _how(rng))
        case "same place", AtPlace():
            return Fault(other, first.when, _how(rng))
        case "target", _:
            place = rng.choice(("init", "join", *recovery_faults.PLACES[:2], "receiving", *_MESSAGES))
            if place in _MESSAGES:
                return Fault(first.victim, OnMessage(place, first.victim), _how(rng))
            return Fault(first.victim, AtPlace(-1, place, life=2), _how(rng))
        case "source", _:
            place = rng.choice(("sending", "PlanPublished", "KeyPosted"))
            if place == "sending":
                return Fault(other, AtPlace(-1, place), _how(rng))
            return Fault(SOURCE, OnMessage(place, first.victim), _how(rng))
        case "bystander", _:
            place = rng.choice((*recovery_faults.PLACES[:2], *_MESSAGES[::2], "WorkerRestored"))
            if place in _MESSAGES:
                return Fault(other, OnMessage(place, other), _how(rng))
            return Fault(other, AtPlace(-1, place), _how(rng))
        case "later", AtPlace(step=step) if step < STEPS - 1:
            victim = rng.randrange(world_size)
            life = 2 if victim == first.victim else 1
            return Fault(victim, AtPlace(rng.randrange(step + 1, STEPS), rng.choice(places), life), _how(rng))
        case _:
            return Fault(other, After(round(rng.uniform(0, 2 * SPAN_S), 4)), _how(rng))
