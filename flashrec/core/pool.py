"""Nodes from a pool: what was asked for, what came, how long the job waits for it. Pure, like `core.machine`.

    asked ──► granted ──► its agent joins ──► a node like any other; given back when no rank is on it
      │          └─────► no agent in time, or Slurm took it away ──► given back, another one is asked for
      └─► refused, or no answer within `wait_s` ──► the job goes on without the pool

One request, one node, one number. "You have to wait" is no answer: the request stands, and the reason is kept for the
last line of a job that waited in vain. After a final no, nothing is asked until every rank has had a node again.
"""

from __future__ import annotations

import msgspec

from flashrec.core.effects import AnyEffect, ReleaseNode, RequestNode
from flashrec.core.limits import PoolLimits
from flashrec.core.membership import Members, Node

MAX_FAILED = 3  # nodes that came and could not be used, in one search for room


class PoolTier(msgspec.Struct):
    """open: requests without an answer. joining: granted nodes whose agent has not joined, and until when it may.
    said: the pool's last word in this search; is_closed: it was no."""

    limits: PoolLimits
    open: list[int] = []
    joining: dict[str, float] = {}
    failed: list[str] = []
    num_requests: int = 0
    num_granted: int = 0
    said: str = ""
    is_closed: bool = False
    answer_deadline: float = 0.0

    @property
    def is_waiting(self) -> bool:
        """A node may still come."""
        return bool(self.open or self.joining)

    @property
    def deadline(self) -> float:
        """When the first thing that is waited for is given up; only if `is_waiting`."""
        return min([*self.joining.values(), *([self.answer_deadline] if self.open else [])])

    def ask(self, num_nodes: int, reason: str, now: float) -> list[AnyEffect]:
        """Ranks need so many nodes: ask for those that were not asked for yet, as far as this job may."""
        if not self.limits.max_swaps:
            return []
        missing = num_nodes - len(self.open) - len(self.joining)
        may_take = self.limits.max_swaps - self.num_granted - len(self.open)
        if missing > 0 and may_take <= 0 and not self.said:
            self.said = f"this job has taken {self.num_granted} from the pool and may take no more (pool.max_swaps)"
        count = 0 if self.is_closed else max(0, min(missing, may_take))
        asked: list[AnyEffect] = []
        for _ in range(count):
            self.num_requests += 1
            self.open.append(self.num_requests)
            self.answer_deadline = now + self.limits.wait_s
            asked.append(RequestNode(self.num_requests, tuple(self.failed), reason))
        return asked

    def granted(self, node: Node, join_deadline: float) -> None:
        self.open.remove(node.request)
        self.num_granted += 1
        self.joining[node.name] = join_deadline

    def refused(self, request: int, reason: str, may_retry: bool) -> None:
        self.said = reason
        if not may_retry:
            self.open.remove(request)
            self.is_closed = True

    def joined(self, node: str) -> None:
        self.joining.pop(node, None)

    def give_back(self, node: Node, reason: str) -> list[AnyEffect]:
        """The node is no longer the job's."""
        if self.joining.pop(node.name, None) is not None:
            self.said = f"node {node.name} from the pool could not be used: {reason}"
            self.failed.append(node.name)
            self.is_closed = self.is_closed or len(self.failed) >= MAX_FAILED
        node.alive, node.left = False, True
        return [ReleaseNode(node.request, node.name, reason)]

    def give_up(self, members: Members, start_timeout_s: float, now: float) -> list[AnyEffect]:
        """Wait no longer for what is too late now."""
        said: list[AnyEffect] = []
        for name in [name for name, deadline in self.joining.items() if now >= deadline]:
            said += self.give_back(members.nodes[name], f"no agent within {start_timeout_s:g} s")
        if self.open and now >= self.answer_deadline:
            self.said = f"{self.said or 'the pool has not answered'}; waited {self.limits.wait_s:g} s"
            self.is_closed = True
            said += self._withdraw(f"no node within {self.limits.wait_s:g} s")
        return said

    def settle(self, reason: str) -> list[AnyEffect]:
        """No rank needs a node any more: withdraw what is open. The next search begins anew."""
        self.said, self.is_closed, self.failed = "", False, []
        return self._withdraw(reason)

    def give_back_idle(self, members: Members) -> list[AnyEffect]:
        """Training goes on: give back whatever has no rank."""
        self.joining = {}
        granted = list(members.from_pool())
        used = members.by_node() if granted else {}
        idle = [node for node in granted if node.name not in used]
        return [effect for node in idle for effect in self.give_back(node, "no rank is on it")]

    def _withdraw(self, reason: str) -> list[AnyEffect]:
        withdrawn, self.open = self.open, []
        return [ReleaseNode(request, "", reason) for request in withdrawn]
