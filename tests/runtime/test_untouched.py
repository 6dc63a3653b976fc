"""Parameters that are changed before the vote."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import flashrec
from flashrec.runtime.untouched import Untouched
from tests.runtime import programs

pytestmark = pytest.mark.torch


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def test_an_ordinary_step_leaves_parameters_alone_until_the_vote() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    untouched = Untouched(model, [optimizer])
    for step in range(3):
        untouched.open(step)
        model(torch.randn(8, 4)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        untouched.check(step)
        optimizer.step()
        optimizer.zero_grad()


def test_a_parameter_that_is_changed_before_the_vote_is_named() -> None:
    model = net()
    untouched = Untouched(model, [])
    untouched.open(3)
    model(torch.randn(8, 4)).sum().backward()
    with torch.no_grad():
        model[2].bias.clamp_(0, 1)
    with pytest.raises(RuntimeError, match=r"step 3 has changed 1 parameters, 2\.bias for one"):
        untouched.check(3)


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_an_unknown_optimizer_may_not_step_before_the_vote(kind: str) -> None:
    model, other = net(), net()
    known = torch.optim.AdamW(model.parameters())
    unknown = torch.optim.AdamW(model[2].parameters(), **{kind: True})
    unrelated = torch.optim.AdamW(other.parameters())
    untouched = Untouched(model, [known])
    untouched.open(3)
    (model(torch.randn(8, 4)).sum() + other(torch.randn(8, 4)).sum()).backward()
    unrelated.step()
    with pytest.raises(RuntimeError, match=r"AdamW is about to change 2\.weight before"):
        unknown.step()
    untouched.check(3)
    known.step()
    unknown.step()  # whatever comes after the vote is the script's business


def test_an_optimizer_of_the_session_may_not_step_inside_of_the_backward() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    untouched = Untouched(model, [optimizer])
    optimizer.register_step_pre_hook(lambda *_: untouched.check(0))  # as the session does
    model[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    untouched.open(0)
    with pytest.raises(RuntimeError, match=r"inside of the backward"):
        model(torch.randn(8, 4)).sum().backward()


def early(out: str) -> None:
    """An optimizer that steps as soon as a gradient is there."""
    programs.start()
    model = net()
    inner = torch.optim.SGD(model[2].parameters(), lr=0.1)
    model[2].bias.register_post_accumulate_grad_hook(lambda _: inner.step())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in flashrec.Session(model, optimizer).steps(2):
        with step:
            model(torch.randn(8, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def average_early(out: str) -> None:
    """An average of weights that is too large to be kept for each step, advanced before the optimizer."""
    programs.start()
    model = nn.Linear(640, 640)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in flashrec.Session(model, optimizer, state={"average": average}).steps(2):
        with step:
            model(torch.randn(8, 640)).sum().backward()
            average.update_parameters(model)
            optimizer.step()


def test_a_session_ends_when_a_step_advances_an_average_early(make_cluster: Any) -> None:
    cluster = make_cluster(1)
    cluster.start_all(average_early)
    assert cluster.await_exit(0) == 1
    assert "step 0 has changed state['average'] before optimizer.step()" in cluster.log(0)


def test_a_session_ends_when_a_step_changes_parameters_early(make_cluster: Any) -> None:
    cluster = make_cluster(1)
    cluster.start_all(early)
    assert cluster.await_exit(0) == 1
    assert "SGD is about to change 2.weight before the session's optimizer.step()" in cluster.log(0)
