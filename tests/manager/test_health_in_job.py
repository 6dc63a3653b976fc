"""Health in a whole job: real agents run a real check program that turns bad, and the manager acts on it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import flashrec
from flashrec.core.types import Phase
from tests.manager.test_whole_manager import Job, job, play

CHECK = """#!/bin/sh
if [ -e {folder}/$FLASHREC_NODE.bad ]; then s=fail r='it is read-only'; else s=ok r=; fi
echo "{{\\"check\\": \\"disk\\", \\"status\\": \\"$s\\", \\"reason\\": \\"$r\\"}}"
"""
QUICK = (
    "health.only=[disk]",
    "health.period_s=0.3",
    "health.again_s=0.1",
    "health.fail_after=2",
    "health.well_after=2",
)


@contextlib.asynccontextmanager
async def checked_job(folder: Path, *settings: str) -> AsyncIterator[Job]:
    (folder / "checks").mkdir()
    (folder / "checks/disk").write_text(CHECK.format(folder=folder))
    (folder / "checks/disk").chmod(0o755)
    (folder / "health.conf").write_text(f"check_dir = {folder / 'checks'}\n* || disk\n")
    async with job(folder, f"health.file={folder / 'health.conf'}", *QUICK, *settings) as it:
        yield it


def events(it: Job, kind: str) -> list[dict[str, Any]]:
    return [line["event"] for line in it.lines() if line["kind"] == "event" and line["event"]["type"] == kind]


def test_a_node_that_turns_sick_is_swapped_and_one_that_is_well_again_is_the_spare(tmp_path: Path) -> None:
    async def scene() -> None:
        async with checked_job(tmp_path) as it:
            await it.running()
            assert [slot.node for slot in it.machine.members.slots] == ["local0", "local1"]
            (tmp_path / "local0.bad").touch()
            await it.until(lambda: it.manager.health.state_of("local0") == "sick")
            await it.running(2)
            await it.until(lambda: it.machine.members.slots[0].node == "local2")
            (tmp_path / "local0.bad").unlink()
            await it.until(lambda: it.manager.health.state_of("local0") == "well")
            (tmp_path / "local1.bad").touch()
            await it.running(3)
            await it.until(lambda: it.machine.members.slots[1].node == "local0")
            assert await it.finish() == 0
        notes = [(line["node"], line["state"]) for line in it.lines() if line.get("what") == "node health"]
        assert sorted(notes[:3]) == [("local0", "well"), ("local1", "well"), ("local2", "well")]
        assert notes[3:] == [("local0", "sick"), ("local0", "well"), ("local1", "sick")]
        first, second = events(it, "NodeLeaving")
        assert (first["node"], first["reason"], first["cause"]) == ("local0", "sick: disk: it is read-only", "health")
        assert second["node"] == "local1"
        (mended,) = events(it, "NodeMended")
        assert (mended["node"], mended["cause"]) == ("local0", "health")
        assert not events(it, "NodeCondemned"), "nobody was taken for dead"

    play(scene)


def test_an_xid_moves_the_ranks_although_no_check_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agents take the module in flashrec/testing/fake_nvml for NVIDIA's."""
    fake = Path(flashrec.__file__).parent / "testing/fake_nvml"
    monkeypatch.setenv("PYTHONPATH", f"{fake}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"))
    monkeypatch.setenv("FLASHREC_FAKE_NVML", str(tmp_path))

    async def scene() -> None:
        async with checked_job(tmp_path, "health.period_s=1000") as it:
            await it.running()
            (tmp_path / "new").write_text("1 79")
            (tmp_path / "new").rename(tmp_path / "local1.xid")
            await it.running(2)
            await it.until(lambda: it.machine.members.slots[1].node == "local2")
            assert not (tmp_path / "local1.xid").exists(), "the driver has told it"
            assert await it.finish() == 0
        (leaving,) = events(it, "NodeLeaving")
        assert leaving["node"] == "local1" and "gpu 1 Xid 79: it has fallen off the bus" in leaving["reason"]

    play(scene)


def test_a_node_that_is_sick_from_the_start_gets_no_ranks(tmp_path: Path) -> None:
    async def scene() -> None:
        (tmp_path / "local0.bad").touch()
        async with checked_job(tmp_path) as it:
            await it.running()
            assert sorted(slot.node for slot in it.machine.members.slots) == ["local1", "local2"]
            assert it.machine.generation == 1, "it was never used"
            assert await it.finish() == 0

    play(scene)


def test_without_another_place_a_sick_node_is_used(tmp_path: Path) -> None:
    """It may be that only the check is wrong; a job that does not start helps nobody."""

    async def scene() -> None:
        for node in ("local0", "local1"):
            (tmp_path / f"{node}.bad").touch()
        async with checked_job(tmp_path) as it:
            await it.running()
            assert {slot.node for slot in it.machine.members.slots} > {"local2"}
            assert it.machine.phase is Phase.RUNNING
            assert await it.finish() == 0

    play(scene)
