"""The Scheduler through pyslurm in a helper process; the command line takes over, for good, when the helper fails.

Loads of jobs and nodes and the writes to them go to the helper, everything else is the command line's. Whatever the
helper does (it ends, hangs, or answers what cannot be read) is reported once. The call it ended in is then made by the
command line, writes too: each of them may be done twice. One that hung raises SlurmUnavailable: its time is up. Where
only pyslurm failed, which a user can bring about by a job's name, the command line answers that call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from flashrec.slurm import words
from flashrec.slurm.cli import CliScheduler, asked_for, chosen
from flashrec.slurm.command import CALL_TIMEOUT_S, Commands, Wrap, plain_environment
from flashrec.slurm.pyslurm_helper import Question, Reply
from flashrec.slurm.scheduler import JobInfo, NodeInfo, SlurmError, SlurmUnavailable

logger = logging.getLogger(__name__)
HELPER = (sys.executable, "-m", "flashrec.slurm.pyslurm_helper")
_MAX_LINE_BYTES = 256 * 1024 * 1024  # tens of thousands of jobs in one answer
_END_TIMEOUT_S = 1.0


class HelperFailed(Exception):
    """The helper is of no use any more."""


class Helper:
    """One helper process, started with the first question. One question at a time."""

    def __init__(self, timeout_s: float, argv: Sequence[str], wrap: Wrap) -> None:
        self._timeout_s, self._argv, self._wrap = timeout_s, argv, wrap
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def ask(self, call: str, **args: Any) -> Reply:
        """HelperFailed if it ended or answered nonsense, SlurmUnavailable if there was no answer in time; either way
        the process is gone then."""
        async with self._turn:
            try:
                async with asyncio.timeout(self._timeout_s):
                    process = await self._started()
                    assert process.stdin is not None
                    process.stdin.write(msgspec.json.encode(Question(call, args)) + b"\n")
                    await process.stdin.drain()
                    return await _reply(process)
            except TimeoutError as err:
                await self.close()
                raise SlurmUnavailable(f"pyslurm did not answer within {self._timeout_s:g} s") from err
            except (OSError, ValueError) as err:
                await self.close()
                raise HelperFailed(str(err) or type(err).__name__) from err
            except (HelperFailed, asyncio.CancelledError):
                await self.close()
                raise

    async def close(self) -> None:
        """End the helper and all it started; bounded."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_TIMEOUT_S):
                await process.wait()

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *self._wrap(self._argv),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=plain_environment(os.environ),
                start_new_session=True,
                limit=_MAX_LINE_BYTES,
            )
            await _reply(self._process)  # pyslurm could be imported
        return self._process


async def _reply(process: asyncio.subprocess.Process) -> Reply:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line.endswith(b"\n"):
        raise HelperFailed("the helper process ended")
    try:
        return msgspec.json.decode(line, type=Reply)
    except msgspec.DecodeError as err:
        raise HelperFailed(f"the helper answered what cannot be read: {err}") from err


class PyslurmScheduler(CliScheduler):
    """wrap: as Commands'; helper: the program to ask, for tests."""

    def __init__(self, timeout_s: float = CALL_TIMEOUT_S, wrap: Wrap = list, helper: Sequence[str] = HELPER) -> None:
        super().__init__(Commands(timeout_s, wrap))
        self._helper: Helper | None = Helper(timeout_s, helper, wrap)
        self._said: set[str] = set()

    @property
    def uses_pyslurm(self) -> bool:
        """False once the command line has taken over."""
        return self._helper is not None

    async def close(self) -> None:
        """End the helper; the command line answers from then on."""
        helper, self._helper = self._helper, None
        if helper is not None:
            await helper.close()

    async def job(self, job_id: int) -> JobInfo:
        found = await self._ask("job", JobInfo, job_id=job_id)
        return await super().job(job_id) if found is None else found

    async def jobs(
        self, user: str | None = None, name: str | None = None, states: Collection[str] | None = None
    ) -> tuple[JobInfo, ...]:
        found = await self._ask("jobs", tuple[JobInfo, ...])
        return await super().jobs(user, name, states) if found is None else chosen(found, user, name, states)

    async def nodes(self, names: Sequence[str] | None = None) -> dict[str, NodeInfo]:
        for name in names or ():
            words.node_name(name)
        found = await self._ask("nodes", tuple[NodeInfo, ...])
        return await super().nodes(names) if found is None else asked_for(found, names)

    async def cancel(self, job_id: int) -> None:
        if not await self._tell("cancel", may_refuse=True, job_id=job_id):
            await super().cancel(job_id)

    async def set_time_limit(self, job_id: int, minutes: int) -> None:
        if not await self._tell("set_time_limit", job_id=job_id, minutes=minutes):
            await super().set_time_limit(job_id, minutes)

    async def set_admin_comment(self, job_id: int, text: str) -> None:
        if not await self._tell("set_admin_comment", job_id=job_id, text=words.one_line(text)):
            await super().set_admin_comment(job_id, text)

    async def _set_drain(self, node: str, reason: str) -> None:
        if not await self._tell("drain", node=node, reason=reason):
            await super()._set_drain(node, reason)

    async def _clear_drain(self, node: str) -> None:
        if not await self._tell("undrain", node=node):
            await super()._clear_drain(node)

    async def _ask(self, call: str, kind: Any, **args: Any) -> Any:
        """The helper's answer; None if the command line is to be asked instead."""
        reply = await self._replied(call, args)
        if reply is None:
            return None
        _raise(call, args, reply)
        try:
            return msgspec.json.decode(reply.value, type=kind)
        except msgspec.DecodeError as err:
            await self._give_up(f"{call}: {err}")
            return None

    async def _tell(self, call: str, may_refuse: bool = False, **args: Any) -> bool:
        """True if the helper did it; False if the command line is to do it."""
        reply = await self._replied(call, args)
        if reply is None or (may_refuse and reply.error and reply.could_ask):
            return False  # the command line knows which refusals are none
        _raise(call, args, reply)
        return True

    async def _replied(self, call: str, args: dict[str, Any]) -> Reply | None:
        if self._helper is None:
            return None
        try:
            reply = await self._helper.ask(call, **args)
            if reply.could_read:
                return reply
            self._say_once(f"pyslurm cannot answer all questions, Slurm's commands do: {call}: {reply.error}", call)
            return None
        except HelperFailed as err:
            await self._give_up(str(err))
            return None
        except SlurmUnavailable as err:
            await self._give_up(str(err))
            raise

    async def _give_up(self, why: str) -> None:
        if self._helper is not None:
            self._say_once(f"pyslurm is not used any more, Slurm's commands are: {why}", "")
        await self.close()

    def _say_once(self, text: str, about: str) -> None:
        if about not in self._said:
            self._said.add(about)
            logger.warning("%s", text)


def _raise(call: str, args: Mapping[str, Any], reply: Reply) -> None:
    if reply.error:
        raise (SlurmError if reply.could_ask else SlurmUnavailable)(
            f"pyslurm: {' '.join(map(str, (call, *args.values())))}: {reply.error}"
        )
