"""The workers of a node: who may start, who may speak, how each end is seen and told."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from flashrec.agent import workers as module
from flashrec.agent.launch import EXIT_REFUSED
from flashrec.agent.process import WatchedProcess, state_of
from flashrec.core import events as e
from flashrec.core.types import Plan, Raised, Report
from flashrec.transport import page
from flashrec.transport.page import Page
from flashrec.transport.paths import page_path, state_path
from flashrec.wire import messages as m
from tests.agent.support import is_running, node, play, task, until

WORDS = e.WorkerRaised(0, 1, Raised(3, "ValueError", "Traceback"))


async def exit_code(process: subprocess.Popen[bytes]) -> int:
    await until(lambda: process.poll() is not None)
    return process.returncode


@pytest.mark.parametrize("first", ["manager", "task"])
def test_a_task_becomes_the_command_with_its_rank_whoever_is_faster(first: str) -> None:
    async def scene() -> None:
        async with node() as it:
            order = m.ExpectTasks(3, (task(0), task(1, joins=True)))
            if first == "manager":
                it.workers.expect(order)
            process = it.launch(3, 1, ("sh", "-c", "env"))
            if first == "task":
                await until(lambda: it.workers._expectation_changed._waiters)
                it.workers.expect(order)
            assert await exit_code(process) == 0
            await until(lambda: it.of(e.WorkerExited))
            log = (it.folder / "rank-1.1.log").read_text().splitlines()
            for line in ("RANK=1", "LOCAL_RANK=1", "WORLD_SIZE=4", "FLASHREC_INCARNATION=1", "FLASHREC_JOINS=1",
                         f"FLASHREC_SOCKET={it.socket}"):  # fmt: skip
                assert line in log
            assert it.relayed[0] == e.WorkerStarted(1, 1, process.pid)
            (end,) = it.of(e.WorkerExited)
            assert (end.rank, end.incarnation, end.farewell, end.joined) == (1, 1, "none", False)

    play(scene)


@pytest.mark.parametrize("comes", [True, False])
def test_the_first_task_of_a_step_does_not_take_its_neighbours_with_it(comes: bool) -> None:
    """Slurm puts all tasks of a node into the group of the first; the others leave it before they ask who they are."""

    async def scene() -> None:
        async with node() as it:
            it.workers.expect(m.ExpectTasks(1, (task(0), task(1))))
            first = it.launch(1, 0, ("sh", "-c", f"until test -e {it.folder}/go; do sleep 0.01; done"), group=0)
            await until(lambda: it.of(e.WorkerStarted))
            neighbour = subprocess.Popen(["sleep", "60"], process_group=first.pid)
            it.processes.append(neighbour)
            (it.folder / "go").write_text("go\n")
            await until(lambda: it.of(e.WorkerExited))
            assert is_running(neighbour.pid), "it may be the second task"
            if comes:
                it.launch(1, 1)
            else:
                it.workers.kill(1, 1, "not wanted any more")
            await until(lambda: not is_running(neighbour.pid))

    play(scene)


def test_a_launch_that_nobody_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXPECT_TIMEOUT_S", 0.05)

    async def scene() -> None:
        async with node() as it:
            it.workers.expect(m.ExpectTasks(1, (task(0),)))
            for launch, local_id in ((2, 0), (1, 1)):
                assert await exit_code(it.launch(launch, local_id)) == EXIT_REFUSED
            assert "nobody asked for task 0 of launch 2" in it.said(0)
            assert it.relayed == []

    play(scene)


def test_a_task_starts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXPECT_TIMEOUT_S", 0.05)

    async def scene() -> None:
        async with node() as it:
            await it.started(task(0))
            assert await exit_code(it.launch(1, 0)) == EXIT_REFUSED
            assert len(it.of(e.WorkerStarted)) == 1

    play(scene)


def test_a_worker_killed_before_it_started_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXPECT_TIMEOUT_S", 0.05)

    async def scene() -> None:
        async with node() as it:
            it.workers.expect(m.ExpectTasks(1, (task(0), task(1))))
            it.workers.kill(0, 1, "superseded")
            assert await exit_code(it.launch(1, 0)) == EXIT_REFUSED
            assert it.relayed == []
            assert list(it.workers._expected) == [(1, 1)], "the other one is still expected"

    play(scene)


def test_when_the_agent_ends_who_waits_is_sent_away_and_who_runs_is_killed() -> None:
    async def scene() -> None:
        async with node() as it:
            pid = await it.started(task(0))
            waiting = it.launch(9, 0)
            await until(lambda: it.workers._expectation_changed._waiters)
            it.workers.close("the agent lost its manager")
            assert await exit_code(waiting) == EXIT_REFUSED
            assert "the agent lost its manager" in it.said(1)
            await it.workers.closed()
            assert not is_running(pid)
            (end,) = it.of(e.WorkerExited)
            assert end.reason == "the agent lost its manager"

    play(scene)


def test_the_pid_comes_from_the_kernel_and_not_from_the_task() -> None:
    """A launcher that is process 1 of a container would otherwise have everybody killed (kill -1)."""

    async def scene() -> None:
        async with node() as it:
            it.workers.expect(m.ExpectTasks(1, (task(0),)))
            lie = (
                "import os, sys; sys.argv = sys.argv[1:]; os.getpid = lambda: 1\n"
                "from flashrec.agent import launch; os.setsid = lambda: None; launch.main()"
            )
            argv = [sys.executable, "-c", lie, "launch", "--key", "key", "--secret", str(it.folder / "secret"),
                    "--launch", "1", "--", "sleep", "60"]  # fmt: skip
            process = subprocess.Popen(argv, env=os.environ | {"FLASHREC_NODE": "n1"}, start_new_session=True)
            it.processes.append(process)
            await until(lambda: it.of(e.WorkerStarted))
            assert it.of(e.WorkerStarted) == [e.WorkerStarted(0, 1, process.pid)]

    play(scene)


@pytest.mark.parametrize("pid", [1, 0, -1])
def test_no_pid_that_means_more_than_one_process_is_watched(pid: int) -> None:
    with pytest.raises(OSError, match="not a process that can be watched"):
        WatchedProcess(pid)


def test_a_process_that_has_gone_cannot_be_watched() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    with pytest.raises(ProcessLookupError):
        WatchedProcess(process.pid)
    assert state_of(process.pid) == ""


def test_a_worker_is_killed_with_its_children() -> None:
    async def scene() -> None:
        async with node() as it:
            children = it.folder / "children"
            script = f"sleep 60 & echo $! > {children}; sleep 60 & echo $! >> {children}; echo started; wait"
            pid = await it.started(task(0), ("sh", "-c", script))
            pids = [pid, *map(int, children.read_text().split())]
            assert len(pids) == 3 and all(map(is_running, pids))
            it.workers.kill(0, 1, "node n1: silent")
            await until(lambda: it.of(e.WorkerExited))
            await until(lambda: not any(map(is_running, pids)))
            assert it.of(e.WorkerExited)[0].reason == "node n1: silent"

    play(scene)


def test_what_a_dead_worker_leaves_behind_is_ended() -> None:
    """Data loaders outlive a leader that is killed by somebody else, and keep the GPU."""

    async def scene() -> None:
        async with node() as it:
            child = it.folder / "child"
            pid = await it.started(task(0), ("sh", "-c", f"sleep 60 & echo $! > {child}; echo started; wait"))
            os.kill(pid, signal.SIGKILL)
            await until(lambda: it.of(e.WorkerExited))
            await until(lambda: not is_running(int(child.read_text())))
            assert "killed or crashed" in it.of(e.WorkerExited)[0].reason

    play(scene)


def test_a_neighbour_in_the_same_group_survives() -> None:
    """Slurm puts all tasks of a node into the group of the first."""

    async def scene() -> None:
        async with node() as it:
            one = await it.started(task(0))
            two = await it.started(task(1))
            it.workers.kill(0, 1, "test")
            await until(lambda: it.of(e.WorkerExited))
            assert not is_running(one) and is_running(two)

    play(scene)


async def joined(it, rank: int = 0):
    channel = await it.runtime(rank)
    messages = channel.messages()
    welcome = await anext(messages)
    assert isinstance(welcome, m.WorkerWelcome)
    return channel, messages, welcome


def test_a_runtime_is_welcomed_with_what_was_said_before() -> None:
    async def scene() -> None:
        async with node() as it:
            await it.started(task(0))
            it.workers.announce(m.Fence(2, "test"))
            it.workers.push_keys(m.KeysPushed(2, "world", {"a": b"1"}, (0, 1)))
            it.workers.push_keys(m.KeysPushed(2, "other", {"b": b"2"}, (1,)))
            it.workers.push_keys(m.KeysPushed(1, "world", {"old": b"3"}, (0,)))
            _, messages, welcome = await joined(it)
            assert (welcome.generation, welcome.world_size, welcome.address) == (2, 4, "10.0.0.1")
            it.workers.announce(m.Resume(2))
            assert [await anext(messages), await anext(messages)] == [
                m.KeysPushed(2, "world", {"a": b"1"}, (0, 1)), m.Resume(2),
            ]  # fmt: skip
            assert it.of(e.WorkerJoined) == [e.WorkerJoined(0, 1)]

    play(scene)


def test_a_rank_of_another_world_is_told_where_its_state_is() -> None:
    async def scene() -> None:
        async with node() as it:
            resized = msgspec.structs.replace(task(0), world_size=7, resized=3, former=5)
            it.workers.expect(m.ExpectTasks(1, (resized, task(1))))
            for local_id in range(2):
                assert await exit_code(it.launch(1, local_id, ("sh", "-c", "env"))) == 0
            logs = [(it.folder / f"rank-{rank}.1.log").read_text().splitlines() for rank in range(2)]
            assert {"WORLD_SIZE=7", "FLASHREC_RESIZED=3", "FLASHREC_FORMER=5"} <= set(logs[0])
            assert "WORLD_SIZE=4" in logs[1] and not [line for line in logs[1] if line.startswith("FLASHREC_RESIZED")]

    play(scene)


def test_a_state_that_the_agent_does_not_see_is_not_put_aside_and_one_it_sees_goes_at_the_resume() -> None:
    async def scene() -> None:
        async with node() as it:
            await it.started(task(0))
            worker, *_ = await joined(it)
            path = state_path(it.socket, 0, 2)
            worker.send(e.HandedOver(0, 1, 2, 9))
            await until(lambda: it.of(e.NotHandedOver))
            path.parent.mkdir()
            path.touch()
            worker.send(e.HandedOver(0, 1, 2, 9))
            await until(lambda: it.of(e.HandedOver))
            it.workers.announce(m.Fence(3, "all states are put aside"))
            assert path.exists()
            it.workers.announce(m.Resume(3))
            assert not path.parent.exists()
            assert str(path) in it.of(e.NotHandedOver)[0].reason

    play(scene)


def test_a_newer_generation_forgets_the_keys_of_the_older() -> None:
    async def scene() -> None:
        async with node() as it:
            it.workers.push_keys(m.KeysPushed(1, "world", {"a": b"1"}, (0,)))
            it.workers.announce(m.Fence(3, "x"))
            it.workers.announce(m.Fence(2, "late"))
            assert it.workers.generation == 3
            await it.started(task(0))
            _, messages, _ = await joined(it)
            it.workers.announce(m.Resume(3))
            assert await anext(messages) == m.Resume(3)

    play(scene)


def test_a_generation_that_begins_at_a_step_boundary_takes_over_with_its_plan() -> None:
    async def scene() -> None:
        async with node() as it:
            it.workers.announce(m.Fence(2, "n1 leaves", at_boundary=True))
            it.workers.push_keys(m.KeysPushed(1, "late", {"a": b"1"}, (0,)))
            await it.started(task(0))
            _, messages, welcome = await joined(it)
            assert welcome.generation == 2, "a joiner is to report for the newest"
            assert await anext(messages) == m.KeysPushed(1, "late", {"a": b"1"}, (0,)), "the older one is in use"
            plan = m.PlanPublished(Plan(2, 5, (), {}, "all paused"))
            it.workers.announce(plan)
            it.workers.push_keys(m.KeysPushed(1, "late", {"b": b"2"}, (0,)))
            it.workers.push_keys(m.KeysPushed(2, "world", {"c": b"3"}, (0,)))
            assert [await anext(messages), await anext(messages)] == [plan, m.KeysPushed(2, "world", {"c": b"3"}, (0,))]

    play(scene)


@pytest.mark.parametrize("who", ["unknown rank", "former life", "second hello", "killed"])
def test_who_is_not_let_in(who: str) -> None:
    async def scene() -> None:
        async with node() as it:
            await it.started(task(0, life=2))
            if who == "second hello":
                await it.runtime(0, 2)
                await until(lambda: it.of(e.WorkerJoined))
            if who == "killed":
                it.workers._lives[0, 2].kill_reason = "condemned"
            count = len(it.of(e.WorkerJoined))
            stranger = await it.runtime(*{"unknown rank": (1, 2), "former life": (0, 1)}.get(who, (0, 2)))
            assert [x async for x in stranger.messages()] == []
            assert len(it.of(e.WorkerJoined)) == count
            it.workers._lives[0, 2].kill_reason = ""

    play(scene)


REPORT = Report(5, 4, 4, True, (0, 1))


@pytest.mark.parametrize(
    "message",
    [e.WorkerReported(1, 1, 1, REPORT), e.WorkerReported(0, 2, 1, REPORT), m.WorkerBeat(1, 1, 9, 9, 9, "step"),
     e.WorkerFinished(1, 1, 9), m.WorkerFarewell(1, 1), m.WorkerHello(1, 1, 1), m.TaskStarting(1, 0, 1),
     m.KeyPosted(1, 1, 1, "world", "k", b"v", (0,)), m.CounterAdded(1, 1, 1, "world", "k", 1, 1)],
    ids=lambda x: f"{type(x).__name__}-{getattr(x, 'rank', '')}",
)  # fmt: skip
def test_speech_for_somebody_else_is_the_end_of_the_connection(message: m.Sendable) -> None:
    async def scene() -> None:
        async with node() as it:
            await it.started(task(0))
            await it.started(task(1))
            channel, messages, _ = await joined(it)
            before = list(it.relayed)
            channel.send(message)
            assert [x async for x in messages] == []
            assert it.relayed == before
            assert all(tag.v == -1 for tag in it.workers.beat())

    play(scene)


def test_speech_before_hello_is_not_heard() -> None:
    async def scene() -> None:
        async with node() as it:
            await it.started(task(0))
            channel = await it.connect()
            channel.send(e.WorkerReported(0, 1, 1, REPORT))
            assert [x async for x in channel.messages()] == []
            assert it.of(e.WorkerReported) == []

    play(scene)


@pytest.mark.parametrize(
    ("said", "farewell"),
    [([], "none"), ([m.WorkerFarewell(0, 1)], "orderly"), ([WORDS, m.WorkerFarewell(0, 1)], "raised"),
     ([e.WorkerFinished(0, 1, 9), m.WorkerFarewell(0, 1)], "finished")],
)  # fmt: skip
def test_last_words_are_heard_before_the_end_is_told(said: list[m.Sendable], farewell: str) -> None:
    """The process is seen to end first; what it wrote is still in the socket, and beats of ours are unread in its."""

    async def scene() -> None:
        async with node() as it:
            pid = await it.started(task(0))
            channel, _messages, _ = await joined(it)
            it.workers.beat()
            os.kill(pid, signal.SIGKILL)
            await until(lambda: it.workers._tasks)  # the end has been seen
            for message in said:
                channel.send(message)
            await channel.drain_and_close()
            await until(lambda: it.of(e.WorkerExited))
            assert it.of(e.WorkerExited)[0].farewell == farewell
            assert it.relayed.index(it.of(e.WorkerExited)[0]) == len(it.relayed) - 1

    play(scene)


def test_a_connection_that_outlives_its_process_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked child may have inherited it."""
    monkeypatch.setattr(module, "LAST_WORDS_TIMEOUT_S", 0.05)

    async def scene() -> None:
        async with node() as it:
            pid = await it.started(task(0))
            _kept = await joined(it)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: it.of(e.WorkerExited))

    play(scene)


