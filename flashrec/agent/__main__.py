"""`python -m flashrec.agent`: started once per node by `flashrec run`, as a job step over all nodes."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import sys
from pathlib import Path

from flashrec.agent.app import Agent
from flashrec.agent.paths import this_node
from flashrec.transport.handshake import read_secret

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Parse the arguments that the manager gives, run the agent."""
    parser = argparse.ArgumentParser(prog="flashrec.agent", description="agent of one node (used by flashrec run)")
    parser.add_argument("--manager", required=True, help="host[,host…]:port of the manager")
    parser.add_argument("--key", required=True, help="key of the job's sockets")
    parser.add_argument("--tmp", default="", help="the manager's directory for sockets")
    parser.add_argument("--secret", required=True, type=Path, help="file with the job secret")
    parser.add_argument("--launch", required=True, type=int, help="number of this launch")
    parser.add_argument(
        "--reconnect", type=float, default=120.0, help="seconds without a manager before the agent ends"
    )
    parser.add_argument("--die-with-parent", action="store_true", help="end when the starting process ends")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    if args.die_with_parent:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:
            return 1
    hosts, _, port = args.manager.rpartition(":")
    try:
        agent = Agent(
            this_node(), args.launch, hosts.split(","), int(port), args.key, read_secret(args.secret), args.reconnect,
            tmp=args.tmp, expects_exits="FLASHREC_PLUGIN" in os.environ,
        )  # fmt: skip
        return asyncio.run(agent.run())
    except (OSError, ValueError, LookupError) as err:  # no shared job directory, a foreign /tmp directory, …
        logging.getLogger("flashrec.agent").error("the agent ends: %s", err, exc_info=err)
        return 1


if __name__ == "__main__":
    sys.exit(main())
