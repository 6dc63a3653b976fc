"""The thin launcher of one task: `python -m flashrec.agent.launch … --key K --secret F --launch N -- COMMAND…`.

Slurm starts one per task, with all of Slurm's binding in place. It asks the agent of its node which rank it is, sends
its output to the file of that rank and incarnation, and then *becomes* the user's command (exec): no process of ours
stays between Slurm and the training script. It imports neither torch nor the rest of the agent.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from pathlib import Path

from flashrec.agent.paths import this_node
from flashrec.transport.handshake import connect_authenticated, read_secret
from flashrec.transport.paths import socket_path
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
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the user's command")
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    try:
        answer = _ask(socket_path(args.key, this_node(), args.tmp), read_secret(args.secret), args.launch)
        if isinstance(answer, messages.TaskRefused):
            sys.exit(_say(f"not started: {answer.reason}", EXIT_REFUSED))
        _redirect(answer.output)
    except (OSError, ValueError, LookupError, frames.ProtocolError) as err:
        sys.exit(_say(f"not started on node {os.environ.get('SLURMD_NODENAME', '?')}: {err}", EXIT_REFUSED))
    os.environ.update(answer.env)
    try:
        os.execvp(command[0], command)
    except OSError as err:
        sys.exit(_say(f"cannot run {command[0]}: {err.strerror}", 127))


def _ask(path: Path, secret: bytes, launch: int) -> messages.TaskAssigned | messages.TaskRefused:
    if os.getpgrp() != os.getpid():
        os.setsid()  # Slurm puts all tasks of a node into the group of the first: each needs its own to be killed alone
    local_id = int(os.environ.get("SLURM_LOCALID", "0"))
    with socket.socket(socket.AF_UNIX) as sock:
        _connect(sock, path)
        connect_authenticated(sock, secret)
        sock.settimeout(ANSWER_TIMEOUT_S)
        sock.sendall(frames.frame(frames.encode(messages.TaskStarting(launch, local_id, os.getpid()))))
        reader = frames.FrameReader()
        while True:
            data = sock.recv(65536)
            if not data:
                return messages.TaskRefused("the agent closed the connection")
            for payload in reader.feed(data):
                answer = frames.to_worker.decode(payload)
                if isinstance(answer, messages.TaskAssigned | messages.TaskRefused):
                    return answer


def _connect(sock: socket.socket, path: Path) -> None:
    """The agent may be a moment late (a node that has just come back)."""
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while True:
        try:
            sock.connect(str(path))
            return
        except OSError as err:
            if time.monotonic() > deadline:
                sys.exit(_say(f"no agent at {path}: {err.strerror}", EXIT_REFUSED))
            time.sleep(0.05)


def _redirect(output: str) -> None:
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")


def _say(text: str, code: int) -> int:
    print(f"flashrec: {text}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    main()
