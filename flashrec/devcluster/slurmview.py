"""What Slurm says of the nodes of a dev cluster, and waiting until it says that they are usable."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from typing import Protocol

from flashrec.devcluster.daemon import Daemon
from flashrec.devcluster.errors import log_tail, wait_until
from flashrec.devcluster.spec import Layout
from flashrec.devcluster.status import is_usable

_QUERY_TIMEOUT_S = 15.0


class Run(Protocol):
    """`DevCluster.run`, as far as it is used here."""

    def __call__(
        self, argv: Sequence[str], *, cwd: str, timeout_s: float, check: bool
    ) -> subprocess.CompletedProcess[str]: ...


class SlurmView:
    """lacks_nothing: whether a node has all that Slurm needs of it, so that waiting for it makes sense."""

    def __init__(
        self, run: Run, slurmctld: Callable[[], Daemon], layout: Layout, lacks_nothing: Callable[[str], bool]
    ) -> None:
        self._run, self._slurmctld, self._layout, self._lacks_nothing = run, slurmctld, layout, lacks_nothing

    def states(self) -> dict[str, str] | None:
        """Node -> state, in sinfo's words; None: nobody answered."""
        if self._slurmctld().pid is None:
            return None
        try:
            answer = self._run(["sinfo", "-h", "-N", "-o", "%N|%T"], cwd="/", timeout_s=_QUERY_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return None
        if answer.returncode != 0:
            return None
        return dict(line.split("|") for line in answer.stdout.split())

    def await_reachable(self, nodes: Sequence[str], timeout_s: float) -> None:
        """As `await_usable`, less the nodes that something else still keeps away: power, link or a stopped daemon. Not
        at all while slurmctld is stopped."""
        if self._slurmctld().pid is not None:
            self.await_usable([node for node in nodes if self._lacks_nothing(node)], timeout_s)

    def await_usable(self, nodes: Sequence[str], timeout_s: float) -> None:
        """Until Slurm can use all of them. Raises NotReadyError that shows what Slurm says and its logs."""

        def unusable() -> list[str]:
            states = self.states()
            if states is None:
                return list(nodes) or ["slurmctld"]
            return [node for node in nodes if not is_usable(states.get(node, "unknown"))]

        def explain() -> str:
            left = unusable()
            states = self.states() or {}
            said = ", ".join(f"{node} {states.get(node, 'unknown')}" for node in left)
            layout = self._layout
            logs = [layout.ctl_log, *(layout.slurmd_log(node) for node in left[:1] if node != "slurmctld")]
            return "\n".join([f"Slurm says: {said}", *(log_tail(log) for log in logs)])

        wait_until(
            lambda: not unusable(),
            timeout_s=timeout_s,
            what=f"{', '.join(nodes) or 'slurmctld'} to become usable",
            explain=explain,
            interval_s=0.05,
        )
