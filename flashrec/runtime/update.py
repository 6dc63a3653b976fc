"""The update of a step: whether its vote is cast before or after it, and how one that was cut is undone.

    before   the update is local: whoever has passed the vote can finish it alone, so nothing need be undone.
    after    the update communicates (ZeRO, Muon over several ranks): it cannot be finished once a rank is lost. All
             finish it, then all vote. If nobody alive has passed, everybody undoes it and does the step again; if
             somebody has, everybody has finished it and has nothing left to do.

Said by Session(optimizer_communicates=…), known of ZeroRedundancyOptimizer, else seen: who issues collectives in one of
the first updates of its life is switched to 'after', and a replacement takes that over from its source. Ranks may
differ: a vote that somebody has passed says of each rank that it can reach the next step on its own, either way.

See docs/decisions/0024-vote-after-updates-that-communicate.md.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashrec.runtime.parallel import zero
from flashrec.runtime.timeline import logger
from flashrec.runtime.undo import Undo

WATCHED_UPDATES = 3  # of each life


class Update:
    """Also a `flashrec.runtime.parallel.part.Part`: an update that was cut is undone when the step is settled for."""

    name = "update"

    def __init__(
        self,
        optimizers: list[torch.optim.Optimizer],
        communicates: bool | None,
        num_issued: Callable[[], int],
        drain: Callable[[], None],
    ) -> None:
        """communicates: None to find out. num_issued: collectives of this rank so far. drain: returns when no
        operation of an older generation can write any more."""
        self._undo = Undo(optimizers)
        self._num_issued, self._drain = num_issued, drain
        is_known = any(map(zero.is_zero, optimizers))
        self.votes_after = is_known if communicates is None else communicates  # the vote of a step follows its update
        self._num_watched = 0 if communicates is None else WATCHED_UPDATES
        self._issued_before = 0

    @property
    def rigid(self) -> str:
        """Why this optimizer cannot go on in a world of another size; '': it can."""
        return "optimizer.step() communicates, so its state may follow the world size" if self.votes_after else ""

    def begin(self, step: int) -> None:
        """The first optimizer of `step` is about to change something."""
        if self.votes_after:
            self._undo.take(step)
        elif self._num_watched < WATCHED_UPDATES:
            self._issued_before = self._num_issued()

    def end(self) -> None:
        """The last optimizer of the step has returned."""
        if self.votes_after or self._num_watched >= WATCHED_UPDATES:
            return
        self._num_watched += 1
        num_collectives = self._num_issued() - self._issued_before
        if num_collectives > 0:
            self.votes_after = True
            logger.warning(
                "optimizer.step() has issued %d collectives. From the next step on its updates are copied before and "
                "voted on after, so that one which is cut can be undone. Say Session(…, optimizer_communicates=True) "
                "to have the first update protected, too; False if its ranks never wait for each other in it",
                num_collectives,
            )

    def can_undo(self, step: int) -> bool:
        """True once everything that the update of `step` may change is copied."""
        return self._undo.step == step

    # ---- as a part

    def settle_for(self, step: int) -> None:
        """Undo the update of `step` if there was one: it did not count."""
        if self._undo.step == step:
            self._drain()
            self._undo.restore()

    def describe(self) -> bool:
        return self.votes_after

    def impose(self, is_after: bool) -> None:
        self.votes_after = is_after
        self._undo.forget()

    def complete(self) -> None:
        """What was cut is undone, so nothing is owed."""
