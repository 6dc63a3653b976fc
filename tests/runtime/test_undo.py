"""Undoing an update, and when its vote is cast: in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flashrec.runtime.agreement import digest
from flashrec.runtime.errors import NotUnblockable
from flashrec.runtime.inplace import InPlaceEngine
from flashrec.runtime.parallel.zero import counterparts
from flashrec.runtime.progress import Progress
from flashrec.runtime.step import Stage, StepGuard
from flashrec.runtime.torch_private import optim
from flashrec.runtime.undo import Undo
from flashrec.runtime.update import WATCHED_UPDATES, Update

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "adamw foreach amsgrad": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True, amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "no state": lambda params: torch.optim.SGD(params, lr=0.1),
    "lists and functions of old gradients": lambda params: torch.optim.LBFGS(params, lr=0.1),
    "factored": lambda params: torch.optim.Adafactor(params, lr=0.1),
}


def made(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    return model, OPTIMIZERS[kind](model.parameters())


def update(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)
    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(lambda: torch.tensor(1.0 / (number + 1)))
    else:
        optimizer.step()


def content(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    torch.set_printoptions(precision=10, threshold=10_000)
    return repr([*model.parameters(), optimizer.state_dict()])


@pytest.mark.parametrize("num_done", [0, 1, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_update_that_is_undone_and_done_again_is_as_if_done_once(kind: str, num_done: int) -> None:
    model, optimizer = made(kind)
    undo = Undo([optimizer])
    for number in range(num_done):
        undo.take(number)
        update(model, optimizer, number)
    before = content(model, optimizer)
    undo.take(num_done)
    update(model, optimizer, 77)  # as if cut: something else than what is right
    assert content(model, optimizer) != before
    undo.restore()
    assert content(model, optimizer) == before
    update(model, optimizer, 78)
    undo.restore()  # a second fence
    assert content(model, optimizer) == before
    update(model, optimizer, num_done)
    twin, twins = made(kind)
    for number in range(num_done + 1):
        update(twin, twins, number)
    assert content(model, optimizer) == content(twin, twins)


class Restless(torch.optim.SGD):
    """Puts new tensors in place of old ones, counts with plain numbers, drops and adds entries."""

    def step(self, closure: Any = None) -> None:
        for param in (p for group in self.param_groups for p in group["params"]):
            state = self.state[param]
            state["count"] = state.get("count", 0) + 1
            state["slot"] = param.grad + state.get("slot", torch.zeros(())) * state["count"]
            state.pop(f"only {state['count'] - 1}", None)
            state[f"only {state['count']}"] = [torch.ones(2) * state["count"], "text"]
            param.data = param.data - 0.1 * state["slot"]


def test_entries_that_an_update_replaces_adds_or_drops_come_back() -> None:
    model = nn.Linear(3, 2)
    optimizer = Restless(model.parameters(), lr=0.1)
    undo = Undo([optimizer])
    update(model, optimizer, 0)
    before = content(model, optimizer)
    undo.take(1)
    for number in (1, 2):
        update(model, optimizer, number)
    undo.restore()
    assert content(model, optimizer) == before


def test_the_copy_reuses_its_memory_and_says_its_size(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "flashrec.runtime")
    model, optimizer = made("adamw")
    undo = Undo([optimizer])
    num_params = sum(param.numel() for param in model.parameters())
    undo.take(0)
    assert undo.num_bytes == 4 * num_params
    update(model, optimizer, 0)
    undo.take(1)
    assert undo.num_bytes == 4 * (3 * num_params + 4)  # two moments, and a counter for each of four tensors
    addresses = [copy.data_ptr() for copy in undo._copies]
    undo.take(2)
    assert [copy.data_ptr() for copy in undo._copies] == addresses
    assert [record.getMessage() for record in caplog.records] == [
        f"before each update, parameters and optimizer state are copied: {size} bytes more on cpu"
        for size in (4 * num_params, undo.num_bytes)
    ]


def test_half_a_copy_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = made("adamw")
    undo = Undo([optimizer])
    undo.take(0)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(optim, "foreach_copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        undo.take(1)
    assert undo.step == -1


# ---- when the vote is cast


class Collectives:
    """Stands for the process groups: how many were issued, and whether old ones have ended."""

    def __init__(self, drain: Callable[[], None] = lambda: None) -> None:
        self.issued, self.drain = 0, drain

    def make(self, optimizer: torch.optim.Optimizer, communicates: bool | None) -> Update:
        return Update([optimizer], communicates, lambda: self.issued, self.drain)

    def run(self, found: Update, step: int, num: int) -> None:
        found.begin(step)
        self.issued += num
        found.end()


def test_who_communicates_is_seen_and_switched(caplog: pytest.LogCaptureFixture) -> None:
    groups = Collectives()
    found = groups.make(made("adamw")[1], None)
    groups.run(found, 0, 0)
    assert not found.votes_after and not caplog.text
    groups.run(found, 1, 4)
    assert found.votes_after
    assert "4 collectives" in caplog.text and "optimizer_communicates=True" in caplog.text
    assert not found.can_undo(1)
    groups.run(found, 2, 4)
    assert found.can_undo(2) and not found.can_undo(1)


def test_only_the_first_updates_are_watched() -> None:
    groups = Collectives()
    found = groups.make(made("adamw")[1], None)
    for step in range(WATCHED_UPDATES):
        groups.run(found, step, 0)
    groups.run(found, WATCHED_UPDATES, 9)
    assert not found.votes_after


@pytest.mark.parametrize("said", [False, True])
def test_what_the_script_says_counts(said: bool) -> None:
    groups = Collectives()
    found = groups.make(made("adamw")[1], said)
    groups.run(found, 0, 4 * (not said))
    assert found.votes_after is said


def test_a_replacement_takes_over_what_its_source_has_seen() -> None:
    source, target = (Collectives().make(made("adamw")[1], communicates) for communicates in (True, None))
    target.begin(5)
    target.impose(source.describe())
    assert target.votes_after


def test_only_the_update_of_the_step_that_is_done_again_is_undone() -> None:
    model, optimizer = made("adamw")
    drained: list[str] = []
    found = Collectives(lambda: drained.append(content(model, optimizer))).make(optimizer, True)
    before = content(model, optimizer)
    found.begin(4)
    update(model, optimizer, 0)
    after = content(model, optimizer)
    found.settle_for(5)  # all have finished step 4
    assert content(model, optimizer) == after and not drained
    found.settle_for(4)
    assert content(model, optimizer) == before
    assert drained == [after], "first the end of what may still write, then the undo"
    update(model, optimizer, 1)
    found.impose(True)  # this rank is given the state of another one
    received = content(model, optimizer)
    found.settle_for(4)
    assert content(model, optimizer) == received


def test_the_former_groups_are_waited_for_but_not_for_ever() -> None:
    """What is queued in a gloo backend ends before its destructor returns, which runs in a thread."""
    engine, may_end = InPlaceEngine.__new__(InPlaceEngine), threading.Event()
    engine._disposing = [threading.Thread(target=may_end.wait)]
    engine._disposing[0].start()
    with pytest.raises(NotUnblockable, match="have not ended"):
        engine.drain(0.01)
    may_end.set()
    engine.drain(60)
    assert not engine._disposing[0].is_alive()


@pytest.mark.parametrize(
    ("communicates", "voted", "is_torn"),
    [
        (True, 3, False),  # cut in its update, which is undone
        (True, 4, True),  # the vote was left without the plan: it may count, and may not
        (False, 4, True),
    ],
)
def test_which_cut_update_tears(communicates: bool, voted: int, is_torn: bool) -> None:
    guard = StepGuard.__new__(StepGuard)
    guard._stage, guard._step = Stage.UPDATING, 4
    guard._update = Collectives().make(made("adamw")[1], communicates)
    guard._worker = SimpleNamespace(progress=Progress(0, 1, 1, v=4, voted=voted))  # type: ignore[assignment]
    guard._update.begin(4)
    assert bool(guard._torn_by(RuntimeError("gloo"))) is is_torn


# ---- do replicas hold the same


def test_a_digest_sees_every_bit_and_which_state_there_is() -> None:
    def found(*changes: Any) -> int:
        model, optimizer = made("adamw")
        update(model, optimizer, 0)
        for change in changes:
            change(model, optimizer.state[model[1].weight])
        return digest(model.parameters(), [optimizer])

    same = found()
    assert same == found()
    changes: list[Any] = [
        lambda model, _: model[0].bias.data.view(torch.int32)[3].add_(1),
        lambda _, state: state["exp_avg"].view(torch.int32)[0, 0].add_(1),
        lambda _, state: state["step"].add_(1),
        lambda _, state: state.pop("exp_avg_sq"),
        lambda _, state: state.update(count=1),
    ]
    assert len({same, *map(found, changes)}) == 1 + len(changes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.complex64, torch.int8])
def test_a_digest_of_any_dtype(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 5, dtype=dtype)
    other = tensor.clone()
    other[1, 2] = 0
    assert digest([tensor.T], []) == digest([tensor.clone().T], []) != digest([other.T], [])


def test_a_digest_of_what_is_no_plain_tensor() -> None:
    optimizer = made("adamw")[1]
    param = optimizer.param_groups[0]["params"][0]
    optimizer.state[param]["sparse"] = torch.eye(3).to_sparse()
    found = digest([], [optimizer])
    optimizer.state[param]["sparse"] = torch.eye(4).to_sparse()
    assert digest([], [optimizer]) != found


# ---- where ZeRO has put what


@pytest.mark.parametrize(
    ("group", "rank", "world_size", "expected"),
    [
        ((0, 1, 2, 3), 2, 4, (2,)),  # over all
        ((2, 3), 3, 4, (1, 3)),
        ((1, 3), 3, 4, (2, 3)),  # the columns of a mesh
        ((0, 2), 0, 8, (0, 1, 4, 5)),  # the middle dimension of three
        ((5,), 5, 8, (0, 1, 2, 3, 4, 5, 6, 7)),  # spread over nobody
        ((1, 2), 1, 4, (1,)),  # such groups do not make up a whole
        ((0, 1, 3), 0, 6, (0,)),
        ((0, 1, 2), 0, 8, (0,)),
    ],
)
def test_counterparts(group: tuple[int, ...], rank: int, world_size: int, expected: tuple[int, ...]) -> None:
    assert counterparts(group, rank, world_size) == expected
