"""The encoding of small state: everything it promises comes back, everything else is named and refused."""

from __future__ import annotations

import copy
import enum
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrec.runtime import codec
from flashrec.runtime import seed as seeds
from flashrec.runtime.errors import CannotEncode
from flashrec.runtime.snapshot import freeze, is_equal

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.integers() | st.text() | st.tuples(st.integers(), st.text()) | st.none()
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(values)
def test_what_is_encoded_comes_back_with_its_types(value: object) -> None:
    found = codec.decode(codec.encode(value, "value"))
    assert is_equal(found, value) and repr(found) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6).reshape(2, 3),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.tensor([True, False]),
        np.arange(6, dtype="<i2").reshape(3, 2),
        np.float64(0.1),
        np.array(["a", "bc"]),
    ],
    ids=str,
)
def test_tensors_and_arrays(value: object) -> None:
    found = codec.decode(codec.encode({"x": value}, "value"))["x"]
    assert type(found) is type(value) and found.dtype == value.dtype
    assert found.shape == value.shape and bool((found == value).all())


def test_other_types() -> None:
    value = [
        Counter({3: 2}), defaultdict(int, {"a": 1}), deque([1, 2], 5), {1, 2}, frozenset("ab"), 1 << 200, -(1 << 63),
        complex(1, -2), torch.Size([2, 3]), torch.float16, torch.device("cpu"), bytearray(b"x"), float("inf"),
    ]  # fmt: skip
    found = codec.decode(codec.encode(value, "value"))
    assert found == value and [type(a) for a in found] == [type(a) for a in value]
    assert found[1].default_factory is int and found[2].maxlen == 5


def test_real_state() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    for scheduler in (
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2]),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    ):
        state = scheduler.state_dict()
        assert is_equal(codec.decode(codec.encode(state, "scheduler")), state)
    state = seeds.state() | {"generator": np.random.default_rng(1).bit_generator.state}  # has a 128-bit integer
    assert is_equal(codec.decode(codec.encode(state, "random")), state)


class Colour(enum.Enum):
    RED = 1


class MyList(list):
    pass


@pytest.mark.parametrize(
    "value", [object(), len, Colour.RED, MyList(), np.array([object()]), torch.ones(1).to_sparse()]
)
def test_what_cannot_be_encoded_is_named(value: object) -> None:
    with pytest.raises(CannotEncode, match=r"state\['sched'\]\['a'\]\[1\] is a .* not sent to a replacement"):
        codec.encode({"a": [0, value]}, "state['sched']")


def test_a_state_that_contains_itself() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(CannotEncode, match="nested more than"):
        codec.encode(value, "loop")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        codec._encoder.encode(["os.system", "x"]),
        codec._encoder.encode({"a": 1}),
        codec._encoder.encode(["ndarray", "|O", [1], b"12345678"]),
        codec._encoder.encode([]),
    ],
)
def test_what_is_not_ours_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        codec.decode(data)


def test_large_tensors_go_aside() -> None:
    """An average of the weights is as large as the model: it travels like the model's tensors, not in the manifest."""
    large, small = torch.randn(300, 300), torch.randn(3)
    value = {"module.weight": large, "n": torch.tensor(4), "more": [small, (large.t(), 1)]}
    aside: list[torch.Tensor] = []
    data = codec.encode(value, "x", aside)
    assert len(data) < 1000
    assert [tensor.data_ptr() for tensor in aside] == [large.data_ptr()] * 2, "no copies"
    found = codec.decode(data, [tensor.clone() for tensor in aside])
    assert torch.equal(found["module.weight"], large)
    assert torch.equal(found["more"][1][0], large.t())
    with pytest.raises(ValueError, match="not an encoded value"):
        codec.decode(data)


@pytest.mark.parametrize("value", [{"a": 1, "b": [2, 3]}, {"a": {"b": (1, [2])}}, {"a": [1, {"b": torch.ones(2)}]}])
def test_what_is_frozen_does_not_follow_its_original(value: dict[str, Any]) -> None:
    frozen, before = freeze(value), copy.deepcopy(value)
    assert is_equal(frozen, value)
    for container in (value, *value.values()):
        if isinstance(container, dict):
            container["new"] = 1
        elif isinstance(container, list):
            container.append(1)
    inner = value["a"]["b"][1] if isinstance(value["a"], dict) else None
    if inner is not None:
        inner.append(1)
    assert is_equal(frozen, before) and not is_equal(frozen, value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": 1.0}), ({"a": 1}, {"a": True}), ({"a": [1]}, {"a": [2]}), ({"a": (1,)}, {"a": [1]}),
        ({"a": 1}, {"b": 1}), ({"a": {"b": 1}}, {"a": {"b": 2}}), ([1, 2], [1]), ([1, 2], [1, 3]),
    ],
)  # fmt: skip
def test_what_is_not_the_same_is_not_equal(one: Any, other: Any) -> None:
    assert not is_equal(one, other) and not is_equal(other, one)
