"""Which device a parked process makes its context on. The device is a double: this was never run on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from flashrec.runtime import cuda_context


class Devices:
    """Stands for torch.cuda: notes where a context was made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, error: Exception | None = None) -> None:
        self.current, self.made, self.error = -1, list[int](), error
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "device", self.use)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)

    @contextlib.contextmanager
    def use(self, number: int) -> Iterator[None]:
        self.current = number
        yield
        self.current = -1

    def synchronize(self) -> None:
        if self.error is not None:
            raise self.error
        self.made.append(self.current)


@pytest.mark.parametrize(("count", "local_id", "device"), [(8, 3, 3), (8, 0, 0), (1, 0, 0), (1, 3, 0)])
def test_it_is_that_of_the_task(count: int, local_id: int, device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch, count)
    assert cuda_context.make(local_id) == ""
    assert devices.made == [device] and devices.current == -1


def test_a_task_without_a_device_of_its_own_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch, 2)
    assert cuda_context.make(2) == "task 2 of the node has no device of its own among 2"
    assert not devices.made


def test_an_error_of_the_driver_is_told_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch, 1, RuntimeError("CUDA error: out of memory"))
    assert cuda_context.make(0) == "RuntimeError('CUDA error: out of memory')"
    assert not devices.made


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_device_there_is_none() -> None:
    assert cuda_context.make(0) == "torch sees no CUDA device"
