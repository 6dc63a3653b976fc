"""The ways over a fabric that can be configured, and what each asks of the environment before libmpi is loaded."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

# So often a send to a dead peer is tried before it is an error (default: for ever). Too few break connects under load.
MAX_RETRIES = 100_000
_DROPPED = ("PMI_", "PMI2_", "PMIX_")  # in a job step they would make us a part of its MPI world


class Provider(msgspec.Struct, frozen=True):
    """netmod: MPICH's; name: libfabric's. variable: names the interface. has_address: by a network interface with an
    IPv4 address, so that it can be found and knocked at; else the interface is a device that is passed on as it is."""

    netmod: str
    name: str
    variable: str
    has_address: bool

    def __str__(self) -> str:
        return f"{self.netmod};{self.name}"


PROVIDERS = {
    "tcp": Provider("ofi", "tcp", "FI_TCP_IFACE", True),
    "verbs": Provider("ofi", "verbs;ofi_rxm", "FI_VERBS_IFACE", True),
    "cxi": Provider("ofi", "cxi", "FI_CXI_DEVICE_NAME", False),
    "psm3": Provider("ofi", "psm3", "PSM3_NIC", False),
    "ucx": Provider("ucx", "ucx", "UCX_NET_DEVICES", False),
}


def environment(
    provider: Provider, interface: str, ports: tuple[int, int], library: str, environ: Mapping[str, str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Variables to set, and the names of those to remove, before mpi4py.MPI is imported."""
    made = {
        "MPIR_CVAR_CH4_NETMOD": provider.netmod,
        "MPIR_CVAR_CH4_OFI_MAX_EAGAIN_RETRY": str(MAX_RETRIES),
        "MPIR_CVAR_NOLOCAL": "1",  # also two processes of one node meet over the fabric: that is what is watched
    }
    if provider.netmod == "ofi":
        made["FI_PROVIDER"] = provider.name
    if interface:
        made[provider.variable] = interface
    if ports != (0, 0):
        made |= {"FI_TCP_PORT_LOW_RANGE": str(ports[0]), "FI_TCP_PORT_HIGH_RANGE": str(ports[1])}
    if library:
        made["MPI4PY_LIBMPI"] = library
    return made, tuple(name for name in environ if name.startswith(_DROPPED))
