"""What a session knows of worlds of other sizes: where the batches of this one begin, and whom to tell.

A *stretch* is training in a world of one size. It begins at a step, with some samples of an epoch read already
(`rest`). Where the stretch in force has begun is part of the training state, so a replacement gets it from its source,
and it is written beside each checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flashrec.runtime.data import Data
from flashrec.runtime.timeline import logger

Place = tuple[int, int]  # epoch, samples of it that all ranks have read
OnResize = Callable[[int, int], object]
STATE = "flashrec stretch"  # its name among the registered objects


class Stretches:
    """Of one session. See `snapshot.Stateful`."""

    def __init__(self) -> None:
        self._data: list[Data] = []
        self._callbacks: list[OnResize] = []
        self._step, self._former = 0, 0
        self._places: list[Place | None] = []

    def add_data(self, make: Callable[[Callable[[], tuple[int, int, int] | None]], Data]) -> Data:
        """make: gets what says where the batches begin."""
        number = len(self._data)
        data = make(lambda: self._begins(number))
        self._data.append(data)
        return data

    def close(self) -> None:
        """All steps are done."""
        for data in self._data:
            data.close()

    def add_callback(self, callback: OnResize) -> None:
        """Raises TypeError."""
        if not callable(callback):
            raise TypeError(f"session.on_resize(callback): {type(callback).__name__} cannot be called")
        self._callbacks.append(callback)

    def rigid(self) -> str:
        """Why the script cannot go on in a world of another size; '': it can."""
        if not self._data and not self._callbacks:
            return (
                "the script uses neither session.data nor session.on_resize, so nobody would deal its samples out anew"
            )
        return next((f"session.data: {why}" for data in self._data if (why := data.rigid())), "")

    def places(self, step: int) -> tuple[Place | None, ...]:
        """What of each data set was read before `step`."""
        return tuple(data.place(step) for data in self._data)

    def begin(self, step: int, former_size: int, places: Sequence[Sequence[int] | None]) -> None:
        """A stretch begins at `step`, after one in a world of `former_size` ranks."""
        if len(places) != len(self._data):
            raise RuntimeError(
                f"the former world read {len(places)} data sets, this one {len(self._data)}: call session.data() "
                "before session.steps(), and alike in a world of any size"
            )
        self._step, self._former = step, former_size
        self._places = [None if place is None else (int(place[0]), int(place[1])) for place in places]
        for data in self._data:
            data.forget()

    def tell(self, size: int) -> None:
        """Once what the former world has left is there: the script adapts it to this one, of `size` ranks."""
        logger.info("a world of %d ranks goes on as one of %d at step %d", self._former, size, self._step)
        for callback in self._callbacks:
            callback(self._former, size)

    def of_checkpoint(self, step: int, size: int, about: dict[str, Any]) -> None:
        """A checkpoint of `step` was loaded into this world of `size` ranks; about: what was written beside it."""
        if about.get("world_size") != size:
            if "places" in about:
                self.begin(step, int(about["world_size"]), about["places"])
                self.tell(size)
        elif "stretch" in about:
            self.load_state_dict(about["stretch"])

    def about(self, step: int) -> dict[str, Any]:
        """To be written beside a checkpoint of `step`."""
        return {"places": self.places(step), "stretch": self.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "former": self._former, "places": self._places}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state != self.state_dict():
            self._step, self._former = state["step"], state["former"]
            self._places = [None if place is None else (place[0], place[1]) for place in state["places"]]
            for data in self._data:
                data.forget()

    @property
    def former_size(self) -> int:
        return self._former

    def _begins(self, number: int) -> tuple[int, int, int] | None:
        place = self._places[number] if number < len(self._places) else None
        return None if place is None else (self._step, *place)
