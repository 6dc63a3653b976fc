"""Load libmpi in this process (a child, see the package) and say what was found, or why it cannot be used.

Measured: only MPICH (ch4, version 4.1 to 4.x) lets processes that were started alone meet and survives a lost peer.
Open MPI refuses the meeting, MPICH 5 gives all such processes the same name, MPICH 4.0 cannot do it over UCX.
"""

from __future__ import annotations

import os
import re
from typing import Any

from flashrec.transport.mpi.interface import NoInterface, addresses, choose
from flashrec.transport.mpi.provider import PROVIDERS, Provider, environment
from flashrec.transport.mpi.words import Means, Settings

REMEDY = 'pip install "flashrec[mpi]" on every node (it brings mpi4py and MPICH 4.3)'


class UnusableMPI(Exception):
    """No libmpi here can carry heartbeats; the message says why and what to do."""


def load(settings: Settings) -> tuple[Any, Means]:
    """mpi4py's MPI module, initialized as a singleton, and what it is. Raises UnusableMPI.

    If the provider is not there libmpi ends the process: its words are on stderr then."""
    provider = PROVIDERS[settings.provider]
    interface, address = settings.interface, ""
    if provider.has_address:
        try:
            interface, address = choose(settings.interface, settings.towards, addresses())
        except NoInterface as err:
            raise UnusableMPI(str(err)) from err
    variables, dropped = environment(provider, interface, settings.ports, settings.library, os.environ)
    for name in dropped:
        del os.environ[name]
    os.environ.update(variables)
    try:
        import mpi4py
    except ImportError as err:
        raise UnusableMPI(f"mpi4py is not installed; {REMEDY}") from err
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as err:
        first, *rest = str(err).splitlines()
        where = f" ({rest[0]})" if rest else ""
        raise UnusableMPI(f"mpi4py finds no MPI library: {first}{where}; {REMEDY}") from err
    problem = objection(*MPI.get_vendor(), MPI.Get_library_version(), provider)
    if problem:
        raise UnusableMPI(problem)
    MPI.Init_thread(MPI.THREAD_SINGLE)
    for world in (MPI.COMM_SELF, MPI.COMM_WORLD):
        world.Set_errhandler(MPI.ERRORS_RETURN)
    if MPI.COMM_WORLD.Get_size() != 1:
        raise UnusableMPI("MPI takes this process for a part of a larger job; start agents with srun --mpi=none")
    return MPI, Means(f"MPICH {_dotted(MPI.get_vendor()[1])}", str(provider), interface, address)


def objection(vendor: str, version: tuple[int, ...], text: str, provider: Provider) -> str:
    """Why this library cannot be used; '' if nothing speaks against it. text: as MPI_Get_library_version says."""
    found = f"{vendor} {_dotted(version)}"
    if vendor != "MPICH":
        return f"the MPI library found is {found}, which cannot let single processes meet; {REMEDY}"
    if not (4, 1) <= version[:2] < (5, 0):
        return f"the MPI library found is {found}; only 4.1 to 4.x lets single processes meet; {REMEDY}"
    device = re.search(r"MPICH Device:\s*ch4:(.*)", text)
    netmods = re.split(r"[\s,]+", device.group(1).strip()) if device else []
    if provider.netmod not in netmods:
        return f"{found} was built without ch4:{provider.netmod} (it has {', '.join(netmods) or 'no ch4'}); {REMEDY}"
    return ""


def check_port(port: str, means: Means) -> None:
    """libfabric takes any interface if it does not find the one it was told. Raises UnusableMPI if that is so.

    Looks into MPICH's port name, where an IPv4 address stands in hexadecimal digits, zeros as [count]."""
    if not means.address or not means.provider.endswith(";tcp"):
        return
    plain = re.sub(r"\[(\d+)\]", lambda zeros: "00" * int(zeros.group(1)), port)
    wanted = "".join(f"{int(part):02X}" for part in means.address.split("."))
    if wanted not in plain.upper():
        raise UnusableMPI(f"libfabric does not listen on {means.interface} ({means.address}) but elsewhere: {port}")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)
