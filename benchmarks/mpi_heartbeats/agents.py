"""Agents without workers: the control connection, its heartbeats, and a beater each; several in one process, or one.

`python -m benchmarks.mpi_heartbeats.agents PORT FIRST COUNT auto|off`; the job's secret on stdin, until it is closed.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

import flashrec
from benchmarks.mpi_heartbeats.manager import ADDRESS
from flashrec.agent.fabric import Fabric
from flashrec.transport.stream import connect_tcp
from flashrec.wire import frames
from flashrec.wire import messages as m

_START_S = 60.0
_STARTS_AT_ONCE = 4  # on a cluster each node starts one; here they would all fight for the same cores


async def live(port: int, name: str, secret: bytes, turns: asyncio.Semaphore, has_fabric: bool) -> None:
    """One life of one agent, as agent.app leads it."""
    async with turns:
        channel = await connect_tcp(ADDRESS, port, secret, frames.to_agent, 30)
        channel.send(m.AgentHello(name, 1, os.getpid(), ADDRESS, flashrec.__version__))
        messages = channel.messages()
        welcome = await anext(messages)
        assert isinstance(welcome, m.AgentWelcome), welcome
        fabric = Fabric(welcome.incarnation, ADDRESS, channel.send)
        tasks = [asyncio.create_task(_beat(channel, fabric, welcome)), asyncio.create_task(_listen(messages, fabric))]
        deadline = time.monotonic() + _START_S
        while has_fabric and fabric.sent == (0, 0) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await fabric.close()


async def _listen(messages: Any, fabric: Fabric) -> None:
    async for message in messages:
        if isinstance(message, m.FabricOffered | m.FabricPort):
            fabric.take(message)


async def _beat(channel: Any, fabric: Fabric, welcome: m.AgentWelcome) -> None:
    sequence = 0
    while True:
        sequence += 1
        channel.send(m.AgentHeartbeat(welcome.incarnation, sequence, (), fabric=fabric.sent))
        await asyncio.sleep(welcome.heartbeat_interval_s)


async def run(port: int, first: int, count: int, mode: str, secret: bytes) -> None:
    turns = asyncio.Semaphore(_STARTS_AT_ONCE)
    lives = [
        asyncio.create_task(live(port, f"n{n}", secret, turns, mode != "off")) for n in range(first, first + count)
    ]
    await asyncio.to_thread(sys.stdin.read)
    for task in lives:
        task.cancel()
    await asyncio.gather(*lives, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(run(*(int(word) for word in sys.argv[1:4]), sys.argv[4], bytes.fromhex(sys.stdin.readline())))
