"""The checks of GPUs and networks. No GPU and no InfiniBand was at hand: what nvidia-smi and sysfs say here was written
from their documentation, so these tests show what the checks conclude, not that real devices talk like this."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.health.support import run_check, script, write_tree
from tests.health.test_checks_node import says

GPU = """<gpu id="00000000:{bus}:00.0"><uuid>GPU-{bus}</uuid><persistence_mode>{persistence}</persistence_mode>
<clocks_{kind}_reasons>
<clocks_{kind}_reason_hw_slowdown>{slowdown}</clocks_{kind}_reason_hw_slowdown></clocks_{kind}_reasons>
<ecc_errors><volatile><sram_correctable>9</sram_correctable>
<sram_uncorrectable_parity>0</sram_uncorrectable_parity><dram_uncorrectable>{ecc}</dram_uncorrectable></volatile>
<aggregate><dram_uncorrectable>77</dram_uncorrectable><sram_threshold_exceeded>{sram}</sram_threshold_exceeded>
</aggregate></ecc_errors>
<retired_pages><pending_blacklist>N/A</pending_blacklist><pending_retirement>{retire}</pending_retirement>
</retired_pages><remapped_rows><remapped_row_pending>{pending}</remapped_row_pending>
<remapped_row_failure>{failure}</remapped_row_failure></remapped_rows>
<temperature><gpu_temp>{temperature}</gpu_temp></temperature>{more}</gpu>"""
GOOD = {
    "persistence": "Enabled", "kind": "event", "slowdown": "Not Active", "ecc": "0", "sram": "No", "retire": "N/A",
    "pending": "No", "failure": "No", "temperature": "40 C", "more": "",
}  # fmt: skip


class Machine:
    """Two GPUs on the bus, a nvidia-smi, a kernel log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for slot in ("0000:07:00.0", "0000:08:00.0"):
            write_tree(folder, {f"bus/pci/devices/{slot}/vendor": "0x10de\n"})
            write_tree(folder, {f"bus/pci/devices/{slot}/class": "0x030200\n"})
        write_tree(folder, {"bus/pci/devices/0000:09:00.0/vendor": "0x10de\n"})  # an NVIDIA device that is no GPU
        write_tree(folder, {"bus/pci/devices/0000:09:00.0/class": "0x068000\n", "uptime": "1000.0 1.0\n"})
        self.smi = folder / "nvidia-smi"
        self.gpus({}, {})
        self.log()

    def gpus(self, *differences: dict[str, str]) -> None:
        gpus = "".join(GPU.format(**{**GOOD, "bus": f"{7 + i:02}", **d}) for i, d in enumerate(differences))
        (self.folder / "smi.xml").write_text(
            f"<?xml version='1.0' ?>\n<nvidia_smi_log><driver_version>1</driver_version>{gpus}</nvidia_smi_log>"
        )
        script(self.smi, f'[ "$*" = "-q -x" ] && cat {self.folder}/smi.xml')

    def log(self, *lines: str) -> None:
        (self.folder / "kmsg").write_text("".join(f"{line}\n" for line in ("6,1,100,-;Linux version", *lines)))

    def check(self, *args: object) -> dict[str, Any]:
        where = ("--nvidia-smi", self.smi, "--sys", self.folder, "--proc", self.folder)
        return run_check("gpu", *where, "--kmsg", self.folder / "kmsg", *args)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_gpus_are_fine(machine: Machine) -> None:
    found = machine.check("--count", 2)
    assert says(found, "ok")
    assert found["facts"] == {"on_pci_bus": 2, "gpus": 2, "driver": "1", "xids": []}


