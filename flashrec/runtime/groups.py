"""All process groups of this rank, recorded as the script creates them.

Every group is born without communication. A first-launch worker then connects it at once; a replacement leaves it
alone ("shadow"), builds its model with it, and connects all of them in its first recovery, exactly like survivors do.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from flashrec.runtime import stuck
from flashrec.runtime.engine import Engine, Group
from flashrec.runtime.limits import Limits
from flashrec.runtime.progress import Progress, Seen
from flashrec.runtime.timeline import logger
from flashrec.runtime.torch_private import groups as private

_DEFAULT_TIMEOUT = timedelta(minutes=30)


class Groups:
    """The groups of this rank and the engine that connects them."""

    def __init__(self, engine: Engine, progress: Progress, is_shadow: bool, limits: Limits) -> None:
        self._engine, self._progress, self._limits = engine, progress, limits
        self._is_shadow = is_shadow
        self._is_ours = False  # the group that is just being made is not the script's
        self._groups: dict[str, Group] = {}
        self._lock = threading.Lock()  # nobody looks at a backend while it is replaced
        self._seen: Seen = (None, {})
        self._gloo_threads: list[str] = []  # empty: look for them

    def add(self, name: str, handle: dist.ProcessGroup, facts: dict[str, Any]) -> None:
        """A group was created by the script. Connects it now, unless this rank still builds alone."""
        group = Group(
            name=name,
            ranks=facts["ranks"],
            group_rank=facts["group_rank"],
            backend=facts["backend"],
            timeout=facts["timeout"] or _DEFAULT_TIMEOUT,
            options=facts["options"],
            reference=weakref.ref(handle),
        )
        with self._lock:
            self._groups[name] = group
        if self._progress.where != "init" and not self._is_ours:
            logger.warning("process group %s is created after session.steps(): a replacement will not have it", name)
        if not self._is_shadow:
            self._form([group], self._progress.generation, self._limits.first_form_timeout_s)

    @contextlib.contextmanager
    def among(self, ranks: tuple[int, ...], generation: int) -> Iterator[dist.ProcessGroup]:
        """A gloo group of these ranks, for as long as it is needed. Raises Superseded, WaitedTooLong, RuntimeError."""
        self._is_ours, is_shadow, self._is_shadow = True, self._is_shadow, True
        try:
            handle = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
        finally:
            self._is_ours, self._is_shadow = False, is_shadow
        try:
            made = [group for group in self._alive() if group.handle is handle]
            self._form(made, generation, self._limits.form_timeout_s)
            yield handle
        finally:
            dist.destroy_process_group(handle)

    def form(self, generation: int) -> int:
        """Connect every group for `generation`. Returns how many. Raises Superseded, WaitedTooLong, RuntimeError."""
        groups = self._alive()
        self._form(groups, generation, self._limits.form_timeout_s)
        self._is_shadow = False
        return len(groups)

    def look(self) -> Seen:
        """For the heartbeat: does an operation wait for a peer (None: cannot be seen), and how many collectives were
        issued in each group. While groups are being connected: as it was before."""
        if self._is_shadow or not self._lock.acquire(blocking=False):
            return self._seen
        try:
            alive = [group for group in self._groups.values() if group.is_alive]
            self._seen = self._waits(alive), dict(_issued(alive))
        finally:
            self._lock.release()
        return self._seen

    def num_issued(self) -> int:
        """Collectives that this rank has issued since its groups were last connected, as far as that can be told."""
        return sum(count for _, count in _issued(self._alive()))

    @property
    def timeout_s(self) -> float:
        """The longest that the script lets a collective take; 0.0 without a group."""
        return max((group.timeout.total_seconds() for group in self._alive()), default=0.0)

    def drain(self) -> None:
        """After `form`: return when no operation of an older generation can write any more. Raises NotUnblockable."""
        self._engine.drain(self._limits.unblock_timeout_s)

    def _waits(self, groups: list[Group]) -> bool | None:
        """gloo shows it. Of NCCL one sees at most that something of gloo waits, too."""
        if not self._gloo_threads:
            self._gloo_threads = stuck.gloo_threads()
        try:
            if any(stuck.waiting_operation(thread) for thread in self._gloo_threads):
                return True
        except OSError:  # a group was destroyed, or the kernel does not tell
            self._gloo_threads = []
            return None
        is_all = groups and all(private.backend_names(group.backend) == {"gloo"} for group in groups)
        return False if is_all else None

    def _form(self, groups: list[Group], generation: int, timeout_s: float) -> None:
        with self._lock:
            self._gloo_threads = []
            self._engine.form(groups, generation, timeout_s)

    def unblock(self) -> int:
        """End every collective of the process; from the control thread."""
        return self._engine.unblock(list(self._groups.values()))

    def _alive(self) -> list[Group]:
        with self._lock:
            alive = [group for _, group in sorted(self._groups.items()) if group.is_alive]
            self._groups = {group.name: group for group in alive}
        return alive


def _issued(groups: list[Group]) -> Iterator[tuple[str, int]]:
    """(group, collectives issued in it), where that can be told."""
    for group in groups:
        with contextlib.suppress(RuntimeError):  # destroyed by now, or its backend does not count
            yield group.name, private.num_issued(group.handle)
