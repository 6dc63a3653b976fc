"""The mirrors of a rank from the start of a step to the plan after a fence."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.msgpack import encode

from flashrec.runtime.errors import Superseded
from flashrec.runtime.mirrors import part as module
from flashrec.runtime.mirrors import shipping
from flashrec.runtime.mirrors.copying import Copying
from flashrec.runtime.mirrors.holder import MirrorHolder
from flashrec.runtime.mirrors.part import Mirrors
from flashrec.runtime.mirrors.slots import Pair
from flashrec.runtime.transfer import Address
from flashrec.wire import messages as m
from tests.runtime.mirroring import NOBODY, ONLY_0, REPORT, Job, Worker, report, step, until
from tests.runtime.test_mirrors import TIMEOUT_S, Trained

pytestmark = pytest.mark.torch


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    made = Job(monkeypatch)
    yield made
    made.keys.fence()
    for mirrors in made.made:
        mirrors.freeze(REPORT)


# ---- at the start


@pytest.mark.parametrize("mode", ["node", 2, None])
def test_what_cannot_be_meant_is_refused(mode: Any, job: Job) -> None:
    with pytest.raises(ValueError, match="say True, 'all' or 'process'"):
        job.mirrors(0, mode)


def test_one_rank_says_at_the_start_what_is_covered(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    job.mirrors(1, "all")
    assert not caplog.messages
    job.mirrors(0, "all")
    assert [line.startswith("mirrors: the state of 2 of 2 ranks is kept") for line in caplog.messages] == [True]
    assert job.asked == [
        {"node": f"n{rank + 1}", "switch": "s", "replicas": (rank,), "mode": "all", "first": True} for rank in (1, 0)
    ]


def test_a_joiner_looks_around_when_the_others_do(job: Job) -> None:
    joiner = job.mirrors(0, joins=True)
    assert job.asked == [] and joiner.freeze(REPORT) is REPORT
    joiner.complete()
    assert [asked["first"] for asked in job.asked] == [False], "it trains on, whatever is found"


def test_what_is_covered_in_words(job: Job) -> None:
    line = job.mirrors(0).line()
    assert "of rank 0 (n1) at rank 1 (n2)" in line and "the loss of a node costs one more step" in line
    assert "the loss of a process costs one more step" in job.mirrors(0, "process").line()
    job.places = NOBODY
    assert job.mirrors(0).line() == "mirrors: none is needed, every rank has a replica on another node"


def test_copies_for_an_accelerator_are_pinned(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = []

    def pair(is_pinned: bool) -> Pair:
        pinned.append(is_pinned)
        return Pair()

    monkeypatch.setattr(module, "Pair", pair)
    for kind in ("cuda", "cpu"):
        worker: Any = Worker(1, job.keys, joins=True)
        Mirrors(worker, Trained().state, True, lambda: (), torch.device(kind))
    assert pinned == [True, False]


# ---- steps


def test_where_nobody_is_mirrored_nothing_is_done(job: Job) -> None:
    job.places = NOBODY
    mirrors = job.mirrors(0)
    step(0, mirrors)
    assert mirrors.freeze(REPORT) is REPORT and job.keys.posted == []
    mirrors.forget_after(0)
    mirrors.complete()
    with pytest.raises(KeyError, match="rank 0 holds no mirrors"):
        mirrors.held(1, 0)


def test_each_step_is_kept_here_and_there(job: Job) -> None:
    both = [job.mirrors(rank) for rank in range(2)]
    digests = []
    for v in range(3):
        digests.append([job.trained[rank].digest() for rank in range(2)])
        step(v, *both)
        for trained in job.trained.values():
            trained.train()
    assert sorted(job.keys.posted) == [("mirror/0", 1, 0), ("mirror/1", 1, 1)], "an address holds for a generation"
    for rank in range(2):
        assert report(both[rank]) == ((1, 2), {1 - rank: (1, 2)})
    both[0].go_back(1)
    assert job.trained[0].digest() == digests[1][0]
    held, wanted = both[1].held(0, 2), both[0]._own.of(2).holding()
    assert held.manifest == wanted.manifest and all(map(torch.equal, held.tensors, wanted.tensors))


def test_a_rank_that_is_not_mirrored_keeps_copies_and_one_that_holds_nobodys_says_no_address(job: Job) -> None:
    job.places = ONLY_0
    both = [job.mirrors(rank) for rank in range(2)]
    step(0, *both)
    assert job.keys.posted == [("mirror/1", 1, 1)]
    assert [report(mirrors) for mirrors in both] == [((0,), {}), ((0,), {0: (0,)})]


def test_training_begins_when_the_first_state_is_mirrored(job: Job) -> None:
    job.places = ONLY_0
    holder, mirrored = job.mirrors(1), job.mirrors(0)
    holder.open(4)
    mirrored.secure(4)
    assert report(holder)[1] == {0: (4,)}


def test_nobody_votes_before_the_holder_has_acknowledged(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes; a fence ends it."""
    monkeypatch.setattr(module, "_LOOK_INTERVAL_S", 0.01)
    job.places = ONLY_0
    mirrored, ended = job.mirrors(0), list[BaseException | None]()
    mirrored.open(0)

    def vote() -> None:
        try:
            mirrored.before_vote(0)
            ended.append(None)
        except Superseded as err:
            ended.append(err)

    thread = threading.Thread(target=vote, daemon=True)
    thread.start()
    thread.join(0.1)
    assert not ended, "its holder has not even begun"
    job.keys.fence()
    until(lambda: ended)
    assert isinstance(ended[0], Superseded)


