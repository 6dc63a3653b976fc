"""Real MPI: beaters come and go, die and hang, and nobody else is disturbed; so may the hub."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flashrec.transport.mpi import supervisor as supervising
from flashrec.transport.mpi import words
from flashrec.transport.mpi.words import Going
from tests.support.cluster import is_gone, wait_for
from tests.transport.mpi_scene import Scene, play, until

NUM_CYCLES = 20


def test_twenty_beaters_join_and_leave_and_the_others_are_heard_all_the_time() -> None:
    """Every other one is killed while its session stands, the others are told to go first."""

    async def act(scene: Scene) -> None:
        watcher = await scene.beater()
        watched = await scene.meet(watcher)
        passing = asyncio.create_task(scene.beater())
        for cycle in range(NUM_CYCLES):
            guest = await passing
            passing = asyncio.create_task(scene.beater())
            session = await scene.meet(guest)
            if cycle % 2:
                scene.hub.supervisor.say(words.Drop(session))
            await guest.close()
            await scene.is_heard_on(watched)
            scene.hub.supervisor.say(words.Drop(session))
        await passing
        assert scene.hub.losses == watcher.losses == []
        assert scene.hub.ended(watched) is None
        heard = [dict(word.newest)[watched] for word in scene.hub.said if watched in dict(getattr(word, "newest", ()))]
        assert heard == sorted(heard) and len(set(heard)) == len(heard)

    play(act)


def test_a_beater_that_dies_before_it_connects_holds_the_hub_for_a_bounded_time() -> None:
    async def act(scene: Scene) -> None:
        watcher, victim = await scene.beater(), await scene.beater()
        watched = await scene.meet(watcher)
        loaded = scene.hub.loaded
        assert loaded is not None
        victim.signal(signal.SIGKILL)
        scene.hub.supervisor.say(words.Accept(900, 1, loaded.ports[200]))
        await until(lambda: scene.hub.ended(900))
        ended = scene.hub.ended(900)
        assert ended is not None and ended.reason.startswith("Accept: ")
        assert 0.5 < ended.took_s < 15, "it waited, and gave up"
        await scene.is_heard_on(watched)
        assert scene.hub.losses == []
        assert victim.losses == ["killed by SIGKILL"], "and it was replaced"
        await until(lambda: victim.pid)

    play(act)


def test_who_cannot_reach_the_hubs_address_says_so_and_does_not_connect() -> None:
    async def act(scene: Scene) -> None:
        beater = await scene.beater()
        session, _ = scene.invite(beater, knock=1)
        await until(lambda: beater.ended(session))
        ended = beater.ended(session)
        assert ended is not None
        assert "no way over lo (127.0.0.1) to the manager's 127.0.0.1, port 1" in ended.reason
        assert Going(session) not in beater.said

    play(act)


def test_heartbeats_of_another_life_or_session_are_not_believed() -> None:
    async def act(scene: Scene) -> None:
        watcher, former, other = await scene.beater(), await scene.beater(), await scene.beater()
        watched = await scene.meet(watcher)
        stale, port = scene.invite(former, incarnation=1)
        await until(lambda: Going(stale) in former.said)
        scene.hub.supervisor.say(words.Accept(stale, 2, port))
        mixed_up, port = scene.invite(other)
        await until(lambda: Going(mixed_up) in other.said)
        scene.hub.supervisor.say(words.Accept(901, 1, port))
        for beater, session in ((former, stale), (other, mixed_up)):
            await until(lambda: beater.newest(session) >= 5)  # noqa: B023
        await scene.is_heard_on(watched, 10)
        assert scene.hub.is_accepted(stale) and scene.hub.is_accepted(901)
        assert scene.hub.newest(stale) == scene.hub.newest(mixed_up) == scene.hub.newest(901) == 0

    play(act)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_hub_is_replaced_and_the_same_beaters_meet_the_new_one(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "MIN_PAUSE_S", 0.02)

    async def act(scene: Scene) -> None:
        beaters = [await scene.beater(), await scene.beater()]
        for beater in beaters:
            await scene.meet(beater)
        pids, former = [beater.pid for beater in beaters], scene.hub.pid
        scene.hub.signal(number)
        await until(lambda: scene.hub.losses and scene.hub.said[-1] == scene.hub.loaded)
        assert scene.hub.losses == ["killed by SIGKILL" if number == signal.SIGKILL else "silent for 3 s, killed"]
        assert is_gone(former)
        for beater in beaters:
            await scene.is_heard_on(await scene.meet(beater))
        assert [beater.pid for beater in beaters] == pids
        assert [beater.losses for beater in beaters] == [[], []]

    play(act, stall_s=3.0)


def test_a_stopped_beater_is_replaced_and_the_others_are_heard_meanwhile() -> None:
    async def act(scene: Scene) -> None:
        watcher, victim = await scene.beater(), await scene.beater(stall_s=2.0)
        watched, lost = await scene.meet(watcher), await scene.meet(victim)
        victim.signal(signal.SIGSTOP)
        seen = scene.hub.newest(watched)
        await until(lambda: victim.losses)
        assert victim.losses == ["silent for 2 s, killed"]
        assert scene.hub.newest(watched) > seen + 10
        scene.hub.supervisor.say(words.Drop(lost))
        await until(lambda: victim.pid and victim.said[-1] == victim.loaded)
        await scene.is_heard_on(await scene.meet(victim))
        assert watcher.losses == scene.hub.losses == []

    play(act)


def test_in_a_job_step_with_pmi_a_child_is_still_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "99", "PMI_JOBID": "1"}.items():
        monkeypatch.setenv(name, value)

    async def act(scene: Scene) -> None:
        assert scene.hub.problems == []
        await scene.meet(await scene.beater())

    play(act)


PARENT = """
import asyncio, sys
from flashrec.transport.mpi.supervisor import Supervisor
from flashrec.transport.mpi.words import Settings
async def run():
    made = Supervisor("hub", Settings(interface="lo"), lambda word: print(made.pid, flush=True), print)
    await made.run()
