"""The allocation as Slurm sees it now, and whether a job in it can survive the loss of a node at all.

Slurm shows nobody whether a job was made with `--no-kill`. What can be known is used: the batch script, the submit
environment, a marker that our submit filter exports. Known to be missing: refuse. Cannot be told: warn.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

import msgspec

from flashrec.manager.request import RequestError
from flashrec.slurm.client import SlurmClient
from flashrec.slurm.scheduler import SlurmError, SlurmUnavailable

NO_KILL_MARKERS = ("FLASHREC_NO_KILL", "SBATCH_NO_KILL", "SALLOC_NO_KILL", "SLURM_NO_KILL")


class Allocation(msgspec.Struct, frozen=True):
    """nodes in order of preference for ranks: this node (where the manager sits) is the last."""

    job_id: int
    nodes: tuple[str, ...]
    manager_address: str
    warnings: tuple[str, ...]


async def inspect_allocation(client: SlurmClient, environ: Mapping[str, str]) -> Allocation:
    """Ask Slurm about the job we run in. Raises RequestError with the remedy."""
    number = environ.get("SLURM_JOB_ID", "")
    if not number.isdigit():
        raise RequestError(
            "flashrec run must be started inside a Slurm allocation (SLURM_JOB_ID is not set).\n"
            "  Submit it:  sbatch --nodes=5 --no-kill your.sbatch   (see sbatch_templates/ddp.sbatch)\n"
            "  or get one: salloc --nodes=5 --no-kill, or let flashrec do it: say with -N how many nodes have ranks\n"
            "  or try recovery without Slurm: flashrec run --local --nodes 3 -- python train.py"
        )
    try:
        job = await client.job(int(number))
    except SlurmUnavailable as err:
        raise RequestError(f"Slurm cannot be asked about job {number}: {err}") from err
    except (SlurmError, ValueError) as err:
        raise RequestError(f"job {number}: {err}") from err
    objection = unsurvivable(len(job.nodes), environ)
    if objection:
        raise RequestError(objection)
    try:
        script = await client.batch_script(job.job_id)
    except SlurmUnavailable:
        script = None  # could not look: that is a warning below
    warnings = no_kill_warnings(script, environ)
    here = environ.get("SLURMD_NODENAME", "")
    nodes = [node for node in job.nodes if node != here] + [node for node in job.nodes if node == here]
    return Allocation(job.job_id, tuple(nodes), await _address_towards(client, nodes[0]), warnings)


def unsurvivable(num_nodes: int, environ: Mapping[str, str]) -> str:
    """Why no job in this allocation could survive; '' if nothing speaks against it."""
    if num_nodes < 2:
        return (
            "the allocation has one node: Slurm ends a one-node job with its node, and there is no spare.\n"
            "  Ask for active nodes plus spares, for example: sbatch --nodes=5 --no-kill"
        )
    if environ.get("SLURM_STEPMGR", "(null)") != "(null)":
        return (
            f"the job uses Slurm's step manager on node {environ['SLURM_STEPMGR']}: no new step can start once that "
            "node is lost.\n  Submit without --stepmgr (and ask the administrators if it is on by default)"
        )
    return ""


def no_kill_warnings(script: str | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Nothing if the job is known to have --no-kill, a warning if that cannot be told, RequestError if it has not."""
    if any(environ.get(marker) not in (None, "", "no") for marker in NO_KILL_MARKERS):
        return ()
    if script is not None and script_has_no_kill(script):
        return ()
    submitted = environ.get("FLASHREC_SUBMIT_LINE")
    if submitted is not None and not re.search(r"(^|\s)(-k|--no-kill)(\s|=|$)", submitted):
        raise RequestError(
            "the job was submitted without --no-kill, so Slurm ends it with its first lost node.\n"
            "  Add the line  #SBATCH --no-kill  to the script, or submit with: sbatch --no-kill"
        )
    return (
        "cannot tell whether this job was submitted with --no-kill; without it Slurm ends the job with its first "
        "lost node. Put  #SBATCH --no-kill  into the batch script (or export FLASHREC_NO_KILL=1 if it was given "
        "on the command line)",
    )


def script_has_no_kill(script: str) -> bool:
    """True if an #SBATCH line before the first command asks for --no-kill."""
    for line in script.splitlines():
        text = line.strip()
        if line.startswith("#SBATCH"):  # sbatch does not see an indented one
            if re.search(r"\s(-k|--no-kill)(=set)?(\s|$)", text.split(" #", 1)[0] + " "):
                return True
        elif text and not text.startswith("#"):
            return False
    return False


async def _address_towards(client: SlurmClient, node: str) -> str:
    """Our address on the network where Slurm reaches `node` (no packet is sent to find out)."""
    try:
        address = await client.node_address(node)
        for family, kind, proto, _, peer in socket.getaddrinfo(address, 6818, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, proto) as sock:
                sock.connect(peer)
                return str(sock.getsockname()[0])
    except (SlurmError, OSError):
        pass
    return socket.gethostname()
