"""Places inside a recovery at which a worker can be hit from within, for what no message tells from outside.

    forming ─► (groups are built) ─► formed ─► sending: half of the first piece of tensors is on its way
                                            └► receiving: half of the first piece of tensors has come

A place is visited in every recovery of a life; a fault there has the step -1 and fires the first time.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

from flashrec.runtime.groups import Groups
from flashrec.runtime.transfer import source, target

PLACES = ("forming", "formed", "sending", "receiving")


def install(visit: Callable[[int, str], None]) -> None:
    """Let `visit(-1, place)` be called at each of the places of this process."""
    form, send_tensors, receive_tensors = Groups.form, source.send_piece, target.receive_piece
    send_all, receive_all = source.send_all, target.receive_all
    inside = threading.local()  # each connection has a thread

    def form_and_visit(self: Groups, *args: Any, **kwargs: Any) -> Any:
        visit(-1, "forming")
        result = form(self, *args, **kwargs)
        visit(-1, "formed")
        return result

    def note(place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            inside.place = place
            try:
                return function(*args, **kwargs)
            finally:
                inside.place = ""

        return noted

    def halves(place: str, move: Callable[..., None]) -> Callable[..., None]:
        def move_in_two(connection: socket.socket, views: list[memoryview]) -> None:
            if getattr(inside, "place", "") != place:
                return move(connection, views)
            first, second = _halved(views)
            move(connection, first)
            visit(-1, place)
            return move(connection, second)

        return move_in_two

    Groups.form = form_and_visit  # type: ignore[method-assign]
    source.send_piece = note("sending", send_tensors)
    target.receive_piece = note("receiving", receive_tensors)
    source.send_all = halves("sending", send_all)
    target.receive_all = halves("receiving", receive_all)


def _halved(views: list[memoryview]) -> tuple[list[memoryview], list[memoryview]]:
    """Cut in the middle of their bytes, which is usually in the middle of a tensor."""
    left = sum(map(len, views)) // 2
    for i, view in enumerate(views):
        if left <= len(view):
            return [*views[:i], view[:left]], [view[left:], *views[i + 1 :]]
        left -= len(view)
    return views, []