@pytest.mark.parametrize(
    ("difference", "status", "reason"),
    [
        ({"ecc": "3"}, "fail", "GPU 00000000:08:00.0: 3 uncorrected ECC errors"),
        ({"ecc": "N/A"}, "ok", ""),
        ({"failure": "Yes"}, "fail", "a row could not be remapped"),
        ({"pending": "Yes"}, "fail", "remapped rows wait for a reset"),
        ({"retire": "Yes"}, "fail", "retired pages wait for a reset"),
        ({"sram": "Yes"}, "fail", "SRAM errors are above the threshold"),
        ({"temperature": "GPU is lost"}, "fail", "GPU 00000000:08:00.0 is lost"),
        ({"more": "<gpu_recovery_action>Reboot</gpu_recovery_action>"}, "fail", "the recovery action Reboot"),
        ({"more": "<gpu_recovery_action>None</gpu_recovery_action>"}, "ok", ""),
        ({"slowdown": "Active"}, "warn", "clocks are held down (hw_slowdown)"),
        ({"slowdown": "Active", "kind": "throttle"}, "warn", "clocks are held down (hw_slowdown)"),
        ({"persistence": "Disabled"}, "warn", "persistence mode is off"),
    ],
)
def test_one_gpu_is_not(machine: Machine, difference: dict[str, str], status: str, reason: str) -> None:
    machine.gpus({}, difference)
    found = machine.check("--count", 2)
    assert says(found, status, reason)
    assert "07:00.0" not in found["reason"]


def test_a_gpu_is_missing(machine: Machine) -> None:
    machine.gpus({})
    assert says(machine.check("--count", 2), "fail", "1 GPUs, expected 2")
    assert says(machine.check(), "fail", "1 GPUs, expected 2")  # the bus knows better
    machine.gpus({}, {})
    assert says(machine.check("--count", 3), "fail", "2 GPUs, expected 3")


def test_the_driver_says_no_or_nothing(machine: Machine) -> None:
    lost = "Unable to determine the device handle for GPU 0000:08:00.0: GPU is lost. Reboot the system to recover"
    script(machine.smi, f"echo '{lost}'; exit 15")
    assert says(machine.check(), "fail", f"ended with exit code 15: {lost}")
    script(machine.smi, "exec sleep 600")
    assert says(machine.check("--timeout-s", 0.5), "fail", "did not answer within 0.5 s")
    script(machine.smi, "echo no XML")
    assert says(machine.check(), "unknown", "printed no XML")
    machine.smi.unlink()
    assert says(machine.check(), "unknown", "2 GPUs expected, but")


def test_a_node_without_gpus_is_fine(tmp_path: Path) -> None:
    where = ("--nvidia-smi", tmp_path / "none", "--sys", tmp_path)
    assert says(run_check("gpu", *where), "ok")
    assert says(run_check("gpu", *where, "--count", 0), "ok")
    assert says(run_check("gpu", *where, "--count", 8), "unknown", "8 GPUs expected")


XID = "4,900,{us},-;NVRM: Xid (PCI:0000:07:00): {number}, pid='<unknown>', name=<unknown>, something"


@pytest.mark.parametrize(
    ("number", "status"), [(79, "fail"), (48, "fail"), (94, "warn"), (63, "warn"), (31, "ok"), (7, "ok"), (790, "ok")]
)
def test_xids_in_the_kernel_log(machine: Machine, number: int, status: str) -> None:
    machine.log(XID.format(us=5000, number=number), XID.format(us=6000, number=number))
    found = machine.check()
    assert says(found, status, f"Xid {number} of GPU 0000:07:00 in the kernel log, 2 times" if status != "ok" else "")
    assert found["facts"]["xids"] == [f"{number}@0000:07:00"]


def test_which_xids_matter_and_how_long(machine: Machine) -> None:
    machine.log(XID.format(us=100_000_000, number=79))
    assert says(machine.check("--xid-within-s", 901), "fail")
    assert says(machine.check("--xid-within-s", 899), "ok")
    assert says(machine.check("--xid-fail", "", "--xid-warn", "79"), "warn")


def test_only_the_kernel_itself_is_believed(machine: Machine) -> None:
    """Programs may write to the kernel log (facility 1 and up), and a process name may be in a line."""
    forged = XID.format(us=5000, number=79)
    machine.log(forged.replace("4,", "12,", 1), "6,901,5001,-;audit: NVRM: Xid (PCI:0000:07:00): 79, x")
    assert says(machine.check(), "ok")


def test_a_kernel_log_that_cannot_be_read_is_unknown(machine: Machine) -> None:
    (machine.folder / "kmsg").unlink()
    assert says(machine.check(), "unknown", "kernel log cannot be read")


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="the kernel log is root's")
def test_the_real_kernel_log_can_be_read(machine: Machine) -> None:
    assert says(machine.check("--kmsg", "/dev/kmsg", "--proc", "/proc"), "ok")


# ---- networks

ROUTES = "Iface\tDestination\tGateway\tFlags\neth1\t0000000A\t0\t0001\neth0\t00000000\t0100000A\t0003\n"