def test_a_silent_worker_is_killed_with_a_reason_and_one_that_beats_is_not() -> None:
    async def scene() -> None:
        async with node(worker_silent_s=5.0) as it:
            await it.started(task(0))
            await it.started(task(1))
            _, silent, _ = await joined(it, 0)
            loud, _messages, _ = await joined(it, 1)
            for life in it.workers._lives.values():
                life.heard_at -= 6.0
            loud.send(m.WorkerBeat(1, 1, 7, 6, 6, "step"))
            await until(lambda: it.workers._lives[1, 1].tag(0.0).v == 7)
            it.workers._beat_at = time.monotonic()
            tags = it.workers.beat()
            assert {tag.rank: tag.v for tag in tags} == {0: -1, 1: 7}
            await until(lambda: it.of(e.WorkerExited))
            (end,) = it.of(e.WorkerExited)
            assert end.rank == 0 and "worker silent for 6." in end.reason
            assert [shown.rank for shown in it.of(m.StacksTaken)] == [0]
            assert it.relayed.index(it.of(m.StacksTaken)[0]) < it.relayed.index(end), "where it was is said first"
            assert await anext(silent) == m.AgentBeat(), "its lease was renewed until then"

    play(scene)


def test_a_silent_worker_that_is_quiet_is_left_alone() -> None:
    """It holds the interpreter's lock while it writes a checkpoint; the page says so."""

    async def scene() -> None:
        async with node(worker_silent_s=5.0) as it:
            await it.started(task(0))
            _kept = await joined(it)
            shared = Page(page_path(it.socket, 0, 1))
            shared.memory[page.WHERE] = page.pad("idle")
            shared.write_quiet("checkpoint")
            it.workers.beat()
            it.workers._lives[0, 1].heard_at -= 6.0
            (tag,) = it.workers.beat()
            assert (tag.where, tag.quiet, tag.process) == ("idle", "checkpoint", state_of(os.getpid()))
            assert tag.silent_s >= 6.0
            assert not it.workers._lives[0, 1].is_doomed
            shared.write_quiet("")
            it.workers.beat()
            assert it.workers._lives[0, 1].is_doomed
            await until(lambda: it.of(e.WorkerExited))
            assert not page_path(it.socket, 0, 1).exists(), "its files go with it"

    play(scene)