asyncio.run(run())
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_child_ends_with_its_parent_even_if_it_hangs(is_stopped: bool) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
    finally:
        parent.kill()
        parent.communicate()
    wait_for(lambda: is_gone(pid), "the end of the child")


def test_without_mpi4py_one_sentence_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no mpi4py here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def act(scene: Scene) -> None:
        (problem,) = scene.hub.problems
        assert problem == (
            'mpi4py is not installed; pip install "flashrec[mpi]" on every node (it brings mpi4py and MPICH 4.3)'
        )
        await asyncio.wait([scene.hub.task])
        assert scene.hub.losses == [], "it is not tried again"

    play(act)


def test_a_library_that_is_not_there_is_named(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        (problem,) = scene.hub.problems
        assert problem.startswith("mpi4py finds no MPI library: ") and str(tmp_path / "libmpi.so") in problem

    play(act, library=str(tmp_path / "libmpi.so"))


def test_a_provider_that_is_not_there_is_said_in_libfabrics_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """libmpi ends the process; after a few tries that is the answer."""
    monkeypatch.setattr(supervising, "MIN_PAUSE_S", 0.02)
    monkeypatch.setattr(supervising, "MAX_STARTS", 2)

    async def act(scene: Scene) -> None:
        (problem,) = scene.hub.problems
        assert problem.startswith("the MPI hub does not start: ")
        assert "getinfo" in problem
        assert scene.hub.supervisor.life == 2

    play(act, provider="psm3", interface="")


def test_an_interface_that_is_not_there_is_not_replaced_by_another() -> None:
    async def act(scene: Scene) -> None:
        (problem,) = scene.hub.problems
        assert problem.startswith("no interface ib7 on this node (there are: ")

    play(act, interface="ib7")
