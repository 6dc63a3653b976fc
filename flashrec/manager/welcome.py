"""What an agent is told when it joins: where the job stands, how often to beat, and the environment of its workers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from flashrec.config.schema import Config
from flashrec.core.health import HealthRules
from flashrec.manager.steps import HANDED_OVER
from flashrec.wire import messages as m

TAGGED_RANKS = 1000  # so many may have their tags in every heartbeat
MAX_TAG_INTERVAL_S = 1.0  # less than core.hangs.FRESH_S


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


def tags_every(world_size: int, heartbeat_interval_s: float) -> int:
    """How many heartbeats of an agent there are for one with tags: in a large job the tags of all ranks would take more
    of the manager than all else. At least once in MAX_TAG_INTERVAL_S, or hangs could not be judged."""
    return max(1, min(-(-world_size // TAGGED_RANKS), int(MAX_TAG_INTERVAL_S / heartbeat_interval_s)))


def welcome(
    config: Config, incarnation: int, generation: int, world_size: int, logs: Path, env: Mapping[str, str],
    health: HealthRules,
) -> m.AgentWelcome:  # fmt: skip
    """The answer to an agent that joins as this incarnation. health: made once, for thousands of agents."""
    detection = config.detection
    return m.AgentWelcome(
        incarnation, generation, world_size, detection.heartbeat_interval_s, config.control.lease_s,
        detection.worker_silent_s, detection.worker_stopped_s, str(logs), dict(env), health=health,
        tags_every=tags_every(world_size, detection.heartbeat_interval_s),
    )  # fmt: skip
