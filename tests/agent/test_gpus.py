"""The thread that watches GPUs: whatever the driver's package does, the agent hears of it."""

from __future__ import annotations

import asyncio

import pytest

from flashrec.agent import gpus
from flashrec.core.health import Found


def test_a_package_that_breaks_at_the_first_call_is_one_that_could_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise KeyError("of no kind that NVML has")

    monkeypatch.setattr(gpus, "load", load)
    told: list[Found] = []

    async def scene() -> None:
        watch = gpus.GpuWatch(60.0, told.extend)
        watch.start()
        await watch.wait_first(10.0)
        watch.close()

    asyncio.run(scene())
    (found,) = told
    assert (found.check, found.status) == ("nvml", "unknown")
    assert "of no kind that NVML has" in found.reason
