"""Which engine a process gets, and what it says when torch does not fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flashrec.runtime import environment, nccl
from flashrec.runtime.errors import UnsupportedTorch
from flashrec.runtime.inplace import InPlaceEngine
from flashrec.runtime.native import NativeEngine, Rendezvous, choose
from flashrec.runtime.torch_private import reconfigure, versions
from tests.runtime.test_parts import FULL

RECONFIGURES = versions.current() >= versions.RECONFIGURES


def test_the_engine_follows_torch() -> None:
    assert choose("") is (NativeEngine if RECONFIGURES else InPlaceEngine)
    assert choose("inplace") is InPlaceEngine


def test_an_older_torch_has_no_native_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "current", lambda: (2, 13))
    assert choose("") is InPlaceEngine
    with pytest.raises(UnsupportedTorch, match=r"FLASHREC_ENGINE=native needs torch 2\.14"):
        choose("native")


def test_what_the_native_engine_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "current", lambda: (2, 14))
    monkeypatch.setattr(versions, "_has", lambda owner, name: name not in ("ReconfigureOptions", "reconfigure"))
    for wanted in ("", "native"):
        with pytest.raises(UnsupportedTorch, match=r"lacks ReconfigureOptions, reconfigure; .* torch >=2\.13,<2\.15"):
            choose(wanted)


def test_this_torch_has_what_it_should() -> None:
    assert reconfigure.is_there() is RECONFIGURES


def test_engines_that_there_are_not() -> None:
    with pytest.raises(environment.BadEnvironment, match="FLASHREC_ENGINE='nativ' is not known"):
        environment.read(FULL | {"FLASHREC_ENGINE": "nativ"})
    with pytest.raises(environment.BadEnvironment, match="FLASHREC_INTERRUPT_SIGNAL: 'USR2' is no signal"):
        environment.read(FULL | {"FLASHREC_INTERRUPT_SIGNAL": "USR2"})


def test_nccl2_is_refused_without_a_gpu() -> None:
    group: Any = SimpleNamespace(name="0")
    with pytest.raises(RuntimeError, match="group 0 asks for nccl2, but this torch has no NCCL or sees no GPU"):
        nccl.build_native(group, Rendezvous())


def test_a_backend_asks_no_store_before_it_is_connected() -> None:
    with pytest.raises(RuntimeError, match="not connected yet"):
        Rendezvous().get("x")
