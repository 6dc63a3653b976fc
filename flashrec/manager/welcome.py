"""What an agent is told when it joins: where the job stands, how often to beat, and the environment of its workers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from flashrec.config.schema import Config
from flashrec.manager.steps import HANDED_OVER
from flashrec.wire import messages as m


def rank_environment(world_size: int, ranks_per_node: int, address: str) -> dict[str, str]:
    """Variables that all workers share. address: of the manager; torch wants some MASTER_ADDR, and nobody uses it."""
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "MASTER_ADDR": address,
        "MASTER_PORT": "29500",
        **HANDED_OVER,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def welcome(
    config: Config, incarnation: int, generation: int, world_size: int, logs: Path, env: Mapping[str, str]
) -> m.AgentWelcome:
    """The answer to an agent that joins as this incarnation."""
    detection = config.detection
    return m.AgentWelcome(
        incarnation, generation, world_size, detection.heartbeat_interval_s, config.control.lease_s,
        detection.worker_silent_s, detection.worker_stopped_s, str(logs), dict(env), health=config.health.rules(),
    )  # fmt: skip