def interface(folder: Path, name: str = "eth0", **files: str) -> Path:
    base = {"operstate": "up", "carrier": "1", "speed": "25000"}
    counters = {f"statistics/{way}_{what}": "0" for way in ("rx", "tx") for what in ("errors", "packets")}
    found = {**base, **counters, **{key.replace("__", "/"): value for key, value in files.items()}}
    write_tree(folder, {f"class/net/{name}/{key}": f"{value}\n" for key, value in found.items()})
    return write_tree(folder, {"net/route": ROUTES})


def nic(folder: Path, *args: object) -> dict[str, Any]:
    return run_check("nic", "--sys", folder, "--proc", folder, *args)


def test_interface_is_fine(tmp_path: Path) -> None:
    interface(tmp_path)
    found = nic(tmp_path, "--interface", "eth0", "--speed-mbit", 25000)
    assert says(found, "ok")
    assert found["facts"]["eth0:speed_mbit"] == 25000
    assert says(nic(tmp_path, "--default-route"), "ok")


@pytest.mark.parametrize(
    ("files", "status", "reason"),
    [
        ({"operstate": "down"}, "fail", "eth0 is down"),
        ({"operstate": "unknown"}, "ok", ""),
        ({"operstate": "unknown", "carrier": "0"}, "fail", "eth0 is down"),
        ({"speed": "10000"}, "fail", "eth0 runs at 10000 Mbit/s, expected 25000"),
        ({"speed": "-1"}, "unknown", "does not say its speed"),
        ({"statistics__rx_errors": "100", "statistics__rx_packets": "20000"}, "warn", "100 rx errors in 20000"),
        ({"statistics__rx_errors": "1", "statistics__rx_packets": "20000"}, "ok", ""),
        ({"statistics__tx_errors": "9", "statistics__tx_packets": "10"}, "ok", ""),
    ],
)
def test_interface_is_not(tmp_path: Path, files: dict[str, str], status: str, reason: str) -> None:
    interface(tmp_path, **files)
    assert says(nic(tmp_path, "--interface", "eth0", "--speed-mbit", 25000), status, reason)


def test_interface_is_missing(tmp_path: Path) -> None:
    interface(tmp_path)
    assert says(nic(tmp_path, "--interface", "ib0"), "fail", "ib0 does not exist")
    assert says(nic(tmp_path), "unknown", "nothing to look at")
    write_tree(tmp_path, {"net/route": ROUTES.splitlines()[0] + "\n"})
    assert says(nic(tmp_path, "--default-route"), "unknown", "no default route")


def port(folder: Path, **files: str) -> None:
    base = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "200 Gb/sec (4X HDR)"}
    counters = {"counters/link_downed": "0", "counters/symbol_error": "0"}
    found = {**base, **counters, **{key.replace("__", "/"): value for key, value in files.items()}}
    write_tree(folder, {f"class/infiniband/mlx5_0/ports/1/{key}": f"{value}\n" for key, value in found.items()})


@pytest.mark.parametrize(
    ("files", "status", "reason"),
    [
        ({}, "ok", ""),
        ({"state": "1: DOWN", "phys_state": "3: Disabled"}, "fail", "mlx5_0:1 is 1: DOWN, 3: Disabled"),
        ({"state": "2: INIT"}, "fail", "mlx5_0:1 is 2: INIT"),
        ({"phys_state": "6: LinkErrorRecovery"}, "fail", "LinkErrorRecovery"),
        ({"rate": "100 Gb/sec (4X EDR)"}, "fail", "runs at 100 Gbit/s, expected 200"),
        ({"rate": ""}, "unknown", "does not say its rate"),
        ({"counters__link_downed": "11"}, "warn", "link_downed is 11"),
        ({"counters__symbol_error": "101"}, "warn", "symbol_error is 101"),
    ],
)
def test_infiniband_port(tmp_path: Path, files: dict[str, str], status: str, reason: str) -> None:
    port(tmp_path, **files)
    for name in ("mlx5_0", "mlx5_0:1"):
        assert says(nic(tmp_path, "--ib", name, "--ib-rate-gbit", 200), status, reason)
    assert says(nic(tmp_path, "--ib", "mlx5_1"), "fail", "mlx5_1:1 does not exist")