def test_how_long_a_worker_stands_still_is_told_on_our_clock() -> None:
    async def scene() -> None:
        async with node() as it:
            await it.started(task(0))
            channel, _messages, _ = await joined(it)
            life = it.workers._lives[0, 1]
            said = m.WorkerBeat(0, 1, 7, 6, 6, "step", "", False, {"0": 4})
            for beat, stands in (
                (said, False), (said, True), (msgspec.structs.replace(said, waiting=True), True),
                (msgspec.structs.replace(said, collectives={"0": 5}), False),
            ):  # fmt: skip
                life.changed_at, life.heard_at, heard = 0.0, -1.0, beat
                channel.send(heard)
                await until(lambda: life.heard_at > 0)
                assert (life.changed_at == 0.0) == stands, heard
            told = life.tag(life.heard_at + 0.5)
            assert told.silent_s == pytest.approx(0.5) and told.still_s == pytest.approx(0.5, abs=0.2)

    play(scene)


def test_time_in_which_we_did_not_listen_is_held_against_nobody() -> None:
    """The agent itself was stopped: `scontrol suspend`, a paused virtual machine."""

    async def scene() -> None:
        async with node(worker_silent_s=5.0) as it:
            await it.started(task(0))
            _kept = await joined(it)
            life = it.workers._lives[0, 1]
            it.workers.beat()
            for clock in (life, it.workers):
                for name in ("heard_at", "changed_at", "_beat_at"):
                    if hasattr(clock, name):
                        setattr(clock, name, getattr(clock, name) - 60.0)
            (tag,) = it.workers.beat()
            assert tag.silent_s < 5.0 and tag.still_s < 5.0 and not life.is_doomed

    play(scene)


