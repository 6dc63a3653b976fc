"""A world that shrinks and grows again in a whole manager, with real agents and workers without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrec.core.types import Phase
from flashrec.transport.paths import memory_directory, socket_path
from tests.manager.test_ladder import keeps, lose_node, rungs
from tests.manager.test_whole_manager import NODES, Job, job, play, replayed

SETTINGS = (
    "recovery.shrink=replica_groups", "recovery.spare_wait_s=0.3", "recovery.resize_interval_s=1",
    "recovery.agent_retry_s=0.5", "detection.tick_interval_s=0.05",
)  # fmt: skip


def left(it: Job) -> list[Path]:
    """What is put aside on any node of the job."""
    places = [memory_directory(socket_path(it.manager._key, node)) for node in NODES]
    return [path for place in places if place.exists() for path in place.iterdir()]


def test_a_world_shrinks_and_grows_again(tmp_path: Path) -> None:
    async def scene() -> None:
        async with job(tmp_path, *SETTINGS, nodes=NODES[:2]) as it:
            await it.running()
            node = it.machine.members.slots[0].node
            await lose_node(it, 0)
            await it.running(3)
            (slot,) = it.machine.members.slots
            assert (slot.rank, slot.incarnation) == (0, 2) and slot.node != node
            assert it.manager._welcome(1).world_size == 1, "an agent that joins now"
            await it.until(lambda: not left(it))
            it.manager.control.bar(node, "")
            await it.running(5)
            assert [slot.incarnation for slot in it.machine.members.slots] == [3, 3]
            assert [rung["rung"] for rung in rungs(it)] == ["shrink", "grow"]
            assert await it.finish() == 0
            again = replayed(it.lines(), it.manager.request.config.recovery)[0]
            assert (again.phase, again.generation) == (Phase.STOPPED, it.machine.generation)
            said = "".join(path.read_text() for path in sorted((tmp_path / "job/logs").glob("rank-*")))
            assert "rank 0 of 1 begins at 5" in said and "rank 1 of 2 begins at 5" in said
            assert not left(it)

    play(scene)


def test_a_node_that_has_no_room_for_its_states_shrinks_nothing(tmp_path: Path) -> None:
    async def scene() -> None:
        (tmp_path / "full").touch()
        async with job(tmp_path, *SETTINGS, nodes=NODES[:2]) as it:
            await it.running()
            await lose_node(it, 0)
            assert await it.task == 75
            assert "no spare is left for rank 0" in it.machine.stop_reason
            assert "not with fewer ranks: rank 1: no room" in it.machine.stop_reason
            assert [rung["rung"] for rung in rungs(it)] == ["shrink"]

    play(scene)


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_what_cannot_be_taken_over_sends_all_back_to_a_checkpoint(has_checkpoint: bool, tmp_path: Path) -> None:
    async def scene() -> None:
        (tmp_path / "lost").touch()
        if has_checkpoint:
            keeps(tmp_path, 4)
        async with job(tmp_path, *SETTINGS, nodes=NODES[:2]) as it:
            await it.running()
            await lose_node(it, 0)
            if has_checkpoint:
                await it.running(4)
                assert [rung["rung"] for rung in rungs(it)] == ["shrink", "checkpoint"]
                assert it.machine.members.world_size == 1
                assert await it.finish() == 0
            else:
                assert await it.task == 75
            why = "the state of the former world cannot be taken over: rank 0: nothing is there"
            assert why in (rungs(it)[1]["reason"] if has_checkpoint else it.machine.stop_reason)

    play(scene)
