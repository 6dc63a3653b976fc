"""Memory: is all of it there, is enough of it free, does it make errors?

Total is what the kernel uses (a little less than what is fitted), so a lost module shows as a total that is too small.
Uncorrected ECC errors fail; corrected ones warn from --max-corrected on. EDAC counts since boot.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from _checklib import Findings, main, parser_of, read_int


def look(args: argparse.Namespace, found: Findings) -> None:
    look_at_size(args, found)
    look_at_errors(args.sys / "devices/system/edac/mc", args, found)


def look_at_size(args: argparse.Namespace, found: Findings) -> None:
    lines = (line.split() for line in (args.proc / "meminfo").read_text().splitlines())
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}
    if "MemTotal" not in kib or "MemAvailable" not in kib:
        found.unknown(f"{args.proc}/meminfo says no MemTotal or no MemAvailable")
        return
    total, available = kib["MemTotal"] // 1024, kib["MemAvailable"] // 1024
    found.facts |= {"total_mib": total, "available_mib": available}
    if args.total_mib is not None and total < args.total_mib * (1 - args.tolerance_percent / 100):
        found.fail(f"{total} MiB of memory, expected {args.total_mib}: a module is lost or off")
    if available < args.min_available_mib:
        found.fail(f"only {available} MiB of memory available, at least {args.min_available_mib} wanted")


def look_at_errors(edac: Path, args: argparse.Namespace, found: Findings) -> None:
    controllers = sorted(edac.glob("mc[0-9]*")) if edac.is_dir() else []
    modules = [module for controller in controllers for module in controller.glob("dimm[0-9]*")]
    found.facts["edac_controllers"] = len(controllers)
    if args.dimms is not None and len(modules) != args.dimms:
        if controllers:
            found.fail(f"{len(modules)} memory modules, expected {args.dimms}")
        else:
            found.unknown("the memory modules cannot be counted: no EDAC driver is loaded")
    for controller in controllers:
        lost, mended = read_int(controller / "ue_count"), read_int(controller / "ce_count")
        if lost is None or mended is None:
            found.unknown(f"{controller.name} has no error counts")
            continue
        if lost > 0:
            found.fail(f"{lost} uncorrected memory errors since boot ({controller.name})")
        if mended > args.max_corrected:
            found.warn(f"{mended} corrected memory errors since boot ({controller.name})")


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--total-mib", type=int, help="what the node should have; default: not checked")
    parser.add_argument("--tolerance-percent", type=float, default=5.0)
    parser.add_argument("--min-available-mib", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--dimms", type=int, help="number of memory modules; default: not checked")
    parser.add_argument("--max-corrected", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--proc", type=Path, default=Path("/proc"))
    parser.add_argument("--sys", type=Path, default=Path("/sys"))
    main("memory", parser, look)
