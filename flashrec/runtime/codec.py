"""A closed, safe encoding for small Python state: scheduler, scaler, sampler, hyper-parameters.

msgpack with one tagged pair per value that msgpack does not know: ["tuple", […]], ["dict", [[k, v], …]], ["tensor",
dtype, shape, bytes], … Nothing is unpickled, no class is looked up by name: what can come out is what is listed here.
"""

from __future__ import annotations

import enum
import functools
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from flashrec.runtime.errors import CannotEncode

ASIDE_BYTES = 1 << 16
_MAX_DEPTH = 100
_PLAIN_INT_BITS = 63
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder()


def encode(value: Any, name: str, aside: list[torch.Tensor] | None = None) -> bytes:
    """Bytes of `value`. aside: gets the large tensors (as they are, no copies), which then are not among the bytes.
    Raises CannotEncode that says where in `name` the value is that we do not send."""
    return _encoder.encode(_pack(value, name, 0, aside))


def decode(data: bytes, aside: Sequence[torch.Tensor] = ()) -> Any:
    """The value again. aside: the tensors that `encode` has put there. Raises ValueError when `data` is not ours."""
    try:
        return _unpack(_decoder.decode(data), aside)
    except (msgspec.MsgspecError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as err:
        raise ValueError(f"not an encoded value: {err}") from err


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without a copy."""
    if tensor.numel() == 0:
        return memoryview(b"")
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()  # which numpy calls a buffer varies by version
    return memoryview(array)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def dtype_of(name: str) -> torch.dtype:
    """Raises ValueError for a name that is no dtype."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch")
    return found


def _pack(value: Any, path: str, depth: int, aside: list[torch.Tensor] | None) -> Any:
    if depth > _MAX_DEPTH:
        raise CannotEncode(f"{path} is nested more than {_MAX_DEPTH} deep (does it contain itself?)")

    def items(values: Any) -> list[Any]:
        return [_pack(item, f"{path}[{i}]", depth + 1, aside) for i, item in enumerate(values)]

    def pairs(mapping: Any) -> list[Any]:
        return [
            [_pack(key, f"key of {path}", depth + 1, None), _pack(item, f"{path}[{key!r}]", depth + 1, aside)]
            for key, item in mapping.items()
        ]

    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if value.bit_length() <= _PLAIN_INT_BITS else ["int", str(value)]
    if kind in (bytes, bytearray):
        return [kind.__name__, bytes(value)]
    if kind is dict:
        return ["dict", pairs(value)]
    if kind in (OrderedDict, Counter):
        return [kind.__name__, pairs(value)]
    if kind is defaultdict and value.default_factory in (int, float, list, dict):
        return ["defaultdict", value.default_factory.__name__, pairs(value)]
    if kind in (list, tuple, set, frozenset):
        return [kind.__name__, items(sorted(value, key=repr) if kind in (set, frozenset) else value)]
    if kind is deque:
        return ["deque", items(value), value.maxlen]
    if kind is torch.Size:
        return ["Size", list(value)]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind is torch.dtype:
        return ["dtype", dtype_name(value)]
    if kind is torch.device:
        return ["device", str(value)]
    if isinstance(value, torch.Tensor) and kind in (torch.Tensor, torch.nn.Parameter) and not value.is_sparse:
        if aside is not None and value.nbytes >= ASIDE_BYTES:
            aside.append(value.detach())
            return ["aside", len(aside) - 1]
        data = value.detach().cpu().contiguous()
        return ["tensor", dtype_name(data.dtype), list(data.shape), bytes(tensor_bytes(data))]
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray and not value.dtype.hasobject:
        return ["ndarray", value.dtype.str, list(value.shape), value.tobytes()]
    if numpy is not None and isinstance(value, numpy.generic) and not value.dtype.hasobject:
        return ["scalar", value.dtype.str, value.tobytes()]
    if isinstance(value, enum.Enum):
        hint = "store its value"
    elif callable(value):
        hint = "functions are code, not state: leave it out of state_dict()"
    else:
        hint = "return plain values, tensors or arrays from state_dict()"
    raise CannotEncode(f"{path} is a {kind.__module__}.{kind.__qualname__}, which is not sent to a replacement: {hint}")


def _unpack(value: Any, aside: Sequence[torch.Tensor]) -> Any:
    if not isinstance(value, list):
        if isinstance(value, dict):
            raise ValueError("a bare map is not ours")
        return value
    tag, *rest = value

    def unpack(item: Any) -> Any:
        return _unpack(item, aside)

    match tag:
        case "int":
            return int(rest[0])
        case "bytes":
            return bytes(rest[0])
        case "bytearray":
            return bytearray(rest[0])
        case "dict" | "OrderedDict" | "Counter":
            pairs = {unpack(key): unpack(item) for key, item in rest[0]}
            return {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}[tag](pairs)
        case "defaultdict":
            factory = {"int": int, "float": float, "list": list, "dict": dict}[rest[0]]
            return defaultdict(factory, ((unpack(key), unpack(item)) for key, item in rest[1]))
        case "list" | "tuple" | "set" | "frozenset":
            return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[tag](map(unpack, rest[0]))
        case "deque":
            return deque(map(unpack, rest[0]), rest[1])
        case "Size":
            return torch.Size(rest[0])
        case "complex":
            return complex(rest[0], rest[1])
        case "dtype":
            return dtype_of(rest[0])
        case "device":
            return torch.device(rest[0])
        case "aside":
            return aside[rest[0]]
        case "tensor":
            dtype, shape, data = rest
            flat = (
                torch.frombuffer(bytearray(data), dtype=dtype_of(dtype))
                if data
                else torch.empty(0, dtype=dtype_of(dtype))
            )
            return flat.reshape(shape)
        case "ndarray":
            import numpy

            return numpy.frombuffer(bytearray(rest[2]), dtype=_plain_dtype(rest[0])).reshape(rest[1])
        case "scalar":
            import numpy

            return numpy.frombuffer(rest[1], dtype=_plain_dtype(rest[0]))[0]
    raise ValueError(f"unknown tag {tag!r}")


def _plain_dtype(name: str) -> Any:
    import numpy

    dtype = numpy.dtype(name)
    if dtype.hasobject:
        raise ValueError(f"{name!r} would hold objects")
    return dtype
