"""The parked tasks of one node: who has come, who is ready, who gets a rank, who has gone.

A parked task is watched from its launcher's first word on, like a worker, and is ended like one: with its group, and
whenever this life of the agent is over. It never speaks for a rank; when it gets one it stops being of this module.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from flashrec.agent.life import Worker
from flashrec.agent.process import WatchedProcess
from flashrec.wire import messages as m

_SAID_BYTES = 2000


class ParkedTask:
    """One of them. taken: it has confirmed its rank."""

    def __init__(self, asked: m.TaskParking, channel: Worker, process: WatchedProcess, output: Path) -> None:
        self.launch, self.local_id = asked.launch, asked.local_id
        self.channel, self.process, self.output = channel, process, output
        self.is_ready = False
        self.taken = asyncio.Event()

    @property
    def key(self) -> tuple[int, int]:
        return self.launch, self.local_id


class ParkedTasks:
    """relay: to the manager. env: what each of them gets before it has a rank."""

    def __init__(self, output_dir: Path, env: Mapping[str, str], relay: Callable[[m.Sendable], None]) -> None:
        self._output_dir, self._env, self._relay = output_dir, dict(env), relay
        self._tasks: dict[tuple[int, int], ParkedTask] = {}
        self._closed = ""

    async def serve(self, channel: Worker, asked: m.TaskParking, messages: AsyncIterator[m.ToAgentFromWorker]) -> None:
        """One task, from its launcher's question until its connection ends."""
        refusal = self._closed or asked.objection
        process = None
        if not refusal:
            try:
                process = WatchedProcess(channel.peer_pid)
            except ProcessLookupError:
                refusal = "it is gone already"
            except OSError as err:
                refusal = f"the agent cannot watch process {channel.peer_pid}: {err.strerror}"
        if process is None:
            channel.send(m.TaskRefused(refusal))
            self._relay(m.ParkedEnded(asked.launch, asked.local_id, refusal))
            await channel.drain_and_close()
            return
        output = self._output_dir / f"parked-{asked.launch}.{asked.local_id}-{process.pid}.log"
        parked = self._tasks[asked.launch, asked.local_id] = ParkedTask(asked, channel, process, output)
        asyncio.get_running_loop().add_reader(process.fileno(), self._ended, parked)
        channel.send(m.ParkingAllowed(self._env, str(output)))
        async for message in messages:
            if isinstance(message, m.TaskReady) and not parked.is_ready:
                parked.is_ready = True
                self._relay(m.ParkedReady(parked.launch, parked.local_id, message.took_s))
            elif isinstance(message, m.TaskTaken):
                parked.taken.set()
                return

    def _ended(self, parked: ParkedTask) -> None:
        said = _last_line(parked.output)
        self._forget(parked)
        parked.process.kill_group()
        parked.process.close()
        self._relay(m.ParkedEnded(*parked.key, said, ran=True))

    def _forget(self, parked: ParkedTask) -> None:
        asyncio.get_running_loop().remove_reader(parked.process.fileno())
        self._tasks.pop(parked.key, None)
        with contextlib.suppress(OSError):
            if parked.output.stat().st_size == 0:
                parked.output.unlink()

    def take(self, launch: int, local_id: int) -> ParkedTask | None:
        """This one is to get a rank: it is the caller's from now on. None: it is not there or cannot be used, and the
        manager has been told."""
        parked = self._tasks.get((launch, local_id))
        if parked is None:
            self._relay(m.ParkedEnded(launch, local_id, "there is no such parked task"))
            return None
        if not parked.is_ready or parked.process.is_stopped():
            parked.process.kill()  # its end is told when it is seen
            return None
        self._forget(parked)
        return parked

    def end(self, launch: int) -> None:
        """Those of this launch are not wanted."""
        for parked in self._tasks.values():
            if parked.launch == launch:
                parked.process.kill()

    def close(self, reason: str) -> None:
        """End all of them, and let nobody park any more."""
        self._closed = reason
        for parked in self._tasks.values():
            parked.process.kill()

    @property
    def is_empty(self) -> bool:
        return not self._tasks


def _last_line(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _SAID_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError as err:
        return f"what it said cannot be read: {err.strerror}"
    return lines[-1] if lines else "it said nothing"
