"""Clock: is it kept in step by chrony (or whatever systemd knows of), and does it agree with Slurm's controller?

munge refuses credentials when clocks differ by minutes, and logs of a failure are read across nodes long before that.
Without any time service the check says unknown, unless --controller is given and answers. The controller's clock is
read to one second, so a --max-controller-skew-s below 2 means nothing.
"""

from __future__ import annotations

import argparse
import os
import time

from _checklib import CommandError, Findings, command_output, main, parser_of


def look(args: argparse.Namespace, found: Findings) -> None:
    doubt = look_at_service(args, found)
    if not args.controller:
        if doubt:
            found.unknown(doubt)
        return
    try:
        look_at_controller(args, found)
    except CommandError as err:
        found.unknown(f"the controller's clock could not be read: {err}")


def look_at_service(args: argparse.Namespace, found: Findings) -> str:
    """Why no service could be asked; '' if one was."""
    try:
        look_at_chrony(args, found)
        return ""
    except CommandError as err:
        no_chrony = str(err)
    try:
        answer = command_output([args.timedatectl, "show", "--property=NTPSynchronized"], args.timeout_s)
    except CommandError as err:
        return f"no time service answers: {no_chrony}; {err}"
    found.facts["ntp_synchronized"] = synchronized = answer.strip() == "NTPSynchronized=yes"
    if not synchronized:
        found.warn("systemd says that the clock is not synchronized")
    return ""


def look_at_chrony(args: argparse.Namespace, found: Findings) -> None:
    fields = command_output([args.chronyc, "-c", "-n", "tracking"], args.timeout_s).strip().split(",")
    try:
        offset, leap = abs(float(fields[4])), fields[13]
    except (IndexError, ValueError) as err:
        raise CommandError(f"{args.chronyc} answered in another form than expected") from err
    found.facts |= {"offset_s": offset, "leap": leap}
    if leap == "Not synchronised":
        found.fail("chrony is not synchronised with any source")
    elif offset > args.max_offset_s:
        found.fail(f"the clock is {offset:.3f} s off, at most {args.max_offset_s:g} s wanted")


def look_at_controller(args: argparse.Namespace, found: Findings) -> None:
    """The first line of `scontrol show config` is stamped by the controller when it answers."""
    env = {**os.environ, "SLURM_TIME_FORMAT": "%s"}
    before = time.time()
    answer = command_output([args.scontrol, "show", "config"], args.timeout_s, env)
    first = answer.partition("\n")[0]
    stamp = first.rpartition(" ")[2]
    if not first.startswith("Configuration data as of ") or not stamp.isdigit():
        raise CommandError(f"{args.scontrol} answered in another form than expected")
    # the controller's second began within [before - 1, now] if the clocks agree
    skew = max(before - 1 - int(stamp), int(stamp) - time.time(), 0.0)
    found.facts["controller_skew_s"] = round(skew, 1)
    if skew > args.max_controller_skew_s:
        found.fail(f"the clock differs from the controller's by {skew:.0f} s")


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--max-offset-s", type=float, default=0.5, help="default: %(default)s")
    parser.add_argument("--controller", action="store_true", help="compare with Slurm's controller")
    parser.add_argument("--max-controller-skew-s", type=float, default=5.0, help="default: %(default)s")
    parser.add_argument("--timeout-s", type=float, default=5.0, help="for each command; default: %(default)s")
    parser.add_argument("--chronyc", default="chronyc")
    parser.add_argument("--timedatectl", default="timedatectl")
    parser.add_argument("--scontrol", default="scontrol")
    main("clock", parser, look)