def test_a_fence_ends_the_waiting_of_who_sends_without_it(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that ships may be where no fence wakes it."""
    monkeypatch.setattr(module, "_LOOK_INTERVAL_S", 0.01)
    mirrors, go_on = job.mirrors(0), threading.Event()
    monkeypatch.setattr(Copying, "finish", lambda copying: go_on.wait(TIMEOUT_S))
    mirrors.open(0)
    job.keys.fence()
    with pytest.raises(Superseded, match="generation 1 is superseded"):
        mirrors.before_vote(0)
    go_on.set()


def test_what_ends_with_an_error_is_not_voted_for(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(copying: Copying) -> None:
        raise MemoryError

    mirrors = job.mirrors(0)
    monkeypatch.setattr(Copying, "finish", fail)
    mirrors.open(0)
    with pytest.raises(MemoryError):
        mirrors.before_vote(0)


# ---- what is said


def test_what_it_costs_is_said_when_it_grows_and_once_how_long_it_takes(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    clock = [1000.0]  # of the first step, which allocates; each later one takes 3 ms
    monkeypatch.setattr(module, "Watch", lambda: SimpleNamespace(ms=lambda: clock[0]))
    job.places = ONLY_0
    holder, mirrored = job.mirrors(1), job.mirrors(0)
    caplog.clear()
    for v in range(30):
        step(v, mirrored, holder)
        clock[0] = 3.0
    slots = 2 * mirrored._own.next().buffer.numel()
    worker, at_holder = job.workers[0], job.workers[1]
    assert [(said.own_bytes, said.held_bytes, said.wait_ms, said.steps) for said in worker.sent] == [
        (slots // 2, 0, 0.0, 0), (slots, 0, 0.0, 0), (slots, 0, 3.0, 20),
    ]  # fmt: skip
    assert at_holder.sent[-1] == m.MirrorsMeasured(1, 3, 1, slots, slots, 3.0, 20)
    assert worker.marks == [{"what": "mirrors", "bytes": slots, "wait_ms": 3.0, "steps": 20}]
    assert caplog.messages.count("mirrors: 3.00 ms per step waited for, over 20 steps") == 2, "by each of them"
    assert f"{slots} bytes of host memory on rank 0: {slots} for two copies of its own state, 0 for what" in caplog.text


# ---- after a fence


def test_after_a_fence_nothing_changes_that_was_reported(job: Job) -> None:
    job.places = ONLY_0
    holder, mirrored = job.mirrors(1), job.mirrors(0)
    for v in range(2):
        step(v, holder, mirrored)
    wanted = ((0, 1), {0: (0, 1)})
    assert report(holder) == wanted
    mirrored.open(2)
    with pytest.raises(OSError, match="did not reach the holder of its mirror"):
        mirrored.before_vote(2)
    assert report(holder) == wanted


def test_a_copy_that_is_under_way_is_reported(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the copy under way is waited for; not that it is sent, for which the other end may be gone."""
    go_on, finish = threading.Event(), Copying.finish
    job.places = ONLY_0
    holder, mirrored = job.mirrors(1), job.mirrors(0)
    step(0, holder, mirrored)

    def finish_later(copying: Copying) -> None:
        assert go_on.wait(TIMEOUT_S)
        finish(copying)

    monkeypatch.setattr(Copying, "finish", finish_later)
    mirrored.open(1)
    job.keys.fence()
    threading.Timer(0.1, go_on.set).start()
    assert report(mirrored)[0] == (0, 1)


def test_what_the_holder_takes_in_until_it_is_frozen_is_reported(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank whose mirror it is may count on what was acknowledged."""
    job.places = ONLY_0
    holder, mirrored = job.mirrors(1), job.mirrors(0)
    step(0, holder, mirrored)
    freeze = MirrorHolder.freeze

    def take_one_more(its: MirrorHolder) -> None:
        if its is holder._holder:
            step(1, mirrored)
        freeze(its)

    with monkeypatch.context() as patch:
        patch.setattr(MirrorHolder, "freeze", take_one_more)
        assert report(holder) == ((0,), {0: (0, 1)})


def test_a_fence_ends_what_a_holder_that_has_stopped_would_hold_up(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the connection, and never says a word."""
    introduce, begun = shipping.connect_authenticated, threading.Event()

    def patiently(connection: socket.socket, secret: bytes) -> None:
        begun.set()
        introduce(connection, secret, 10 * TIMEOUT_S)

    monkeypatch.setattr(shipping, "connect_authenticated", patiently)
    job.places = ONLY_0
    mirrored = job.mirrors(0)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        job.keys.store(1, "mirror/1", (1, 0), 1).set("address", encode(Address(*stopped.getsockname())))
        mirrored.open(0)
        assert begun.wait(TIMEOUT_S)
        sending = mirrored._job
        assert sending is not None and not sending.ended.is_set()
        job.keys.fence()
        assert report(mirrored) == ((0,), {})
        assert sending.ended.wait(TIMEOUT_S) and isinstance(sending.error, Superseded)


def test_a_report_need_not_wait_until_a_holder_is_given_up(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a node that is gone: nothing answers who connects to it."""
    gone, tried = threading.Event(), threading.Event()

    def connect(*args: Any, **options: Any) -> socket.socket:
        tried.set()
        gone.wait(TIMEOUT_S)
        raise TimeoutError

    monkeypatch.setattr(shipping.socket, "create_connection", connect)
    job.places = ONLY_0
    mirrored = job.mirrors(0)
    job.keys.store(1, "mirror/1", (1, 0), 1).set("address", encode(Address("127.0.0.1", 1)))
    mirrored.open(0)
    assert tried.wait(TIMEOUT_S)
    job.keys.fence()
    assert report(mirrored) == ((0,), {})
    sending = mirrored._job
    assert sending is not None and not sending.ended.is_set()
    gone.set()
    assert sending.ended.wait(TIMEOUT_S) and isinstance(sending.error, Superseded)


# ---- the plan


def test_where_training_goes_on_later_steps_are_forgotten(job: Job) -> None:
    both = [job.mirrors(rank) for rank in range(2)]
    for v in range(2):
        step(v, *both)
    for mirrors in both:
        mirrors.freeze(REPORT)
        mirrors.forget_after(0)
    for rank, mirrors in enumerate(both):
        assert report(mirrors) == ((0,), {1 - rank: (0,)})
        with pytest.raises(KeyError, match="no complete copy of step 1"):
            mirrors.go_back(1)
        with pytest.raises(KeyError, match="no complete copy of step 1"):
            mirrors.held(1 - rank, 1)


def test_in_the_next_generation_all_begins_anew_with_what_is_held(job: Job) -> None:
    both = [job.mirrors(rank) for rank in range(2)]
    step(0, *both)
    job.keys.fence()
    for mirrors in both:
        mirrors.freeze(REPORT)
        mirrors.forget_after(0)
        mirrors.complete()
    assert [report(mirrors) for mirrors in both] == [((0,), {1: (0,)}), ((0,), {0: (0,)})]
    job.begin(2)
    step(1, *both)
    assert [report(mirrors) for mirrors in both] == [((0, 1), {1: (0, 1)}), ((0, 1), {0: (0, 1)})]
    assert sorted(job.keys.posted)[1::2] == [("mirror/0", 2, 0), ("mirror/1", 2, 1)]


def test_who_is_held_elsewhere_from_now_on_is_given_back(job: Job) -> None:
    both = [job.mirrors(rank) for rank in range(2)]
    step(0, *both)
    job.keys.fence()
    job.places = ONLY_0
    for mirrors in both:
        mirrors.freeze(REPORT)
        mirrors.complete()
    assert [report(mirrors) for mirrors in both] == [((0,), {}), ((0,), {0: (0,)})]


def test_a_rank_that_is_fenced_before_its_first_step_has_nothing_to_report(job: Job) -> None:
    assert report(job.mirrors(0)) == ((), {})


def test_a_fence_explains_whatever_goes_wrong_with_the_holder(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.places = ONLY_0
    holder, mirrored = job.mirrors(1), job.mirrors(0)
    step(0, holder, mirrored)
    job.keys.fence()
    holder.freeze(REPORT)
    mirrored.open(1)
    with pytest.raises(Superseded):
        mirrored.before_vote(1)
    assert "did not reach" not in caplog.text, "nobody is at fault"