def test_stacks_are_shown_when_asked_for() -> None:
    async def scene() -> None:
        async with node() as it:
            await it.started(task(0))
            it.workers.show_stacks(m.StacksAsked(0, 2, 1.0))
            it.workers.show_stacks(m.StacksAsked(0, 1, 5.0))
            await until(lambda: it.of(m.StacksTaken))
            (shown,) = it.of(m.StacksTaken)
            assert (shown.rank, shown.incarnation, shown.how) == (0, 1, "/proc"), "`sleep` is no Python"
            assert "state: S" in shown.text and "py-spy" in shown.text

    play(scene)


def test_a_stopped_worker_is_killed_sooner_than_a_silent_one() -> None:
    async def scene() -> None:
        async with node(worker_stopped_s=1.0) as it:
            pids = [await it.started(task(rank)) for rank in (0, 1)]
            kept = [await joined(it, rank) for rank in (0, 1)]
            os.kill(pids[0], signal.SIGSTOP)
            await until(lambda: state_of(pids[0]) == "T")
            it.workers.beat()
            for life in it.workers._lives.values():
                life.heard_at -= 2.0
            it.workers.beat()
            await until(lambda: it.of(e.WorkerExited))
            (end,) = it.of(e.WorkerExited)
            assert end.rank == 0 and "stopped" in end.reason
            assert len(kept) == 2

    play(scene)


