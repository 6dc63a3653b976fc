"""What is registered as state: generators, and objects too large to be kept for each step."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from flashrec.runtime import codec
from flashrec.runtime.registered import LargeState, registered
from flashrec.runtime.snapshot import Snapshot

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(3), lambda g: torch.rand(2, generator=g).tolist()),
        (lambda: random.Random(3), lambda g: [g.random(), g.gauss(0, 1)]),
        (lambda: np.random.default_rng(3), lambda g: g.random(2).tolist()),
        (lambda: np.random.Generator(np.random.Philox(3)), lambda g: g.integers(9, size=3, dtype=np.int32).tolist()),
        (lambda: np.random.RandomState(3), lambda g: [g.rand(), g.randn()]),
    ],
)
def test_generators_are_sent_and_put_back(make: Callable[[], Any], draw: Callable[[Any], list[float]]) -> None:
    source, target = make(), make()
    draw(source)
    item, other = registered({"it": source, "other": target}).values()
    sent = codec.encode(item.state_dict(), "it")
    wanted = [draw(source), draw(source)]
    other.load_state_dict(codec.decode(sent))
    assert [draw(target), draw(target)] == wanted
    item.load_state_dict(codec.decode(sent))
    assert [draw(source), draw(source)] == wanted


def test_what_has_no_state_is_named() -> None:
    with pytest.raises(TypeError, match=r"state\['sampler'\] \(list\) has no state_dict"):
        registered({"sampler": []})


def average() -> tuple[AveragedModel, nn.Module, Snapshot, LargeState]:
    """A moving average of weights, 1.6 MB of them."""
    net = nn.Linear(640, 640)
    average = AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    snapshot = Snapshot(net, [optimizer], {"ema": average}, keeps_random_state=False)
    return average, net, snapshot, LargeState(snapshot)


def test_a_large_object_that_is_advanced_after_the_vote_is_in_order() -> None:
    ema, net, snapshot, large = average()
    for step in range(3):
        snapshot.take(step)
        large.check(step)
        ema.update_parameters(net)
        assert snapshot.left_behind() == []


def test_a_large_object_that_changes_before_the_vote_is_an_error() -> None:
    ema, net, snapshot, large = average()
    snapshot.take(4)
    ema.update_parameters(net)
    with pytest.raises(RuntimeError, match=r"step 4 has changed state\['ema'\] before optimizer.step\(\)"):
        large.check(4)


def test_a_large_object_that_was_left_behind_is_known_from_experience() -> None:
    """A collective between optimizer.step() and the average has failed."""
    ema, net, snapshot, _ = average()
    for step in range(2):
        snapshot.take(step)
        ema.update_parameters(net)
    snapshot.take(2)
    assert snapshot.left_behind() == ["ema"]
    snapshot.forget()
    assert snapshot.left_behind() == []


def test_an_average_is_restored_from_tensors_that_went_aside() -> None:
    ema, net, _, _ = average()
    other = copy.deepcopy(ema)
    with torch.no_grad():
        net.weight.add_(1)
    ema.update_parameters(net), ema.update_parameters(net)
    aside: list[torch.Tensor] = []
    sent = codec.encode(ema.state_dict(), "ema", aside)
    other.load_state_dict(codec.decode(sent, [tensor.clone() for tensor in aside]))
    for name, tensor in ema.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
