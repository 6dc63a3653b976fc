"""Frames and messages: every message survives the wire, and nothing else gets through."""

from __future__ import annotations

import struct
import types
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashrec.core.ranks import FEW, Ranks, RankSet, compact
from flashrec.core.types import Assignment, Plan, Raised, Report
from flashrec.wire import frames, messages

UNIONS = {
    "to_manager": (messages.ToManager, frames.to_manager),
    "to_agent": (messages.ToAgent, frames.to_agent),
    "to_agent_from_worker": (messages.ToAgentFromWorker, frames.to_agent_from_worker),
    "to_worker": (messages.ToWorker, frames.to_worker),
}
INTEGERS = st.integers(-(2**63), 2**64 - 1)


def of_type(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a message's field; TypeError for a type that no message had so far."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if kind is Ranks:
        return st.sets(st.integers(0, 2**20), min_size=FEW + 1, max_size=FEW + 9).map(lambda r: compact(tuple(r)))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return st.builds(kind, **{f.name: of_type(f.type) for f in msgspec.structs.fields(kind)})
    simple = {
        int: INTEGERS, float: st.floats(allow_nan=False), bool: st.booleans(), bytes: st.binary(max_size=50),
        str: st.text(st.characters(exclude_categories=("Cs",)), max_size=50),
    }  # fmt: skip
    if kind is type(None):
        return st.none()
    if origin in (types.UnionType, typing.Union):
        return st.one_of(map(of_type, inside))
    if kind in simple:
        return simple[kind]
    if origin is tuple and inside[-1] is Ellipsis:
        return st.lists(of_type(inside[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(of_type, inside))
    if origin is dict:
        return st.dictionaries(of_type(inside[0]), of_type(inside[1]), max_size=3)
    raise TypeError(f"no strategy for {kind}")


EVERY = [(name, kind) for name, (union, _) in UNIONS.items() for kind in typing.get_args(union)]


@pytest.mark.parametrize(("channel", "kind"), EVERY, ids=lambda x: getattr(x, "__name__", x))
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_message_survives_the_wire(channel: str, kind: type, data: st.DataObject) -> None:
    message = data.draw(of_type(kind))
    (payload,) = frames.FrameReader().feed(frames.frame(frames.encode(message)))
    assert UNIONS[channel][1].decode(payload) == message


@given(payloads=st.lists(st.binary(max_size=40), max_size=6), cuts=st.lists(st.integers(0, 300), max_size=8))
def test_frames_come_out_whole_however_the_bytes_arrive(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(frames.frame, payloads))
    ends = sorted({min(cut, len(stream)) for cut in cuts} | {len(stream)})
    reader, out, start = frames.FrameReader(), [], 0
    for end in ends:
        out += reader.feed(stream[start:end])
        start = end
    assert out == payloads


def test_a_truncated_frame_is_not_a_frame() -> None:
    reader = frames.FrameReader()
    whole = frames.frame(b"abc")
    for cut in range(len(whole)):
        assert frames.FrameReader().feed(whole[:cut]) == []
    assert reader.feed(whole[:-1]) == []
    assert reader.feed(whole[-1:]) == [b"abc"]


def test_the_limit_is_checked_before_the_frame_is_there() -> None:
    reader = frames.FrameReader(max_frame_bytes=10)
    assert reader.feed(frames.frame(b"x" * 10)) == [b"x" * 10]
    with pytest.raises(frames.ProtocolError, match="11 bytes is over the limit of 10"):
        reader.feed(struct.pack("!I", 11))
    with pytest.raises(frames.ProtocolError, match="over the limit"):
        frames.FrameReader().feed(struct.pack("!I", frames.MAX_FRAME_BYTES + 1))


def test_we_do_not_send_what_peers_must_refuse() -> None:
    with pytest.raises(frames.ProtocolError, match="refusing to send"):
        frames.frame(b"x" * 11, max_frame_bytes=10)


@pytest.mark.parametrize("name", UNIONS)
@given(garbage=st.binary(max_size=200))
def test_garbage_is_the_fault_of_the_peer(name: str, garbage: bytes) -> None:
    try:
        UNIONS[name][1].decode(garbage)
    except frames.ProtocolError:
        return


DEEP = b"\x91" * 100_000 + b"\xc0"
BAD = [b"", b"\xc1", b"\xc0", frames.encode(messages.AgentBeat())[:-1], DEEP,
       b"\x82\xa1x" + DEEP + b"\xa4type\xa4Stop", b"\x82\xa4type\xa4Stop\xa6reason" + DEEP,
       b"\x82\xa4type\xa9AgentBeat\xa1x" + DEEP, b"\x82\xa4type\xa8WorkerBeat\xa1x" + DEEP, b"\x81\xa4type\xa4Nope",
       msgspec.msgpack.encode({"type": "Fence", "generation": "1", "reason": ""}),
       msgspec.msgpack.encode({"type": "Fence", "generation": 1}),
       b"\x82\xa4type\xa5Fence\xa6reason\xa2\xff\xfe"]  # fmt: skip


@pytest.mark.parametrize("payload", BAD, ids=range(len(BAD)))
@pytest.mark.parametrize("name", UNIONS)
def test_what_is_no_message_of_a_channel_is_refused(name: str, payload: bytes) -> None:
    if name == "to_worker" and payload == frames.encode(messages.AgentBeat()):
        return
    with pytest.raises(frames.ProtocolError):
        UNIONS[name][1].decode(payload)


@pytest.mark.parametrize("name", UNIONS)
def test_unions_are_closed(name: str) -> None:
    """A message that belongs to another direction is refused: a worker cannot speak as a manager."""
    union, decoder = UNIONS[name]
    others = {kind for other, _ in UNIONS.values() for kind in typing.get_args(other)} - set(typing.get_args(union))
    assert others
    for kind in others:
        fields = {f.name: _least(f.type) for f in msgspec.structs.fields(kind)}
        with pytest.raises(frames.ProtocolError):
            decoder.decode(frames.encode(kind(**fields)))


def test_words_are_left_out_of_the_search_for_cycles() -> None:
    """In a recovery there are tens of thousands of them, of every kind and of what is in them; all are plain values."""
    said = {kind for union, _ in UNIONS.values() for kind in typing.get_args(union)}
    inside = {Report, Raised, Plan, Assignment, Ranks}
    assert not [kind for kind in said | inside if kind.__struct_config__.gc]


def _least(kind: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(**{f.name: _least(f.type) for f in msgspec.structs.fields(kind)})
    if typing.get_origin(kind) is types.UnionType:
        return None  # `X | None`
    if kind == RankSet:
        return ()
    return (typing.get_origin(kind) or kind)()
