"""NVIDIA GPUs: are all there, does the driver answer, and has it or the kernel log anything bad to say?

Fails: fewer GPUs than --count (or than the PCI bus shows), a lost device, uncorrected ECC errors since the driver was
loaded, row remapping or page retirement that failed or waits for a reset, a recovery action the driver asks for, and an
Xid of --xid-fail in the kernel log. Warns: Xids of --xid-warn, hardware slowdown, persistence mode off.

Reads `nvidia-smi -q -x`, whose fields are the same for all drivers or missing, and /dev/kmsg (root). A driver that
hangs, hangs nvidia-smi: give the line when_hung=fail.
"""

from __future__ import annotations

import argparse
import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path

from _checklib import CommandError, Findings, command_output, main, parser_of, read_text

NVIDIA, DISPLAY_CLASS = "0x10de", "0x03"
# 48 double bit error, 61 62 microcontroller, 64 row remapping failed, 74 NVLink, 79 fell off the bus, 95 uncontained
# memory error, 119 and 120 GSP, 136 and 143 link training and boot, 140 unrecovered memory error
XID_FAIL = "48,61,62,64,74,79,95,119,120,136,140,143"
XID_WARN = "63,92,94,109"  # a row was remapped, many corrected errors, contained memory error, context switch
XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)[^)]*\): (\d+)")
SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")


def look(args: argparse.Namespace, found: Findings) -> None:
    on_bus = count_on_bus(args.sys / "bus/pci/devices")
    found.facts["on_pci_bus"] = on_bus
    expected = args.count if args.count is not None else on_bus
    if expected == 0 and on_bus == 0:
        return
    look_at_driver(expected, args, found)
    look_at_kernel_log(args, found)


def count_on_bus(devices: Path) -> int:
    if not devices.is_dir():
        return 0
    return sum(
        read_text(device / "vendor") == NVIDIA and (read_text(device / "class") or "").startswith(DISPLAY_CLASS)
        for device in devices.iterdir()
    )


def look_at_driver(expected: int, args: argparse.Namespace, found: Findings) -> None:
    try:
        answer = command_output([args.nvidia_smi, "-q", "-x"], args.timeout_s)
        log = ET.fromstring(answer)
    except CommandError as err:
        if "is not installed" in str(err):
            found.unknown(f"{expected} GPUs expected, but {err}")
        else:
            found.fail(str(err))  # a lost GPU makes all of it fail
        return
    except ET.ParseError as err:
        found.unknown(f"{args.nvidia_smi} printed no XML: {err}")
        return
    gpus = log.findall("gpu")
    found.facts |= {"gpus": len(gpus), "driver": log.findtext("driver_version")}
    if len(gpus) < expected:
        found.fail(f"{len(gpus)} GPUs, expected {expected}")
    for gpu in gpus:
        look_at_gpu(gpu, args, found)


def look_at_gpu(gpu: ET.Element, args: argparse.Namespace, found: Findings) -> None:
    name = f"GPU {gpu.get('id', '?')}"
    if any("is lost" in (element.text or "").lower() for element in gpu.iter()):
        found.fail(f"{name} is lost")
        return
    errors = sum(uncorrected(element) for element in gpu.iterfind("ecc_errors/volatile//*"))
    if errors > args.max_uncorrected:
        found.fail(f"{name}: {errors} uncorrected ECC errors")
    for path, wanted, what in (
        ("remapped_rows/remapped_row_failure", "Yes", "a row could not be remapped"),
        ("remapped_rows/remapped_row_pending", "Yes", "remapped rows wait for a reset"),
        ("retired_pages/pending_retirement", "Yes", "retired pages wait for a reset"),
        ("retired_pages/pending_blacklist", "Yes", "retired pages wait for a reset"),
        ("ecc_errors/aggregate/sram_threshold_exceeded", "Yes", "SRAM errors are above the threshold"),
    ):
        if gpu.findtext(path) == wanted:
            found.fail(f"{name}: {what}")
    action = (gpu.findtext("gpu_recovery_action") or "None").strip()
    if action not in ("None", "N/A"):
        found.fail(f"{name}: the driver asks for the recovery action {action}")
    for kind in ("event", "throttle"):  # renamed with driver 535
        for reason in SLOWDOWNS:
            if gpu.findtext(f"clocks_{kind}_reasons/clocks_{kind}_reason_{reason}") == "Active":
                found.warn(f"{name}: clocks are held down ({reason})")
    if args.persistence and gpu.findtext("persistence_mode") == "Disabled":
        found.warn(f"{name}: persistence mode is off")


