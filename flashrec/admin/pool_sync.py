"""The edge around `pool`: gather facts from Slurm, carry out actions, one sync at a time, bounded in time.

Whatever cannot be asked ends the sync before anything was changed: an empty answer to a failed question would empty the
pool. Every action is idempotent, so a sync that died half-way is mended by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pwd
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from flashrec.admin.doctor.plugstack import PluginLine, our_lines, read_stack
from flashrec.admin.pool import (
    DRAIN_PREFIX,
    FLAGS,
    Action,
    CancelJob,
    Complain,
    CreatePool,
    DeletePool,
    ExtendPool,
    PoolConfig,
    PoolFacts,
    SetNodes,
    plan_sync,
)
from flashrec.slurm.scheduler import NodeInfo, Scheduler, SlurmError

SYNC_TIMEOUT_S = 90.0
_SETTLE_TIMEOUT_S = 10.0
_REASON_BYTES = 80


class PoolError(Exception):
    """The message says what to do."""


def read_config(plugstack: Path, base: PoolConfig) -> PoolConfig:
    """`base` with what the arguments of our line in plugstack.conf say. Raises PoolError."""
    try:
        lines = our_lines(read_stack(plugstack))
    except OSError as err:
        raise PoolError(f"cannot read {plugstack}: {err.strerror} (option --plugstack)") from err
    return config_of(lines[0], base) if lines else base


def config_of(line: PluginLine, base: PoolConfig) -> PoolConfig:
    """`base` with what the arguments of this line say. Raises PoolError."""
    size = line.argument("size")
    if size is not None and not size.isdigit():
        raise PoolError(f"{line.source}: size={size} is not a number of nodes")
    return PoolConfig(
        name=line.argument("pool") or base.name,
        feature=line.argument("feature") or base.feature,
        size=base.size if size is None else int(size),
        substitutes=line.argument("substitutes") or base.substitutes,
        users=base.users,
    )


def site_limits(plugstack: Path) -> dict[str, str]:
    """The pool's limits, as plugstack.conf has them or by default."""
    limits = {"max_per_job": "2", "max_per_user": "4", "max_per_partition": "none"}
    limits |= {"extend": "0", "delay": "0", "drain": "admin", "max_drain": "2"}
    with contextlib.suppress(OSError):
        for line in our_lines(read_stack(plugstack)):
            limits |= {key: value for key in limits if (value := line.argument(key)) is not None}
    return limits


async def gather(scheduler: Scheduler) -> PoolFacts:
    """Raises SlurmError, SlurmUnavailable if anything could not be asked."""
    nodes = await scheduler.nodes()
    reservations = await scheduler.reservations()
    return PoolFacts(nodes=nodes, reservations=reservations, jobs=await scheduler.jobs())


async def sync(
    scheduler: Scheduler, config: PoolConfig, now: float, say: Callable[[str], None], *, dry_run: bool
) -> bool:
    """Bring the pool in order; True if nothing is left to complain about. Raises SlurmError, TimeoutError."""
    async with asyncio.timeout(SYNC_TIMEOUT_S):
        actions = plan_sync(config, await gather(scheduler), now)
        failed = [action for action in actions if not await _try(scheduler, config, action, say, dry_run)]
    if not actions:
        say(f"pool {config.name}: nothing to do")
    return not failed


async def _try(
    scheduler: Scheduler, config: PoolConfig, action: Action, say: Callable[[str], None], dry_run: bool
) -> bool:
    """One action that Slurm refuses does not keep the others from being done."""
    say(f"{'would ' if dry_run and not isinstance(action, Complain) else ''}{describe(config, action)}")
    if isinstance(action, Complain):
        return False
    if not dry_run:
        try:
            await _apply(scheduler, config, action)
        except SlurmError as err:
            say(f"failed: {err}")
            return False
    return True


