"""The environment of a worker, read in this one place. Set by the launcher; without FLASHREC_SOCKET nothing is on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flashrec.runtime.interrupt import DEFAULT_SIGNAL, signal_of

ENGINES = ("", "native", "inplace")


class BadEnvironment(RuntimeError):
    """FLASHREC_SOCKET is set, but the rest of what the launcher sets is missing or not usable."""


@dataclass(frozen=True)
class Environment:
    """What the launcher told this worker."""

    rank: int
    local_rank: int
    world_size: int
    socket: Path  # unix socket of the agent on this node
    secret_file: Path
    incarnation: int
    generation: int
    joins: bool  # True: the groups exist elsewhere; build the model alone, then be restored
    gloo_interface: str  # GLOO_SOCKET_IFNAME, "" when the agent's address is to be used
    engine: str = ""  # FLASHREC_ENGINE: 'native' or 'inplace'; "": what fits torch
    node: str = ""  # FLASHREC_NODE, or Slurm's SLURMD_NODENAME; "": not known
    switch: str = ""  # of that node: SLURM_TOPOLOGY_ADDR without its last part; "": not known
    resized: int = 0  # FLASHREC_RESIZED: the generation in which a former world has put its state aside; 0: none has
    former: int = -1  # FLASHREC_FORMER: the rank of that world whose state is on this node; -1: none is
    interrupt_signal: int | None = None  # FLASHREC_INTERRUPT_SIGNAL; None: none is sent


def num_on_node() -> int:
    """Ranks on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def read(environ: Mapping[str, str]) -> Environment | None:
    """Environment of this worker, or None when it does not run under `flashrec run`. Raises BadEnvironment."""
    socket = environ.get("FLASHREC_SOCKET", "")
    if not socket:
        return None

    def number(name: str) -> int:
        try:
            return int(environ[name])
        except KeyError:
            raise BadEnvironment(
                f"FLASHREC_SOCKET is set but {name} is not: start the script with `flashrec run`"
            ) from None
        except ValueError:
            raise BadEnvironment(f"{name}={environ[name]!r} is not a number") from None

    secret = environ.get("FLASHREC_SECRET_FILE", "")
    if not secret:
        raise BadEnvironment("FLASHREC_SOCKET is set but FLASHREC_SECRET_FILE is not: start with `flashrec run`")
    found = Environment(
        rank=number("RANK"),
        local_rank=number("LOCAL_RANK"),
        world_size=number("WORLD_SIZE"),
        socket=Path(socket),
        secret_file=Path(secret),
        incarnation=number("FLASHREC_INCARNATION"),
        generation=number("FLASHREC_GENERATION"),
        joins=environ.get("FLASHREC_JOINS", "") == "1",
        gloo_interface=environ.get("GLOO_SOCKET_IFNAME", ""),
        engine=environ.get("FLASHREC_ENGINE", ""),
        node=environ.get("FLASHREC_NODE", "") or environ.get("SLURMD_NODENAME", ""),
        switch=environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0],
        resized=number("FLASHREC_RESIZED") if "FLASHREC_RESIZED" in environ else 0,
        former=number("FLASHREC_FORMER") if "FLASHREC_FORMER" in environ else -1,
        interrupt_signal=_signal(environ.get("FLASHREC_INTERRUPT_SIGNAL", DEFAULT_SIGNAL)),
    )
    if found.engine not in ENGINES:
        raise BadEnvironment(f"FLASHREC_ENGINE={found.engine!r} is not known; use native or inplace, or unset it")
    if not 0 <= found.rank < found.world_size:
        raise BadEnvironment(f"RANK={found.rank} is not below WORLD_SIZE={found.world_size}")
    return found


def _signal(name: str) -> int | None:
    try:
        return signal_of(name)
    except ValueError as err:
        raise BadEnvironment(f"FLASHREC_INTERRUPT_SIGNAL: {err}") from None
