"""The manager's side alone: control plane, detector and fabric, for so many nodes; no job. Prints what is up.

`python -m benchmarks.mpi_heartbeats.manager NODES auto|off`; the job's secret on stdin. Until stdin is closed.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from flashrec.config.schema import Fabric as Settings
from flashrec.core.detection import Detector
from flashrec.core.limits import Timing
from flashrec.manager.control import ControlPlane
from flashrec.manager.fabric import Fabric
from flashrec.manager.rendezvous import Rendezvous
from flashrec.transport.stream import listen_tcp
from flashrec.wire import frames
from flashrec.wire import messages as m

TICK_S = 0.1
BEAT_S = 0.25
ADDRESS = "127.0.0.1"


def _tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


async def run(count: int, mode: str, secret: bytes) -> None:
    nodes = [f"n{number}" for number in range(count)]
    detector = Detector(Timing())
    verdicts: list[str] = []

    def judge(found: list[Any]) -> None:
        verdicts.extend(f"{verdict.node} {verdict.state}: {verdict.reason}" for verdict in found)

    def note(what: str, **fields: Any) -> None:
        if what == "fabric hub loaded":
            _tell(hub=fields["pid"])
        elif what == "fabric session ended":
            _tell(ended=f"{fields['node']}: {fields['why']}")

    def welcome(incarnation: int) -> m.AgentWelcome:
        return m.AgentWelcome(incarnation, 1, count, BEAT_S, 1e6, 30.0, 1.0, "/", {})

    control = ControlPlane(
        nodes, detector, Rendezvous({}.get), welcome, lambda event: None, judge, lambda what, **fields: None
    )
    server = await listen_tcp(ADDRESS, 0, secret, frames.to_manager, control.serve, control.refused)
    tasks = []
    fabric = Fabric(Settings(), ADDRESS, control.links, detector, control.send, judge, note, sys.exit)
    if mode != "off":
        control.hear_fabric = fabric.said
        tasks.append(asyncio.create_task(fabric.run()))
        await fabric.usable()
    _tell(port=server.sockets[0].getsockname()[1])
    up, told_at = -1, 0.0
    over = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    while not over.done():
        judge(detector.tick(time.monotonic()).verdicts)
        now = len(control.links) if mode == "off" else sum(state == "up" for state in fabric.states().values())
        if (now != up and time.monotonic() - told_at > 0.5) or verdicts:
            up, told_at = now, time.monotonic()
            _tell(up=now, verdicts=verdicts)
            verdicts.clear()
        await asyncio.sleep(TICK_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]), sys.argv[2], bytes.fromhex(sys.stdin.readline())))
