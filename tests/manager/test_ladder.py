"""Rungs of the ladder in a whole manager, with real agents and workers without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashrec.core import events
from flashrec.core.types import Phase
from tests.manager.test_whole_manager import NODES, Job, job, play, replayed

AT_ONCE = ("recovery.spare_wait_s=0.3", "recovery.agent_retry_s=60", "detection.tick_interval_s=0.05")


def rungs(it: Job) -> list[dict[str, Any]]:
    return [x["effect"] for x in it.lines() if x["kind"] == "effect" and x["effect"]["type"] == "TakeRung"]


def keeps(folder: Path, step: int) -> None:
    (folder / "new").write_text(str(step))
    (folder / "new").rename(folder / "keeps")


async def asks(it: Job, rank: int, step: int) -> str:
    """The answer of the manager to a rank that wants to commit its checkpoint."""
    answer = it.folder / "committed"
    answer.unlink(missing_ok=True)
    it.order(rank, f"commit {step}")
    await it.until(lambda: answer.exists() and answer.read_text())
    return answer.read_text()


async def lose_node(it: Job, rank: int) -> None:
    node = it.machine.members.slots[rank].node
    it.manager.control.bar(node, "it is lost")  # else its agent comes back
    it.manager.control.links[node].channel.abort("pulled by the test")
    await it.until(lambda: not it.machine.members.nodes[node].alive)


def test_when_nobody_is_lost_nobody_is_replaced(tmp_path: Path) -> None:
    async def scene() -> None:
        async with job(tmp_path) as it:
            await it.running()
            it.manager.emit(events.TrainingStalled("all ranks wait in the same collective"))
            await it.running(2)
            assert [slot.num_lives for slot in it.machine.members.slots] == [1, 1]
            assert [rung["rung"] for rung in rungs(it)] == ["in process"]
            assert await it.finish() == 0

    play(scene)


def test_without_a_replica_all_ranks_start_again_and_may_commit_older_steps(tmp_path: Path) -> None:
    async def scene() -> None:
        keeps(tmp_path, 9)
        (tmp_path / "alone").touch()
        async with job(tmp_path) as it:
            await it.running()
            assert await asks(it, 0, 12) == "True"
            assert await asks(it, 0, 11) == "False", "older than what was permitted"
            it.order(1, "die")
            await it.running(3)
            assert [slot.num_lives for slot in it.machine.members.slots] == [2, 3]
            assert [rung["rung"] for rung in rungs(it)] == ["in place", "checkpoint"]
            assert "from the checkpoint of step 9, steps lost: 1 (time 1 of 3)" in rungs(it)[1]["reason"]
            assert await asks(it, 0, 10) == "True", "whatever was permitted before is not there, or was loaded"
            assert await it.finish() == 0
            assert replayed(it.lines(), it.manager.request.config.recovery)[0].phase is Phase.STOPPED

    play(scene)


def test_all_workers_lost_at_once_go_back_as_well(tmp_path: Path) -> None:
    async def scene() -> None:
        keeps(tmp_path, 9)
        async with job(tmp_path) as it:
            await it.running()
            it.order(0, "die")
            it.order(1, "die")
            await it.until(lambda: it.machine.num_loads)
            await it.running(3)
            assert rungs(it)[-1]["rung"] == "checkpoint"
            assert await it.finish() == 0

    play(scene)


@pytest.mark.parametrize("has_hooks", [True, False])
def test_without_a_node_survivors_are_asked_to_save(has_hooks: bool, tmp_path: Path) -> None:
    async def scene() -> None:
        if has_hooks:
            keeps(tmp_path, 9)
        async with job(tmp_path, *AT_ONCE, nodes=NODES[:2]) as it:
            await it.running()
            await lose_node(it, 0)
            assert await it.task == 75
            assert "no spare is left for rank 0" in it.machine.stop_reason
            saved = "a checkpoint of step 9 is complete, no step is lost" in it.machine.stop_reason
            assert saved == has_hooks
            assert [rung["rung"] for rung in rungs(it)] == ["dying checkpoint"] * has_hooks
            granted = [x["step"] for x in it.lines() if x["kind"] == "note" and x["what"] == "commit granted"]
            assert granted == [9] * has_hooks, "in the phase SAVING, and in its generation"

    play(scene)


def test_a_shard_that_nobody_is_left_of_is_not_saved(tmp_path: Path) -> None:
    async def scene() -> None:
        keeps(tmp_path, 9)
        (tmp_path / "alone").touch()
        async with job(tmp_path, *AT_ONCE, nodes=NODES[:2]) as it:
            await it.running()
            await lose_node(it, 0)
            assert await it.task == 75
            assert "no last checkpoint: no replica of the shard of rank 0 is left" in it.machine.stop_reason
            assert rungs(it) == []

    play(scene)
