"""Network: link, speed and error counters of Ethernet interfaces and InfiniBand ports.

--interface NAME and --ib DEVICE[:PORT] may be repeated; --default-route adds the interface of the default route. Error
counters run since boot, so they are compared with the traffic (Ethernet) or with a limit (InfiniBand) and only warn.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from _checklib import Findings, main, parser_of, read_int, read_text

MIN_PACKETS = 10000  # below this a ratio says nothing


def look(args: argparse.Namespace, found: Findings) -> None:
    names = list(args.interface)
    if args.default_route:
        name = default_route(args.proc / "net/route")
        if name is None:
            found.unknown("there is no default route, so its interface cannot be looked at")
        elif name not in names:
            names.append(name)
    elif not names and not args.ib:
        found.unknown("nothing to look at: give --interface, --ib or --default-route")
    for name in names:
        look_at_interface(args.sys / "class/net" / name, name, args, found)
    for port in args.ib:
        look_at_port(port, args, found)


def default_route(routes: Path) -> str | None:
    for line in routes.read_text().splitlines()[1:]:
        words = line.split()
        if words[1] == "00000000" and int(words[3], 16) & 1:  # destination 0.0.0.0, route is up
            return words[0]
    return None


def look_at_interface(folder: Path, name: str, args: argparse.Namespace, found: Findings) -> None:
    if not folder.is_dir():
        found.fail(f"{name} does not exist")
        return
    state = read_text(folder / "operstate")
    found.facts[f"{name}:state"] = state
    if state == "unknown":  # drivers that do not say (tun, some virtual ones): the carrier decides
        state = "up" if read_int(folder / "carrier") == 1 else "down"
    if state != "up":
        found.fail(f"{name} is {state or 'in no state'}")
        return
    if args.speed_mbit is not None:
        speed = read_int(folder / "speed")
        found.facts[f"{name}:speed_mbit"] = speed
        if speed is None or speed < 0:
            found.unknown(f"{name} does not say its speed")
        elif speed < args.speed_mbit:
            found.fail(f"{name} runs at {speed} Mbit/s, expected {args.speed_mbit}")
    for way in ("rx", "tx"):
        errors = read_int(folder / f"statistics/{way}_errors")
        packets = read_int(folder / f"statistics/{way}_packets")
        if errors is None or packets is None:
            continue
        found.facts[f"{name}:{way}_errors"] = errors
        if packets >= MIN_PACKETS and errors / packets > args.max_error_ratio:
            found.warn(f"{name}: {errors} {way} errors in {packets} packets")


def look_at_port(wanted: str, args: argparse.Namespace, found: Findings) -> None:
    device, _, port = wanted.partition(":")
    folder = args.sys / "class/infiniband" / device / "ports" / (port or "1")
    name = f"{device}:{port or 1}"
    if not folder.is_dir():
        found.fail(f"{name} does not exist")
        return
    state, physical = read_text(folder / "state") or "", read_text(folder / "phys_state") or ""
    found.facts[f"{name}:state"] = state
    if state.rpartition(" ")[2] != "ACTIVE" or physical.rpartition(" ")[2] != "LinkUp":
        found.fail(f"{name} is {state or 'in no state'}, {physical or 'physical state not known'}")
        return
    if args.ib_rate_gbit is not None:
        rate = re.match(r"[0-9.]+", read_text(folder / "rate") or "")
        if rate is None:
            found.unknown(f"{name} does not say its rate")
        elif float(rate[0]) < args.ib_rate_gbit:
            found.fail(f"{name} runs at {rate[0]} Gbit/s, expected {args.ib_rate_gbit:g}")
    for counter, limit in (("link_downed", args.max_link_downed), ("symbol_error", args.max_symbol_errors)):
        value = read_int(folder / "counters" / counter)
        if value is not None:
            found.facts[f"{name}:{counter}"] = value
            if value > limit:
                found.warn(f"{name}: {counter} is {value}")


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--interface", action="append", default=[], metavar="NAME")
    parser.add_argument("--default-route", action="store_true")
    parser.add_argument("--speed-mbit", type=int, help="of every interface; default: not checked")
    parser.add_argument("--max-error-ratio", type=float, default=1e-4, help="default: %(default)s")
    parser.add_argument("--ib", action="append", default=[], metavar="DEVICE[:PORT]")
    parser.add_argument("--ib-rate-gbit", type=float, help="of every port; default: not checked")
    parser.add_argument("--max-link-downed", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--max-symbol-errors", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--proc", type=Path, default=Path("/proc"))
    parser.add_argument("--sys", type=Path, default=Path("/sys"))
    main("nic", parser, look)
