"""What the checks ask Slurm, gathered once. A fact that could not be had is a `Missing` with the reason."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Mapping
from datetime import UTC, datetime
from typing import TypeVar

import msgspec

from flashrec.slurm.command import Commands
from flashrec.slurm.scheduler import JobInfo, NodeInfo, ReservationInfo, Scheduler, SlurmError

_T = TypeVar("_T")

OLDEST, NEWEST = (22, 5), (26, 5)  # what was run: docs/admin/install.md has the table


class Missing(msgspec.Struct, frozen=True):
    """Could not look, and why."""

    why: str


class Facts(msgspec.Struct, frozen=True):
    """config: `scontrol show config`. client: version of the commands here. clock: (controller's time, ours), seconds
    since the epoch, the first cut to whole seconds. sharing: partition to OverSubscribe. help_text: `srun --help`, with
    what srun said on the side."""

    config: Mapping[str, str] | Missing
    client: tuple[int, int, int] | Missing
    clock: tuple[float, float] | Missing
    nodes: Mapping[str, NodeInfo] | Missing
    reservations: tuple[ReservationInfo, ...] | Missing
    jobs: tuple[JobInfo, ...] | Missing
    sharing: Mapping[str, str] | Missing
    help_text: tuple[str, str] | Missing

    @property
    def slurm(self) -> tuple[int, int, int] | Missing:
        """The controller's version."""
        if isinstance(self.config, Missing):
            return self.config
        return parse_version(self.config.get("SLURM_VERSION", "")) or Missing("the controller does not say its version")


async def gather(scheduler: Scheduler, commands: Commands) -> Facts:
    """Every question bounded in time (by `scheduler` and `commands`); a question that fails spoils no other."""
    return Facts(
        config=await _ask(scheduler.config()),
        client=await _ask(_client_version(commands)),
        clock=await _ask(_clock(commands)),
        nodes=await _ask(scheduler.nodes()),
        reservations=await _ask(scheduler.reservations()),
        jobs=await _ask(scheduler.jobs()),
        sharing=await _ask(_sharing(commands)),
        help_text=await _ask(_help(commands)),
    )


async def _ask(question: Awaitable[_T]) -> _T | Missing:
    try:
        return await question
    except SlurmError as error:
        return Missing(str(error).splitlines()[0])


def parse_version(text: str) -> tuple[int, int, int] | None:
    """'22.05.8', 'slurm-wlm 24.11.5' or 'slurm 26.05.0rc1'."""
    found = re.search(r"(\d\d)\.(\d\d)\.(\d+)", text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def show_version(version: tuple[int, int, int]) -> str:
    """(22, 5, 8) as Slurm writes it: '22.05.8'."""
    return "{}.{:02d}.{}".format(*version)


async def _client_version(commands: Commands) -> tuple[int, int, int]:
    text = await commands.call("sinfo", "--version")
    found = parse_version(text)
    if found is None:
        raise SlurmError(f"sinfo --version printed {text.strip()!r}")
    return found


async def _clock(commands: Commands) -> tuple[float, float]:
    """The controller writes its time above its configuration, without a zone: so we ask in one."""
    text = await commands.call("env", "TZ=UTC", "scontrol", "show", "config")
    now = time.time()
    found = re.match(r"Configuration data as of (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\s", text)
    if not found:
        raise SlurmError("scontrol show config does not begin with the controller's time")
    return datetime.fromisoformat(found[1]).replace(tzinfo=UTC).timestamp(), now


async def _sharing(commands: Commands) -> dict[str, str]:
    """Users have no say in what this prints. 26.05 says Exclusive=NODE where others say OverSubscribe=EXCLUSIVE."""
    text = await commands.call("scontrol", "--all", "--oneliner", "show", "partition")
    found = {}
    for line in text.splitlines():
        words = {key: value for key, _, value in (word.partition("=") for word in line.split())}
        if "PartitionName" in words:
            is_whole = words.get("Exclusive") == "NODE"
            found[words["PartitionName"]] = "EXCLUSIVE" if is_whole else words.get("OverSubscribe", "unknown")
    if not found:
        raise SlurmError("scontrol show partition: printed no partition")
    return found


async def _help(commands: Commands) -> tuple[str, str]:
    answer = await commands.run("srun", "--help")
    return answer.out, answer.said
