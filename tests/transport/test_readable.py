from __future__ import annotations

import os
import resource
import socket

import pytest

from flashrec.transport.readable import await_readable


def test_who_can_be_read_is_told() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert await_readable([one, other], 0.01) == []
        one.sendall(b"x")
        assert await_readable([one, other], None) == [other]


def test_an_end_is_something_to_read() -> None:
    read, write = os.pipe()
    os.close(write)
    assert await_readable([read], 10) == [read]
    os.close(read)


def test_descriptors_may_have_any_number() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1100:
        pytest.skip("this user may not open 1100 files")
    read, write = os.pipe()
    high = os.dup2(read, 1090)
    os.write(write, b"x")
    assert await_readable([high], 10) == [high]
    for descriptor in (read, write, high):
        os.close(descriptor)
