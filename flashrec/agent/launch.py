"""The thin launcher of one task: `python -m flashrec.agent.launch … --key K --secret F --launch N -- COMMAND…`.

Slurm starts one per task, with all of Slurm's binding in place. It asks the agent of its node which rank it is, sends
its output to the file of that rank and incarnation, and then *becomes* the user's command (exec): no process of ours
stays between Slurm and the training script. It imports neither torch nor the rest of the agent.

With --park there is no rank yet: it becomes the interpreter of the user's command, which imports what takes long and
then waits (`agent.park`). What is said: `transport.task`.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from pathlib import Path

from flashrec.agent import memory, park
from flashrec.agent.paths import this_node
from flashrec.transport.handshake import connect_authenticated, read_secret
from flashrec.transport.paths import socket_path
from flashrec.transport.task import Line, Refused, redirect
from flashrec.transport.task import park as park_process
from flashrec.wire import frames, messages

EXIT_REFUSED = 76
ANSWER_TIMEOUT_S = 60.0


def main() -> None:
    """Never returns: ends as the user's command, or with EXIT_REFUSED."""
    parser = argparse.ArgumentParser(
        prog="flashrec.agent.launch", description="start one worker (used by flashrec run)"
    )
    parser.add_argument("--key", required=True, help="key of the job's sockets")
    parser.add_argument("--tmp", default="", help="the manager's directory for sockets")
    parser.add_argument("--exit-socket", help="read by Slurm's plugin, not by us (docs/reference/plugin-contract.md)")
    parser.add_argument("--secret", required=True, type=Path, help="file with the job secret")
    parser.add_argument("--launch", required=True, type=int, help="number of this launch")
    parser.add_argument(
        "--park", choices=("imports", "script"), help="park the task: how far it may run without a rank"
    )
    parser.add_argument("--flags", type=int, default=0, help="with --park: how many words of the command are python's")
    parser.add_argument("--import", dest="imports", default="", help="with --park: modules, with commas between")
    parser.add_argument("--memory-mb", type=float, default=0.0, help="with --park: what the node must have to spare")
    parser.add_argument("--cuda", action="store_true", help="with --park: make a CUDA context, too")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the user's command")
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    argv, begin = command, _begin_parked if args.park else _begin
    try:
        begin(args, socket_path(args.key, this_node(), args.tmp), read_secret(args.secret))
        if args.park:
            device = str(_local_id()) if args.cuda else ""
            argv = park.argv(command, args.flags, args.park, args.imports.split(","), device)
    except Refused as err:
        sys.exit(_say(f"not started: {err}", EXIT_REFUSED))
    except (OSError, ValueError, LookupError, frames.ProtocolError) as err:
        sys.exit(_say(f"not started on node {os.environ.get('SLURMD_NODENAME', '?')}: {err}", EXIT_REFUSED))
    try:
        os.execvp(argv[0], argv)
    except OSError as err:
        sys.exit(_say(f"cannot run {argv[0]}: {err.strerror}", 127))


def _begin(args: argparse.Namespace, path: Path, secret: bytes) -> None:
    """Take rank, environment and output."""
    with _reach(path, secret) as sock:
        line = Line(sock)
        line.say(messages.TaskStarting(args.launch, _local_id(), os.getpid()))
        answer = line.hear()
        while not isinstance(answer, messages.TaskAssigned):
            answer = line.hear()
    _prepare(answer.output, answer.env)


def _begin_parked(args: argparse.Namespace, path: Path, secret: bytes) -> None:
    """Take what there is before the rank is known, and leave the connection open for the rest."""
    sock = _reach(path, secret)
    line = Line(sock)
    line.say(messages.TaskParking(args.launch, _local_id(), memory.objection(args.memory_mb)))
    answer = line.hear()
    while not isinstance(answer, messages.ParkingAllowed):
        answer = line.hear()
    park_process(sock)
    _prepare(answer.output, answer.env)


def _reach(path: Path, secret: bytes) -> socket.socket:
    """A connection to the agent. It may be a moment late (a node that has just come back)."""
    if os.getpgrp() != os.getpid():
        os.setsid()  # Slurm puts all tasks of a node into the group of the first: each needs its own to be killed alone
    sock = socket.socket(socket.AF_UNIX)
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while True:
        try:
            sock.connect(str(path))
            break
        except OSError as err:
            if time.monotonic() > deadline:
                raise Refused(f"no agent at {path}: {err.strerror}") from err
            time.sleep(0.05)
    connect_authenticated(sock, secret)
    sock.settimeout(ANSWER_TIMEOUT_S)
    return sock


def _prepare(output: str, environ: dict[str, str]) -> None:
    redirect(output)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    os.environ.update(environ)


def _local_id() -> int:
    return int(os.environ.get("SLURM_LOCALID", "0"))


def _say(text: str, code: int) -> int:
    print(f"flashrec: {text}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    main()
