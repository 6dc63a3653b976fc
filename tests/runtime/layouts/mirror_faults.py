"""Places inside the shipping of a mirror, at which either end can be hit: half of the state of a step is on its way.

    shipping: at the rank whose state it is      holding: at its holder

The step of a fault is that at whose start the state is.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from flashrec.runtime.mirrors import holder, shipping
from tests.runtime.layouts.recovery_faults import _halved

PLACES = ("shipping", "holding")


def install(visit: Callable[[int, str], None]) -> None:
    """Let `visit(step, place)` be called at each of the places of this process."""
    send_all, receive_all = shipping.send_all, holder.receive_all
    ship, take = shipping.Shipper._ship, holder.MirrorHolder._take
    step = {"shipping": -1, "holding": -1}

    def ship_and_note(self: Any, job: Any, *args: Any) -> None:
        step["shipping"] = job.copying.v
        ship(self, job, *args)

    def take_and_note(self: Any, connection: socket.socket, message: Any) -> None:
        step["holding"] = message.v
        take(self, connection, message)

    def halves(place: str, move: Callable[..., None]) -> Callable[..., None]:
        def move_in_two(connection: socket.socket, views: list[memoryview]) -> None:
            first, second = _halved(views)
            move(connection, first)
            visit(step[place], place)
            move(connection, second)

        return move_in_two

    shipping.Shipper._ship = ship_and_note  # type: ignore[method-assign]
    holder.MirrorHolder._take = take_and_note  # type: ignore[method-assign]
    shipping.send_all = halves("shipping", send_all)
    holder.receive_all = halves("holding", receive_all)
