"""What the job's user asks of a running manager: `JOBDIR/requests/`, a folder that only the user can write to.

    ID.ask      {"verb": "replace" | "drain" | "drop", "node": NODE, "reason": TEXT, "now": BOOL}, by `flashrec VERB`;
                appears whole. now: do not wait for a step boundary
    ID.answer   {"is_done": BOOL, "said": TEXT}, by the manager; then ID.ask is gone

Who may ask is decided by the file system: the folder has mode 0700, and only a plain small file of our own user is
read. So no secret travels and no port is opened; it works from every node that sees the job directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import stat
import time
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from flashrec.core.machine import Machine

POLL_INTERVAL_S = 0.25
MAX_ASK_BYTES = 4096
_ID = re.compile(r"[0-9a-f]{16}")


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    verb: Literal["replace", "drain", "drop"]
    node: str
    reason: str = ""
    now: bool = False


class Answer(msgspec.Struct, frozen=True):
    """said: what was done, or why it was not."""

    is_done: bool
    said: str


class Job(Protocol):
    """The manager, as far as wishes go. Each returns '' if done, or why not."""

    def replace_node(self, node: str, reason: str, now: bool) -> str: ...

    def report_faulty(self, node: str, reason: str) -> str: ...

    def drop_node(self, node: str, reason: str) -> str: ...


class Wishes:
    """Answers what is asked in `job_dir/requests` until cancelled. Files are looked at in a thread: the job directory
    may be on a file server that hangs, and the manager must not."""

    def __init__(self, job: Job, job_dir: Path) -> None:
        self._job, self._folder = job, job_dir / "requests"

    async def run(self) -> None:
        try:
            held, is_new = await asyncio.to_thread(self._hold)
        except OSError:
            return  # no place to ask: the job is as good as without
        try:
            if is_new or await asyncio.to_thread(self._prepare, held):
                self._folder = Path(f"/proc/self/fd/{held}")
                await self._serve()
        finally:
            os.close(held)

    async def _serve(self) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            with contextlib.suppress(OSError):
                for path, asked in await asyncio.to_thread(self._look):
                    answer = asked if isinstance(asked, Answer) else self._grant(asked)
                    await asyncio.to_thread(_reply, path, answer)

    def _hold(self) -> tuple[int, bool]:
        """A handle on the folder, which is made if need be; True if we made exactly this one."""
        made = None
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir(mode=0o700)
            made = os.lstat(self._folder).st_ino
        held = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        seen = os.fstat(held)
        return held, seen.st_ino == made and seen.st_uid == os.geteuid() and stat.S_IMODE(seen.st_mode) == 0o700

    def _prepare(self, held: int) -> bool:
        """The folder must be ours and closed to others, whatever the job directory's mode. From now on it is the one
        that is held, not what whoever may write to the job directory puts in its place."""
        try:
            if os.fstat(held).st_uid != os.geteuid():
                return False
            os.fchmod(held, 0o700)
            for old in Path(f"/proc/self/fd/{held}").iterdir():
                old.unlink()
        except OSError:
            return False
        return True

    def _look(self) -> list[tuple[Path, Ask | Answer]]:
        """What is asked now; an answer at once for what cannot be read."""
        found: list[tuple[Path, Ask | Answer]] = []
        for path in sorted(self._folder.glob("*.ask")):
            if _ID.fullmatch(path.stem):
                try:
                    found.append((path, msgspec.json.decode(_read(path), type=Ask)))
                except (OSError, ValueError, msgspec.DecodeError) as err:
                    found.append((path, Answer(False, f"cannot read the request: {err}")))
        return found

    def _grant(self, ask: Ask) -> Answer:
        reason = f"{ask.verb} asked for{f': {ask.reason}' if ask.reason else ''}"
        if ask.verb == "drop":
            objection = self._job.drop_node(ask.node, reason)
            return Answer(not objection, objection or f"node {ask.node} is not used by this job any more")
        objection = self._job.replace_node(ask.node, reason, ask.now)
        if objection:
            return Answer(False, objection)
        done = f"node {ask.node} {'is being replaced' if ask.now else 'leaves at a step boundary'}"
        if ask.verb == "replace":
            return Answer(True, done)
        problem = self._job.report_faulty(ask.node, ask.reason or "drain asked for")
        said = problem or "reported; the site's epilog drains it when the job has ended, if the site allows it"
        return Answer(not problem, f"{done}; {said}")


def has_room_without(node: str, machine: Machine) -> bool:
    """Another trusted node has room for the ranks of this one, or the job may still ask a pool."""
    needed = sum(1 for _ in machine.members.on_node(node))
    rooms = machine.members.rooms(machine.limits.max_in_place)
    free = sum(len(room.free_local_ranks) for room in rooms if room.trusted and room.name != node)
    return free >= needed or machine.pool.num_granted < machine.pool.limits.max_swaps


def ask(job_dir: Path, wish: Ask, timeout_s: float) -> Answer:
    """The other side: leave a request and wait for its answer. Raises OSError, TimeoutError."""
    folder = job_dir / "requests"
    path = folder / f"{secrets.token_hex(8)}.ask"
    _write(path, msgspec.json.encode(wish))
    deadline = time.monotonic() + timeout_s
    answer = path.with_suffix(".answer")
    while not answer.exists():
        if time.monotonic() > deadline:
            path.unlink(missing_ok=True)
            raise TimeoutError(f"no answer within {timeout_s:g} s: the manager is busy or gone (flashrec status)")
        time.sleep(POLL_INTERVAL_S / 2)
    content = answer.read_bytes()
    answer.unlink()
    return msgspec.json.decode(content, type=Answer)


def _read(path: Path) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        seen = os.fstat(file)
        if not stat.S_ISREG(seen.st_mode) or seen.st_uid != os.geteuid() or seen.st_size > MAX_ASK_BYTES:
            raise ValueError("not a plain small file of this user")
        return os.read(file, MAX_ASK_BYTES)
    finally:
        os.close(file)


def _reply(path: Path, answer: Answer) -> None:
    path.unlink()
    _write(path.with_suffix(".answer"), msgspec.json.encode(answer))


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all."""
    draft = path.with_suffix(".new")
    draft.write_bytes(content)
    draft.replace(path)
