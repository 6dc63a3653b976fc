"""What is decided before libmpi is loaded, and what is said about one that cannot be used."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

from flashrec.config.load import ConfigError, load_config
from flashrec.config.schema import Fabric
from flashrec.transport.mpi.interface import NoInterface, choose
from flashrec.transport.mpi.library import UnusableMPI, check_port, objection
from flashrec.transport.mpi.provider import PROVIDERS, environment
from flashrec.transport.mpi.words import BEAT, Means

HERE = {"lo": "127.0.0.1", "eth0": "10.1.0.7", "ib0": "10.2.0.7"}
TCP = PROVIDERS["tcp"]
WHEEL = "MPICH Version: 4.3.2\nMPICH Device:       ch4:ucx ofi\nMPICH CC: cc"


@pytest.mark.parametrize(
    ("wanted", "towards", "chosen"),
    [
        ("", "10.1.0.7", "eth0"),
        ("ib0", "10.1.0.7", "ib0"),
        ("hsn0,ib0,eth0", "10.1.0.7", "ib0"),
        ("10.2.0.0/16", "10.1.0.7", "ib0"),
        ("10.9.0.0/16,lo", "10.1.0.7", "lo"),
    ],
)
def test_the_first_interface_that_is_there_is_taken(wanted: str, towards: str, chosen: str) -> None:
    assert choose(wanted, towards, HERE) == (chosen, HERE[chosen])


@pytest.mark.parametrize(("wanted", "towards"), [("ib7", "10.1.0.7"), ("10.9.0.0/16", "10.1.0.7"), ("", "10.9.9.9")])
def test_no_other_interface_is_taken_instead(wanted: str, towards: str) -> None:
    with pytest.raises(NoInterface, match=r"there are: lo 127.0.0.1, eth0 10.1.0.7, ib0 10.2.0.7.*fabric.interface"):
        choose(wanted, towards, HERE)


def test_what_a_job_step_says_about_its_mpi_world_is_removed() -> None:
    environ = {"PMI_RANK": "1", "PMI2_FD": "3", "PMIX_ID": "x", "PATH": "/bin", "SLURM_PROCID": "1"}
    made, dropped = environment(TCP, "eth1", (0, 0), "", environ)
    assert sorted(dropped) == ["PMI2_FD", "PMIX_ID", "PMI_RANK"]
    assert made["FI_PROVIDER"] == "tcp" and made["MPIR_CVAR_CH4_NETMOD"] == "ofi"
    assert made["FI_TCP_IFACE"] == "eth1"
    assert int(made["MPIR_CVAR_CH4_OFI_MAX_EAGAIN_RETRY"]) > 0, "else a send to a dead peer never ends"
    assert not [name for name in made if "PORT" in name or "LIBMPI" in name]


def test_ports_and_library_are_passed_on() -> None:
    made, _ = environment(PROVIDERS["verbs"], "ib0", (7000, 7099), "/opt/libmpi.so", {})
    assert made["FI_PROVIDER"] == "verbs;ofi_rxm" and made["FI_VERBS_IFACE"] == "ib0"
    assert (made["FI_TCP_PORT_LOW_RANGE"], made["FI_TCP_PORT_HIGH_RANGE"]) == ("7000", "7099")
    assert made["MPI4PY_LIBMPI"] == "/opt/libmpi.so"


def test_every_provider_can_be_configured_and_is_known() -> None:
    assert set(get_args(get_type_hints(Fabric)["provider"])) == set(PROVIDERS)


@pytest.mark.parametrize(
    ("vendor", "version", "text", "provider", "problem"),
    [
        ("MPICH", (4, 3, 2), WHEEL, "tcp", ""),
        ("MPICH", (4, 3, 2), WHEEL, "ucx", ""),
        ("MPICH", (5, 0, 2), WHEEL, "tcp", "MPICH 5.0.2; only 4.1 to 4.x"),
        ("MPICH", (4, 0, 2), WHEEL, "tcp", "MPICH 4.0.2; only 4.1 to 4.x"),
        ("MPICH", (4, 1, 2), "MPICH Device:\tch4:ucx\n", "tcp", "without ch4:ofi (it has ucx)"),
        ("MPICH", (4, 1, 2), "MPICH Device:\tch3:nemesis\n", "tcp", "without ch4:ofi (it has no ch4)"),
        ("Open MPI", (5, 0, 11), "Open MPI v5.0.11", "tcp", "Open MPI 5.0.11, which cannot let single processes meet"),
        ("Intel MPI", (2021, 18, 1), "", "tcp", "Intel MPI 2021.18.1, which cannot"),
    ],
)
def test_a_library_that_was_measured_to_fail_is_refused(
    vendor: str, version: tuple[int, ...], text: str, provider: str, problem: str
) -> None:
    said = objection(vendor, version, text, PROVIDERS[provider])
    assert problem in said and bool(said) == bool(problem)
    assert not said or "flashrec[mpi]" in said


def test_a_port_on_another_interface_is_noticed() -> None:
    on_loopback = "tag#0$connentry#766D0002009CE17F[2]01[8]$"
    check_port(on_loopback, Means("MPICH", "ofi;tcp", "lo", "127.0.0.1"))
    check_port("tag#0$connentry#766D000200A6F3C0000202[8]$", Means("MPICH", "ofi;tcp", "eth0", "192.0.2.2"))
    check_port(on_loopback, Means("MPICH", "ofi;cxi", "cxi0"))
    with pytest.raises(UnusableMPI, match=r"not listen on eth0 \(192.0.2.2\)"):
        check_port(on_loopback, Means("MPICH", "ofi;tcp", "eth0", "192.0.2.2"))


def test_a_heartbeat_is_small_enough_to_be_sent_at_once() -> None:
    assert BEAT.size <= 128


@pytest.mark.parametrize(
    "setting",
    ["mpi=maybe", "provider=smoke", "ports=70-80", "ports=9000-8000", "interface=10.0.0.0/40", "interface=a b",
     "heartbeat_interval_s=0.6"],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"fabric"):
        load_config(settings=[f"fabric.{setting}"])


def test_settings_are_what_the_children_need() -> None:
    made = load_config(settings=["fabric.ports=7000-7099", "fabric.interface=ib0,10.2.0.0/16"]).fabric
    assert made.port_range == (7000, 7099) and made.interface == "ib0,10.2.0.0/16"
    assert load_config().fabric.port_range == (0, 0)
