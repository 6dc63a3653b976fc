"""When a rank saves and loads: `checkpoint` seen from the step loop under `flashrec run`."""

from __future__ import annotations

from collections.abc import Callable

from flashrec.core import events
from flashrec.runtime import permit
from flashrec.runtime.checkpoint import Checkpoints
from flashrec.runtime.quiet import quiet
from flashrec.runtime.timeline import logger
from flashrec.runtime.worker import Worker

PERMIT_TIMEOUT_S = 30.0


class Keeper:
    """The checkpoints of one session, if it has any. is_fault: does a fence explain this exception."""

    def __init__(self, worker: Worker, is_fault: Callable[[BaseException], bool]) -> None:
        self._worker, self._is_fault = worker, is_fault
        self.checkpoints: Checkpoints | None = None

    def use(self, checkpoints: Checkpoints) -> None:
        worker = self._worker
        checkpoints.may_commit = lambda step: permit.ask(worker, step, PERMIT_TIMEOUT_S)
        checkpoints.kept = lambda step, how, took_s: worker.control.send(
            events.CheckpointKept(worker.rank, worker.env.incarnation, worker.progress.generation, step, how, took_s)
        )
        self.checkpoints = checkpoints

    def load(self) -> int | None:
        """On ranks that start together: the step of the checkpoint that all have loaded. None: there is none."""
        if self.checkpoints is None or self._worker.env.joins:
            return None
        with quiet(self._worker, "loading a checkpoint"):
            return self.checkpoints.load_newest()

    def save_if_due(self, step: int) -> bool:
        """Between two steps. False: a failure came; all ranks come here again in the next generation."""
        if self.checkpoints is None or not self.checkpoints.is_due(step):
            return True
        try:
            with quiet(self._worker, "checkpoint"):
                self.checkpoints.keep(step)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as err:  # torch.distributed.checkpoint raises one that is no Exception
            if not any(map(self._is_fault, reasons(err))):
                raise
            logger.warning("the checkpoint of step %d was cut by a failure: %s", step, err)
            return False
        return True


def reasons(error: BaseException) -> list[BaseException]:
    """The error itself; of torch.distributed.checkpoint what it has gathered from the ranks."""
    gathered = getattr(error, "failures", None)
    return [error, *(pair[0] for pair in gathered.values())] if isinstance(gathered, dict) else [error]
