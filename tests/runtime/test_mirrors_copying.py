"""What is copied when, in which way: with tensors that say that they are on an accelerator, and streams that write down
what is asked of them in which order."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flashrec.runtime.mirrors import copying as module
from flashrec.runtime.mirrors.copying import Copying
from flashrec.runtime.mirrors.slots import Slot
from flashrec.runtime.specs import TensorSpec
from flashrec.runtime.torch_private import optim

pytestmark = pytest.mark.torch
LARGE = module._GRAIN


class OnDevice(torch.Tensor):
    """Its bytes are here; it says that they are not."""

    is_cuda = True

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.index)


def on_device(index: int, size: int, value: float) -> OnDevice:
    made = torch.full((size,), value).as_subclass(OnDevice)
    made.index = index
    return made


class Held:
    """A state of the tensors that are given; names as in `TensorSpec`."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.specs = [
            TensorSpec(name.replace("_", " "), tuple(tensor.shape), "float32", "cpu")
            for name, tensor in tensors.items()
        ]
        self.tensors = list(tensors.values())
        self.slot = Slot()

    def describe(self, v: int, parts: dict[str, bytes]) -> Any:
        return SimpleNamespace(), self.specs, self.tensors

    def copy(self) -> Copying:
        state: Any = self
        return Copying(state, 7, {}, self.slot)

    def copied(self) -> list[float]:
        """The first element of each tensor in the slot."""
        return [float(view.reshape(-1)[0]) for view in self.slot._places.views]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is copied, and what streams are asked, in this order."""
    told: list[str] = []
    foreach, copyto, within = optim.foreach_copy, np.copyto, list[str]()

    class Event:
        def record(self, stream: str) -> None:
            self.stream = stream
            told.append(f"record on {stream}")

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def wait_event(self, event: Event) -> None:
            told.append(f"{self.device} waits for {event.stream}")

        def synchronize(self) -> None:
            told.append(f"{self.device} is awaited")

    @contextmanager
    def stream(of: Stream) -> Any:
        within.append(str(of.device))
        yield
        within.pop()

    def note(into: list[torch.Tensor], values: list[torch.Tensor], *, non_blocking: bool) -> None:
        told.append(f"{len(values)} copied{' on ' + within[-1] if within else ''}, {non_blocking=}")
        foreach(into, [value.as_subclass(torch.Tensor) for value in values], non_blocking=non_blocking)

    def note_large(into: Any, value: Any) -> None:
        told.append("one copied alone")
        copyto(into, value)

    for name, value in (("Event", Event), ("Stream", Stream), ("stream", stream)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the training's on {device}")
    monkeypatch.setattr(module.optim, "foreach_copy", note)
    monkeypatch.setattr(module.np, "copyto", note_large)
    return told


def test_what_a_forward_changes_is_copied_before_it_and_the_rest_later(told: list[str]) -> None:
    held = Held(parameter_a=torch.full((3,), 1.0), buffer_b=torch.full((3,), 2.0), parameter_c=torch.full((3,), 3.0))
    copying = held.copy()
    assert held.copied() == [0, 2, 0] and told == ["1 copied, non_blocking=True"]
    held.tensors[1].fill_(9)
    copying.finish()
    assert held.copied() == [1, 2, 3] and told[1:] == ["2 copied, non_blocking=True"]


def test_on_an_accelerator_copies_wait_for_what_was_queued_and_are_awaited(told: list[str]) -> None:
    """Else what was not computed yet would be copied, or the slot would be called complete before it is."""
    held = Held(
        parameter_a=on_device(0, 3, 1.0), parameter_b=torch.full((3,), 2.0), parameter_c=on_device(1, LARGE, 3.0),
        parameter_d=on_device(0, 3, 4.0),
    )  # fmt: skip
    copying = held.copy()
    assert sorted(told) == [f"record on the training's on cuda:{index}" for index in range(2)]
    told.clear()
    copying.finish()
    assert held.copied() == [1, 2, 3, 4]
    of_each = {
        index: [
            f"cuda:{index} waits for the training's on cuda:{index}",
            f"{number} copied on cuda:{index}, non_blocking=True",
            f"cuda:{index} is awaited",
        ]
        for index, number in enumerate((2, 1))
    }
    assert told[-1:] == ["1 copied, non_blocking=True"]
    assert told[:-1] in ([*of_each[0], *of_each[1]], [*of_each[1], *of_each[0]])


def test_large_tensors_in_host_memory_are_copied_in_this_thread_alone(told: list[str]) -> None:
    """torch would use the threads of the training; smaller ones it copies in one, all in one call."""
    held = Held(parameter_a=torch.ones(LARGE), parameter_b=torch.ones(LARGE - 1), parameter_c=torch.ones(3))
    held.copy().finish()
    assert held.copied() == [1, 1, 1] and told == ["one copied alone", "2 copied, non_blocking=True"]
    told.clear()
    alone = Held(parameter_a=torch.full((LARGE,), 1.0))
    alone.copy().finish()
    assert told == ["one copied alone"], "and torch is not asked to copy nothing"


def test_a_large_tensor_that_lies_in_another_order_is_copied_as_it_reads(told: list[str]) -> None:
    """By torch: to copy its bytes as they lie they would have to be put in order elsewhere first."""
    wanted = torch.arange(float(LARGE)).reshape(2, -1)
    held = Held(parameter_a=wanted.t().contiguous().t())
    held.copy().finish()
    assert torch.equal(held.slot._places.views[0], wanted) and told == ["1 copied, non_blocking=True"]


@pytest.mark.parametrize("size", [3, LARGE])
def test_parameters_are_copied_as_what_they_are_and_let_go(size: int) -> None:
    """They require gradients, which the slot has none of; and who waits for the holder need not keep a model alive."""
    held = Held(parameter_a=torch.nn.Parameter(torch.full((size,), 1.0)), buffer_b=torch.ones(3, requires_grad=True))
    copying = held.copy()
    copying.finish()
    assert held.copied() == [1, 1] and not any(view.requires_grad for view in held.slot._places.views)
    kept = weakref.ref(held.tensors[0])
    held.tensors.clear()
    assert kept() is None
