"""The edge of the pool: actions carried out, failures, the lock, drain and return; with a cluster in memory."""

from __future__ import annotations

import asyncio
import os
import pwd
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from flashrec.admin import pool_sync
from flashrec.admin.pool import PoolConfig, PoolFacts
from flashrec.admin.pool_sync import PoolError
from flashrec.slurm.scheduler import SlurmError, SlurmUnavailable
from tests.admin.pool_facts import NOW, MemoryScheduler, facts, job, node, reservation

CONFIG = PoolConfig()
BROKEN = facts(
    [node("n1", "DOWN"), node("n2"), node("n3")],
    reservation("n1", end_time=NOW + 60),
    jobs=[job(7, admin="flashrec:spare-for=6")],
)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


def sync(scheduler: MemoryScheduler, *, dry_run: bool = False, **config: Any) -> tuple[bool, list[str]]:
    said: list[str] = []
    good = run(pool_sync.sync(scheduler, PoolConfig(**config), NOW, said.append, dry_run=dry_run))  # type: ignore[arg-type]
    return good, said


def test_a_second_sync_finds_nothing_to_do() -> None:
    scheduler = MemoryScheduler(BROKEN)
    good, said = sync(scheduler, size=2)
    assert good and len(said) == 3, said
    assert scheduler.held["flashspare"].nodes == ("n2", "n3") and not scheduler.running
    assert sync(scheduler, size=2) == (True, ["pool flashspare: nothing to do"])


def test_a_dry_run_changes_nothing() -> None:
    scheduler = MemoryScheduler(BROKEN)
    _, said = sync(scheduler, size=2, dry_run=True)
    assert scheduler.calls == ["nodes", "reservations", "jobs"]
    assert all(line.startswith("would ") for line in said) and len(said) == 3


def test_a_reservation_of_another_kind_is_deleted_and_made() -> None:
    scheduler = MemoryScheduler(facts([node("n1")], reservation("n1", flags=frozenset({"REPLACE_DOWN"}))))
    assert sync(scheduler)[0]
    assert scheduler.calls[-2:] == ["delete", "create"]
    assert sync(scheduler) == (True, ["pool flashspare: nothing to do"])


@pytest.mark.parametrize("question", ["nodes", "reservations", "jobs"])
def test_what_could_not_be_asked_changes_nothing(question: str) -> None:
    scheduler = MemoryScheduler(BROKEN, {question: SlurmUnavailable("no controller")})
    with pytest.raises(SlurmUnavailable):
        sync(scheduler)
    assert set(scheduler.calls) <= {"nodes", "reservations", "jobs"}


def test_what_slurm_refuses_does_not_keep_the_rest_from_being_done() -> None:
    scheduler = MemoryScheduler(BROKEN, {"cancel": SlurmError("Access denied")})
    good, said = sync(scheduler, size=2)
    assert not good and "failed: Access denied" in said
    assert scheduler.held["flashspare"].nodes == ("n2", "n3")


def test_too_few_nodes_is_not_good() -> None:
    good, said = sync(MemoryScheduler(facts([node("n1")], reservation("n1"))), size=2)
    assert not good and "1 usable nodes for a pool of 2" in said[0]


def test_one_sync_at_a_time(tmp_path: Path) -> None:
    with pool_sync.alone("a", tmp_path):
        with pool_sync.alone("b", tmp_path):
            pass
        with pytest.raises(PoolError, match="another sync of pool a"), pool_sync.alone("a", tmp_path):
            pass
    with pool_sync.alone("a", tmp_path):
        pass


def test_an_operators_lock_is_where_no_other_user_can_hold_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = pwd.struct_passwd(("operator", "x", 4711, 4711, "", str(tmp_path), "/bin/sh"))
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: owner)
    with pool_sync.alone("a"):
        assert [path.name for path in tmp_path.iterdir()] == [".flashrec-pool-a-4711.lock"]


def test_the_lock_follows_no_link(tmp_path: Path) -> None:
    with pool_sync.alone("a", tmp_path):
        (lock,) = tmp_path.iterdir()
    lock.unlink()
    lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PoolError, match="cannot lock"), pool_sync.alone("a", tmp_path):
        pass
    assert not (tmp_path / "elsewhere").exists()


# ---- drain and return

POOL = facts(
    [
        node("n1"),
        node("n2", "IDLE", "DRAIN", reason="flashrec pool: fan"),
        node("n3", "IDLE", "DRAIN", reason="memory"),
        node("x1", features=""),
        node("x2", "IDLE", "DRAIN", features="", reason="flashrec pool: fan"),
    ],
    reservation("n1", "n2", "n3"),
)


def take_out(known: PoolFacts, name: str, why: str = "fan") -> MemoryScheduler:
    scheduler = MemoryScheduler(known)
    run(pool_sync.take_out(scheduler, CONFIG, name, why))  # type: ignore[arg-type]
    return scheduler


def put_back(known: PoolFacts, name: str) -> MemoryScheduler:
    scheduler = MemoryScheduler(known)
    run(pool_sync.put_back(scheduler, CONFIG, name))  # type: ignore[arg-type]
    return scheduler


def test_drain_marks_the_node_with_our_prefix_and_one_printable_line() -> None:
    scheduler = take_out(POOL, "n1", "fan\nNodeName=n9 état " + "x" * 200)
    reason = scheduler.known["n1"].reason
    assert reason.startswith("flashrec pool: fan?NodeName=n9 ?tat xxx") and len(reason) == 15 + 80


def test_drain_again_is_nothing_new() -> None:
    assert "drain" not in take_out(POOL, "n2").calls


def test_drain_leaves_other_peoples_reasons() -> None:
    with pytest.raises(PoolError, match="drained already, for another reason: 'memory'"):
        take_out(POOL, "n3")


@pytest.mark.parametrize("name", ["x1", "x2"])
def test_nodes_outside_the_pool_are_not_touched(name: str) -> None:
    with pytest.raises(PoolError, match="does not belong to pool"):
        take_out(POOL, name)
    with pytest.raises(PoolError, match="does not belong to pool"):
        put_back(POOL, name)


def test_return_undoes_only_our_own_drain() -> None:
    assert "undrain" in put_back(POOL, "n2").calls
    assert "undrain" not in put_back(POOL, "n1").calls
    with pytest.raises(PoolError, match="not drained by `flashrec pool drain`"):
        put_back(POOL, "n3")


# ---- what plugstack.conf says


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "plugstack.conf"
    path.write_text(text)
    return path


def test_arguments_of_our_line(tmp_path: Path) -> None:
    path = written(
        tmp_path, "optional other.so size=9\noptional /x/flashrecovery.so pool=p feature=f size=3 max_per_job=1\n"
    )
    assert pool_sync.read_config(path, CONFIG) == PoolConfig(name="p", feature="f", size=3)
    assert pool_sync.site_limits(path)["max_per_job"] == "1"
    assert pool_sync.site_limits(path)["max_per_user"] == "4"


def test_no_line_no_change_and_a_bad_size_is_refused(tmp_path: Path) -> None:
    assert pool_sync.read_config(written(tmp_path, "optional other.so\n"), CONFIG) == CONFIG
    with pytest.raises(PoolError, match="size=all is not a number"):
        pool_sync.read_config(written(tmp_path, "optional flashrecovery.so size=all\n"), CONFIG)
    with pytest.raises(PoolError, match="--plugstack"):
        pool_sync.read_config(tmp_path / "missing", CONFIG)


def test_the_command_line_wins() -> None:
    assert pool_sync.override(PoolConfig(size=3), size=1, name=None) == PoolConfig(size=1)
