"""There is room for a connection of each node, or the job is refused in words before it begins."""

from __future__ import annotations

import resource

import pytest

from flashrec.manager import descriptors
from flashrec.manager.descriptors import SPARE_DESCRIPTORS, make_room
from flashrec.manager.request import RequestError

ENDLESS = resource.RLIM_INFINITY


class Limits:
    """Stands for those of the process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> None:
        self.now = (soft, hard)
        monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: self.now)
        monkeypatch.setattr(descriptors.resource, "setrlimit", lambda _, now: setattr(self, "now", now))


@pytest.mark.parametrize(
    ("soft", "hard", "after"),
    [
        (1024, 4096, 1400 + SPARE_DESCRIPTORS),
        (1024, ENDLESS, 1400 + SPARE_DESCRIPTORS),
        (2000, 4096, 2000),
        (ENDLESS, ENDLESS, ENDLESS),
    ],
)
def test_the_limit_is_raised_as_far_as_needed(
    soft: int, hard: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(monkeypatch, soft, hard)
    make_room(1000, 400)
    assert limits.now == (after, hard)


def test_too_few_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(monkeypatch, 1024, 1100)
    with pytest.raises(RequestError, match="1100 files open and needs 1256 for 1000 nodes: raise the hard limit"):
        make_room(1000, 0)
    assert limits.now == (1024, 1100)