def test_a_worker_that_never_said_hello_is_left_alone() -> None:
    """A script without flashrec.init() does not beat."""

    async def scene() -> None:
        async with node(worker_silent_s=0.001, worker_stopped_s=0.001) as it:
            pid = await it.started(task(0))
            await asyncio.sleep(0.01)
            it.workers.beat()
            assert it.workers._lives[0, 1].kill_reason == ""
            assert is_running(pid) and it.of(e.WorkerExited) == []

    play(scene)


def test_no_descriptors_are_left_by_ended_workers() -> None:
    async def scene() -> None:
        async with node() as it:
            before = None
            for life in range(1, 5):
                pid = await it.started(task(0, life=life))
                channel = await it.runtime(0, life)
                await until(lambda: len(it.of(e.WorkerJoined)) == life)  # noqa: B023
                os.kill(pid, signal.SIGKILL)
                channel.abort("gone")
                await until(lambda: len(it.of(e.WorkerExited)) == life)  # noqa: B023
                await until(lambda: before is None or len(os.listdir("/proc/self/fd")) <= before)  # noqa: B023
                before = before or len(os.listdir("/proc/self/fd"))

    play(scene)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("secret", "No such file"),
        ("mode", "mode 0600"),
        ("wrong", "does not know the secret"),
        ("command", "cannot run"),
    ],
)
def test_a_launcher_says_why_it_cannot_start(change: str, said: str) -> None:
    async def scene() -> None:
        async with node() as it:
            it.workers.expect(m.ExpectTasks(1, (task(0),)))
            secret: Path = it.folder / "secret"
            if change == "secret":
                secret.unlink()
            elif change == "mode":
                secret.chmod(0o644)
            elif change == "wrong":
                secret.write_text("ab" * 32)
            process = it.launch(1, 0, ("/nonexistent/python",))
            assert await exit_code(process) == (127 if change == "command" else EXIT_REFUSED)
            text = it.said() + "".join(path.read_text() for path in it.folder.glob("rank-*.log"))
            assert said in text
            assert "Traceback" not in text

    play(scene)


@pytest.mark.parametrize(("step", "is_killed"), [(3, True), (0, False)])
def test_an_exception_in_training_does_not_keep_its_process_for_long(
    step: int, is_killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RAISED_GRACE_S", 0.05)

    async def scene() -> None:
        async with node() as it:
            pid = await it.started(task(0))
            channel, _, _ = await joined(it)
            channel.send(msgspec.structs.replace(WORDS, raised=Raised(step, "ValueError", "Traceback")))
            await until(lambda: it.of(e.WorkerRaised))
            if is_killed:
                await until(lambda: it.of(e.WorkerExited))
                (end,) = it.of(e.WorkerExited)
                assert end.farewell == "raised" and end.reason == f"process {pid} ended with an exception"
            else:
                await asyncio.sleep(0.15)
                assert is_running(pid), "a mistake in the script: nobody waits for a replacement"

    play(scene)
