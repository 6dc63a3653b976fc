from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flashrec.runtime.torch_private import reconfigure
from tests.runtime import programs
from tests.runtime.support import Cluster


@pytest.fixture(params=["inplace", "native"] if reconfigure.is_there() else ["inplace"])
def engine(request: pytest.FixtureRequest) -> str:
    """Each engine that the installed torch offers, for FLASHREC_ENGINE."""
    return str(request.param)


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(world_size: int, **options: Any) -> Cluster:
        made.append(Cluster(tmp_path / f"job{len(made)}", world_size, **options))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[int, dict[str, Any]]]:
    """Results of `programs.train` without a fault, computed once for each configuration."""
    cache: dict[str, dict[int, dict[str, Any]]] = {}

    def run(world_size: int = 3, **config: Any) -> dict[int, dict[str, Any]]:
        key = json.dumps([world_size, config], sort_keys=True)
        if key not in cache:
            cluster = Cluster(tmp_path_factory.mktemp("undisturbed"), world_size)
            try:
                cluster.start_all(programs.train, **config)
                cluster.await_end()
                cache[key] = cluster.results()
            finally:
                cluster.close()
        return cache[key]

    return run
