"""Open files of the manager: one connection a node, and some for all else. Most systems start a process with 1024."""

from __future__ import annotations

import resource

from flashrec.manager.request import RequestError

SPARE_DESCRIPTORS = 256  # journal, output, job steps, threads, connections that are refused, agents that come again


def make_room(num_nodes: int, num_files: int) -> None:
    """See that a connection of each of `num_nodes` and `num_files` files can be open at the same time.

    The soft limit is raised as far as needed, and no further: Slurm hands the limits of srun on to its tasks. Raises
    RequestError, which says what to change, where the hard limit is too low."""
    needed = num_nodes + num_files + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise RequestError(
            f"the manager may have {hard} files open and needs {needed} for {num_nodes} nodes: raise the hard limit "
            f"where it runs (nofile in /etc/security/limits.conf; for a batch job LimitNOFILE= of slurmd)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