def uncorrected(element: ET.Element) -> int:
    """Newer drivers: {s,d}ram_uncorrectable*; older ones: double_bit/*, of which `total` is the sum."""
    text = (element.text or "").strip()
    return int(text) if "uncorrectable" in element.tag and text.isdigit() else 0


def look_at_kernel_log(args: argparse.Namespace, found: Findings) -> None:
    fatal, other = numbers(args.xid_fail), numbers(args.xid_warn)
    seen: dict[tuple[str, int], int] = {}
    try:
        lines = kernel_lines(args.kmsg)
        now_us = float((args.proc / "uptime").read_text().split()[0]) * 1e6
    except PermissionError:
        found.unknown(f"the kernel log cannot be read for Xids: {args.kmsg} needs root")
        return
    except OSError as err:
        found.unknown(f"the kernel log cannot be read for Xids: {err}")
        return
    for stamp_us, text in lines:
        xid = XID.match(text)
        is_recent = not args.xid_within_s or now_us - stamp_us <= args.xid_within_s * 1e6
        if xid and is_recent:
            key = (xid[1], int(xid[2]))
            seen[key] = seen.get(key, 0) + 1
    found.facts["xids"] = [f"{number}@{gpu}" for gpu, number in seen]
    for (gpu, number), times in seen.items():
        if number in fatal:
            found.fail(f"Xid {number} of GPU {gpu} in the kernel log, {times} times")
        elif number in other:
            found.warn(f"Xid {number} of GPU {gpu} in the kernel log, {times} times")


def kernel_lines(kmsg: Path) -> list[tuple[int, str]]:
    """(microseconds since boot, text) of what the kernel itself said. Raises OSError."""
    fd = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    raw = []
    try:
        while True:
            try:
                record = os.read(fd, 65536)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # overwritten while we read: go on with the oldest that is left
            if not record:
                break
            raw += record.decode(errors="replace").splitlines()
    finally:
        os.close(fd)
    found = []
    for line in raw:
        head, _, text = line.partition(";")
        fields = head.split(",")
        if len(fields) >= 3 and fields[0].isdigit() and int(fields[0]) < 8 and fields[2].isdigit():  # facility kernel
            found.append((int(fields[2]), text))
    return found


def numbers(text: str) -> set[int]:
    return {int(part) for part in text.split(",") if part}


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, help="GPUs the node must have; default: as many as the PCI bus shows")
    parser.add_argument("--max-uncorrected", type=int, default=0, help="per GPU; default: %(default)s")
    parser.add_argument("--xid-fail", default=XID_FAIL, metavar="N,N", help="default: %(default)s")
    parser.add_argument("--xid-warn", default=XID_WARN, metavar="N,N", help="default: %(default)s")
    parser.add_argument("--xid-within-s", type=float, default=0, help="look back so far; default: to the boot")
    parser.add_argument("--no-persistence", dest="persistence", action="store_false", help="may be off")
    parser.add_argument("--timeout-s", type=float, default=12.0, help="for nvidia-smi; default: %(default)s")
    parser.add_argument("--nvidia-smi", default="nvidia-smi")
    parser.add_argument("--kmsg", type=Path, default=Path("/dev/kmsg"))
    parser.add_argument("--proc", type=Path, default=Path("/proc"))
    parser.add_argument("--sys", type=Path, default=Path("/sys"))
    main("gpu", parser, look)