async def _apply(scheduler: Scheduler, config: PoolConfig, action: Action) -> None:
    match action:
        case CreatePool():
            await scheduler.create_reservation(
                config.name, nodes=action.nodes, users=config.users, flags=FLAGS - {"SPEC_NODES"}
            )
        case DeletePool():
            await scheduler.delete_reservation(config.name)
        case SetNodes():
            await scheduler.update_reservation(config.name, nodes=action.nodes)
        case ExtendPool():
            await scheduler.update_reservation(config.name, duration=str(action.minutes))
        case CancelJob():
            await scheduler.cancel(action.job_id)


def describe(config: PoolConfig, action: Action) -> str:
    match action:
        case CreatePool():
            return f"create reservation {config.name} with {','.join(action.nodes)}: {action.reason}"
        case DeletePool():
            return f"delete reservation {config.name}: {action.reason}"
        case SetNodes():
            return f"set the nodes of {config.name} to {','.join(action.nodes)}: {action.reason}"
        case ExtendPool():
            return f"let {config.name} last another year: {action.reason}"
        case CancelJob():
            return f"cancel job {action.job_id}: {action.reason}"
        case Complain():
            return f"pool {config.name}: {action.reason}"


async def take_out(scheduler: Scheduler, config: PoolConfig, name: str, why: str) -> None:
    """Drain a node of the pool, with our prefix. Raises PoolError for a node that is not ours to touch."""
    node = await _pool_node(scheduler, config, name)
    if "DRAIN" in node.states:
        if node.reason.startswith(DRAIN_PREFIX):
            return
        raise PoolError(f"node {name} is drained already, for another reason: {_shown(node.reason)!r}")
    await scheduler.drain(name, DRAIN_PREFIX + _shown(why))


async def put_back(scheduler: Scheduler, config: PoolConfig, name: str) -> None:
    """Undo `take_out`, and only that; return when Slurm can use the node, or after a while. Raises PoolError."""
    node = await _pool_node(scheduler, config, name)
    if "DRAIN" not in node.states:
        return
    if not node.reason.startswith(DRAIN_PREFIX):
        raise PoolError(
            f"node {name} was not drained by `flashrec pool drain` but for {_shown(node.reason)!r}; "
            f"if that is mended: scontrol update nodename={name} state=resume"
        )
    await scheduler.undrain(name)
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S  # until its next ping Slurm says that it does not respond
    while not (await scheduler.nodes([name]))[name].is_usable and time.monotonic() < deadline:
        await asyncio.sleep(0.2)


async def _pool_node(scheduler: Scheduler, config: PoolConfig, name: str) -> NodeInfo:
    node = (await scheduler.nodes([name]))[name]
    held = await scheduler.reservation(config.name)
    if config.feature not in node.features and (held is None or name not in held.nodes):
        raise PoolError(f"node {name} does not belong to pool {config.name} (no feature {config.feature})")
    return node


def _shown(text: str) -> str:
    """Text that somebody typed, as one line of printable ASCII."""
    return "".join(char if " " <= char <= "~" else "?" for char in text)[:_REASON_BYTES]


@contextlib.contextmanager
def alone(name: str, folder: Path | None = None) -> Iterator[None]:
    """One sync at a time on this machine; PoolError if there is another one. The kernel drops the lock with us.

    Not in /tmp, where anybody could make the file first and hold the lock."""
    place = folder or Path("/run" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_dir)
    path = place / f"{'' if os.geteuid() == 0 else '.'}flashrec-pool-{name}-{os.geteuid()}.lock"
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as err:
        raise PoolError(f"cannot lock {path}: {err.strerror}") from err
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise PoolError(f"another sync of pool {name} is running (lock {path})") from None
    try:
        yield
    finally:
        os.close(lock)


def override(config: PoolConfig, **wanted: Any) -> PoolConfig:
    """`config` with those values that were given on the command line."""
    return msgspec.structs.replace(config, **{key: value for key, value in wanted.items() if value is not None})
