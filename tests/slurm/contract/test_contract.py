"""What every Scheduler must do, on a real cluster, whatever Slurm it is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashrec.devcluster.cluster import DevCluster
from flashrec.devcluster.errors import DevClusterError
from flashrec.slurm.scheduler import JobInfo, NodeInfo, Scheduler, SlurmError, SlurmUnavailable
from tests.slurm.contract.conftest import Ask, Make
from tests.slurm.contract.scene import EVIL, FORGED, submit
from tests.support.cluster import wait_for

pytestmark = pytest.mark.devcluster

WAIT_S = 60
USER = "games"  # an ordinary user of every Debian; 26.05 makes no reservation for nobody


def await_job(ask: Ask, scheduler: Scheduler, job_id: int, is_so: Callable[[JobInfo], bool], what: str) -> JobInfo:
    seen: list[JobInfo] = []

    def look() -> bool:
        seen[:] = [ask(scheduler.job(job_id))]
        return is_so(seen[0])

    wait_for(look, f"job {job_id} {what}", WAIT_S)
    return seen[0]


def await_usable(ask: Ask, scheduler: Scheduler, node: str) -> None:
    """Slurm takes a node for not responding after an update of its state, until its next ping."""
    wait_for(lambda: ask(scheduler.nodes([node]))[node].is_usable, f"{node} is usable again", WAIT_S)


@pytest.fixture
def job(cluster: DevCluster) -> Any:
    """Submit jobs; none outlives the test, and the next test finds the nodes free."""
    ids: list[int] = []

    def start(*options: str, **more: Any) -> int:
        ids.append(submit(cluster, *options, **more))
        return ids[-1]

    yield start
    cluster.run(["scancel", *map(str, ids)], check=False)
    if ids:
        named = f"--jobs={','.join(map(str, ids))}"
        wait_for(lambda: not cluster.run(["squeue", "-h", named]).stdout.strip(), "the test's jobs are gone", WAIT_S)


def test_version(ask: Ask, scheduler: Scheduler, cluster: DevCluster) -> None:
    printed = cluster.run(["sinfo", "--version"]).stdout.split()[-1]
    assert ask(scheduler.version()) == tuple(int(part) for part in printed.split(".")[:2])


def test_config(ask: Ask, scheduler: Scheduler, cluster: DevCluster) -> None:
    config = ask(scheduler.config())
    assert config["ClusterName"] == cluster.spec.name
    assert config["SlurmdTimeout"] == "3600 sec"
    assert config["PrologFlags"] == ""


def test_nodes(ask: Ask, scheduler: Scheduler, cluster: DevCluster) -> None:
    nodes = ask(scheduler.nodes())
    assert set(nodes) == set(cluster.nodes)
    spare = nodes["n3"]
    assert (spare.name, spare.address) == ("n3", cluster.spec.address("n3"))
    assert set(spare.features) == set(spare.active_features) == {"flashspare", "rack1"}
    assert spare.partitions == ("main",)
    assert spare.num_cpus == cluster.spec.cpus_per_node
    assert spare.memory_mb > 1
    assert spare.states == {"IDLE"}
    assert spare.is_usable and not spare.is_busy
    assert spare.reason == ""
    assert spare.version.startswith(".".join(f"{part:02}" for part in ask(scheduler.version())))
    assert 0 < (spare.boot_time or 0) <= time.time()
    assert nodes["n0"].features == ()


def test_some_nodes(ask: Ask, scheduler: Scheduler) -> None:
    assert set(ask(scheduler.nodes(["n1", "n2"]))) == {"n1", "n2"}
    assert ask(scheduler.nodes([])) == {}
    with pytest.raises(SlurmError, match="nope") as caught:
        ask(scheduler.nodes(["n1", "nope"]))
    assert not isinstance(caught.value, SlurmUnavailable)
    with pytest.raises(SlurmError, match="nope"):
        ask(scheduler.nodes(["nope"]))


def test_a_hidden_node_is_seen(ask: Ask, scheduler: Scheduler, cluster: DevCluster) -> None:
    cluster.run(["scontrol", "update", "partitionname=main", "hidden=yes"])
    try:
        assert set(ask(scheduler.nodes(["n1"]))) == {"n1"}
        assert set(ask(scheduler.nodes())) == set(cluster.nodes)
    finally:
        cluster.run(["scontrol", "update", "partitionname=main", "hidden=no"])


def test_a_jobs_life(ask: Ask, scheduler: Scheduler, cluster: DevCluster, job: Any) -> None:
    job_id = job("--nodes=2", "--time=7", "--job-name=plain", "--comment=said", "--hold", user=USER)
    waiting = ask(scheduler.job(job_id))
    assert (waiting.job_id, waiting.state, waiting.states) == (job_id, "PENDING", {"PENDING"})
    assert (waiting.nodes, waiting.batch_host) == ((), "")
    assert (waiting.name, waiting.comment, waiting.admin_comment) == ("plain", "said", "")
    assert (waiting.user_name, waiting.user_id > 0, waiting.partition) == (USER, True, "main")
    assert (waiting.num_nodes, waiting.time_limit_s, waiting.start_time) == (2, 420.0, None)
    assert (waiting.array_job_id, waiting.array_task_id, waiting.reservation) == (None, None, "")
    assert not waiting.is_finished

    ask(scheduler.set_time_limit(job_id, 9))
    ask(scheduler.set_admin_comment(job_id, 'it\'s "mine" a=b \\'))
    cluster.run(["scontrol", "release", str(job_id)])
    running = await_job(ask, scheduler, job_id, lambda job: job.state == "RUNNING" and len(job.nodes) == 2, "runs")
    assert running.batch_host in running.nodes
    assert running.time_limit_s == 540.0
    assert running.admin_comment == 'it\'s "mine" a=b \\'
    assert running.start_time and running.end_time == pytest.approx(running.start_time + 540, abs=2)
    assert abs(time.time() - running.start_time) < 600, "seconds since the epoch, whatever the time zone"
    assert [found.job_id for found in ask(scheduler.jobs(user=USER))] == [job_id]
    nodes = ask(scheduler.nodes(running.nodes))
    assert all(node.is_busy and node.is_usable for node in nodes.values())

    def has_steps() -> bool:
        steps = {step.step_id: set(step.nodes) for step in ask(scheduler.steps(job_id))}
        return steps == {"0": set(running.nodes), "batch": {running.batch_host}}

    wait_for(has_steps, "the job's steps are seen", WAIT_S)
    ask(scheduler.cancel(job_id))
    ended = await_job(ask, scheduler, job_id, lambda job: job.is_finished, "is cancelled")
    assert ended.state == "CANCELLED"
    assert ask(scheduler.jobs(user=USER)) == ()
    assert job_id in [found.job_id for found in ask(scheduler.jobs(states=["CANCELLED"]))]
    ask(scheduler.cancel(job_id))
    assert ask(scheduler.steps(job_id)) == ()


def test_a_job_that_fails_and_one_that_never_was(ask: Ask, scheduler: Scheduler, job: Any) -> None:
    job_id = job("--nodes=1", script="#!/bin/sh\nexit 3\n")
    ended = await_job(ask, scheduler, job_id, lambda job: job.is_finished, "fails")
    assert (ended.state, ended.states) == ("FAILED", {"FAILED"})
    for unknown in (0, 99999):
        with pytest.raises(SlurmError, match=str(unknown)) as caught:
            ask(scheduler.job(unknown))
        assert not isinstance(caught.value, SlurmUnavailable)
    for call in (scheduler.set_time_limit(99999, 3), scheduler.set_admin_comment(99999, "x")):
        with pytest.raises(SlurmError):
            ask(call)


def test_what_a_user_types_is_never_taken_for_slurms_answer(ask: Ask, scheduler: Scheduler, job: Any) -> None:
    """Name and comment hold lines, fields and errors that look like Slurm's own."""
    forged = job("--nodes=2", "--time=10", *FORGED, user=USER)
    honest = job("--nodes=1")
    await_job(ask, scheduler, forged, lambda job: job.state == "RUNNING", "runs")
    await_job(ask, scheduler, honest, lambda job: job.state == "RUNNING", "runs")
    seen = {found.job_id: found for found in ask(scheduler.jobs())}
    assert set(seen) == {forged, honest}
    for found in (seen[forged], ask(scheduler.job(forged))):
        assert (found.state, found.user_name, len(found.nodes)) == ("RUNNING", USER, 2)
        assert set(found.nodes) <= {"n0", "n1", "n2", "n3"}
        assert (found.name, found.comment, found.admin_comment) == (EVIL, EVIL, "")
    assert [found.job_id for found in ask(scheduler.jobs(name=EVIL))] == [forged]
    assert {step.step_id for step in ask(scheduler.steps(forged))} <= {"0", "batch"}
    with pytest.raises(SlurmError):
        ask(scheduler.job(666))


def test_odd_bytes_of_a_user_hide_no_job(ask: Ask, scheduler: Scheduler, cluster: DevCluster, job: Any) -> None:
    options = [os.fsdecode(b"--job-name=a\x01\xff\x1b[31m\x7f"), os.fsdecode(b"--comment=\xc3\x28")]
    odd, plain = job("--nodes=1", *options, user=USER), job("--nodes=1")
    assert {found.job_id for found in ask(scheduler.jobs())} == {odd, plain}
    assert ask(scheduler.job(odd)).user_name == USER


def test_an_array(ask: Ask, scheduler: Scheduler, job: Any) -> None:
    array_id = job("--array=1-2", "--nodes=1")

    def tasks() -> dict[int | None, JobInfo]:
        return {found.array_task_id: found for found in ask(scheduler.jobs()) if found.array_job_id == array_id}

    wait_for(lambda: {t: f.state for t, f in tasks().items()} == {1: "RUNNING", 2: "RUNNING"}, "both run", WAIT_S)
    for task, found in tasks().items():
        alone = ask(scheduler.job(found.job_id))
        assert (alone.job_id, alone.array_task_id, alone.nodes) == (found.job_id, task, found.nodes)
        wait_for(lambda job_id=found.job_id: len(ask(scheduler.steps(job_id))) == 2, "its steps only", WAIT_S)
        assert {step.nodes for step in ask(scheduler.steps(found.job_id))} == {found.nodes}


def test_a_job_shrinks_when_a_node_is_down(ask: Ask, scheduler: Scheduler, cluster: DevCluster, job: Any) -> None:
    job_id = job("--nodes=3")
    before = await_job(ask, scheduler, job_id, lambda job: job.state == "RUNNING", "runs")
    lost = next(node for node in before.nodes if node != before.batch_host)
    seen: list[NodeInfo] = []

    def is_down() -> bool:  # its slurmd lives, and takes the node back at its next registration: perhaps at once
        cluster.run(["scontrol", "update", f"nodename={lost}", "state=down", "reason=test"])
        seen[:] = [ask(scheduler.nodes([lost]))[lost]]
        return "DOWN" in seen[0].states

    try:
        wait_for(is_down, f"{lost} is seen down", WAIT_S)
        node = seen[0]
        assert not node.is_usable
        assert node.reason == "test"
        after = await_job(ask, scheduler, job_id, lambda job: len(job.nodes) == 2, "shrinks")
        assert (after.state, set(after.nodes)) == ("RUNNING", set(before.nodes) - {lost})
    finally:
        with contextlib.suppress(DevClusterError):  # it may be back already
            cluster.run(["scontrol", "update", f"nodename={lost}", "state=resume"])
        await_usable(ask, scheduler, lost)


def test_drain_and_undrain(ask: Ask, scheduler: Scheduler, job: Any) -> None:
    reason = 'flashrec: job 7, node lost  "x" State=IDLE \\'

    def node() -> Any:
        return ask(scheduler.nodes(["n2"]))["n2"]

    ask(scheduler.undrain("n2"))
    assert node().is_usable, "to undrain a node that is fine is no error"
    ask(scheduler.drain("n2", reason + "\nJobId=666"))
    assert not node().is_usable
    assert "DRAIN" in node().states
    assert (node().reason, node().reason_by) == (reason + " JobId=666", "root")
    assert abs((node().reason_time or 0) - time.time()) < 60
    ask(scheduler.undrain("n2"))
    assert "DRAIN" not in node().states
    await_usable(ask, scheduler, "n2")
    for wrong in ("nope", "n1,n2", "n[1-2]", "ALL", ""):
        with pytest.raises((SlurmError, ValueError)):
            ask(scheduler.drain(wrong, "x"))
    with pytest.raises(ValueError, match="reason"):
        ask(scheduler.drain("n2", " "))
    assert all(node.is_usable for node in ask(scheduler.nodes()).values())


def test_drain_of_a_busy_node(ask: Ask, scheduler: Scheduler, job: Any) -> None:
    job_id = job("--nodes=1", "--nodelist=n1")
    await_job(ask, scheduler, job_id, lambda job: job.state == "RUNNING", "runs")
    ask(scheduler.drain("n1", "x"))
    node = ask(scheduler.nodes(["n1"]))["n1"]
    assert node.is_busy and not node.is_usable
    assert ask(scheduler.job(job_id)).state == "RUNNING"
    ask(scheduler.undrain("n1"))
    await_usable(ask, scheduler, "n1")


def test_undrain_leaves_a_lost_node_down(ask: Ask, scheduler: Scheduler, cluster: DevCluster) -> None:
    cluster.run(["scontrol", "update", "nodename=n2", "state=down", "reason=lost"])
    ask(scheduler.drain("n2", "x"))
    ask(scheduler.undrain("n2"))
    assert "DOWN" in ask(scheduler.nodes(["n2"]))["n2"].states
    cluster.run(["scontrol", "update", "nodename=n2", "state=resume"])
    await_usable(ask, scheduler, "n2")


def test_reservations(ask: Ask, make: Make, cluster: DevCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    scheduler = make()
    assert ask(scheduler.reservations()) == ()
    assert ask(scheduler.reservation("spares")) is None
    ask(scheduler.create_reservation("spares", node_count=2, partition="main", users=[USER],
                                     flags=["REPLACE_DOWN"]))  # fmt: skip
    try:
        made = ask(scheduler.reservation("spares"))
        assert (made.name, made.node_count, len(made.nodes), made.partition) == ("spares", 2, 2, "main")
        assert (made.users, made.accounts, made.features) == ((USER,), (), "")
        assert "REPLACE_DOWN" in made.flags
        assert made.is_active
        assert abs(time.time() - made.start_time) < 600
        assert made.end_time > time.time() + 300 * 86400
        with pytest.raises(SlurmError):
            ask(scheduler.create_reservation("spares", nodes=["n1"], users=["root"]))
        said = "comment=x Users=eve State=INACTIVE"  # 22.05 has no such field
        cluster.run(["scontrol", "update", "reservationname=spares", said], check=False)
        ask(scheduler.update_reservation("spares", node_count=1, users=[USER, "root"], flags=["FLEX"]))
        changed = ask(scheduler.reservation("spares"))
        assert (changed.node_count, set(changed.users)) == (1, {USER, "root"})
        assert changed.is_active
        assert changed.flags >= {"REPLACE_DOWN", "FLEX"}
        ask(scheduler.create_reservation("later", nodes=["n0"], users=["root"], start="now+1hour", duration="60",
                                         flags=["IGNORE_JOBS"]))  # fmt: skip
        found = ask(scheduler.reservations())
        assert [(r.name, r.is_active) for r in found] == [("later", False), ("spares", True)]
        assert found[0].nodes == ("n0",)
        assert found[0].end_time - found[0].start_time == 3600
    finally:
        ask(scheduler.delete_reservation("spares"))
        ask(scheduler.delete_reservation("later"))
    ask(scheduler.delete_reservation("spares"))
    assert ask(scheduler.reservations()) == ()


def test_a_job_in_a_reservation(ask: Ask, scheduler: Scheduler, job: Any) -> None:
    ask(scheduler.create_reservation("spares", features="flashspare&rack1", node_count=1, partition="main",
                                     users=[USER]))  # fmt: skip
    try:
        assert ask(scheduler.reservation("spares")).nodes == ("n3",)
        job_id = job("--nodes=1", "--reservation=spares", "--constraint=flashspare&rack1", user=USER)
        running = await_job(ask, scheduler, job_id, lambda job: job.state == "RUNNING", "runs")
        assert (running.reservation, running.nodes) == ("spares", ("n3",))
        assert running.features == "flashspare&rack1"
        with pytest.raises(SlurmError):
            ask(scheduler.delete_reservation("spares"))
        assert ask(scheduler.reservation("spares")) is not None
        ask(scheduler.cancel(job_id))
        await_job(ask, scheduler, job_id, lambda job: job.is_finished, "ends")
    finally:
        ask(scheduler.delete_reservation("spares"))


def test_a_user_is_refused_what_is_not_theirs(
    ask: Ask, scheduler: Scheduler, make_cli: Make, cluster: DevCluster, job: Any
) -> None:
    job_id = job("--nodes=1", "--time=10")
    ask(scheduler.drain("n2", "root said so"))
    theirs = make_cli(user=USER)
    refused: dict[str, Any] = {
        "cancel": theirs.cancel(job_id),
        "time-limit": theirs.set_time_limit(job_id, 60),
        "admin-comment": theirs.set_admin_comment(job_id, "x"),
        "drain": theirs.drain("n1", "x"),
        "undrain": theirs.undrain("n2"),
        "create": theirs.create_reservation("r", nodes=["n1"], users=[USER]),
        "delete": theirs.delete_reservation("r"),
    }
    ask(scheduler.create_reservation("r", nodes=["n3"], users=["root"]))
    try:
        for name, call in refused.items():
            with pytest.raises(SlurmError) as caught:
                ask(call)
            assert not isinstance(caught.value, SlurmUnavailable), name
        mine = ask(scheduler.job(job_id))
        assert (mine.is_finished, mine.time_limit_s, mine.admin_comment) == (False, 600.0, "")
        nodes = ask(scheduler.nodes())
        assert "DRAIN" in nodes["n2"].states and "DRAIN" not in nodes["n1"].states
        assert ask(scheduler.reservation("r")).nodes == ("n3",)
    finally:
        ask(scheduler.delete_reservation("r"))
        ask(scheduler.undrain("n2"))
    await_usable(ask, scheduler, "n2")


CALLS: dict[str, Callable[[Scheduler], Any]] = {
    "job": lambda s: s.job(1),
    "jobs": lambda s: s.jobs(),
    "steps": lambda s: s.steps(1),
    "nodes": lambda s: s.nodes(),
    "one-node": lambda s: s.nodes(["n1"]),
    "reservations": lambda s: s.reservations(),
    "reservation": lambda s: s.reservation("spares"),
    "config": lambda s: s.config(),
    "cancel": lambda s: s.cancel(1),
    "time-limit": lambda s: s.set_time_limit(1, 5),
    "admin-comment": lambda s: s.set_admin_comment(1, "x"),
    "drain": lambda s: s.drain("n1", "x"),
    "undrain": lambda s: s.undrain("n1"),
    "create": lambda s: s.create_reservation("r", nodes=["n1"], users=["root"]),
    "update": lambda s: s.update_reservation("r", users=["root"]),
    "delete": lambda s: s.delete_reservation("r"),
}


def test_without_a_controller_nothing_is_said_to_be_empty(ask: Ask, scheduler: Scheduler, cluster: DevCluster) -> None:
    async def all_calls() -> dict[str, Any]:
        answers = await asyncio.gather(*(call(scheduler) for call in CALLS.values()), return_exceptions=True)
        return dict(zip(CALLS, answers, strict=True))

    cluster.stop_daemon("slurmctld")
    try:
        answers = ask(all_calls())
    finally:
        cluster.start_daemon("slurmctld")
    wrong = {name: answer for name, answer in answers.items() if not isinstance(answer, SlurmUnavailable)}
    assert not wrong


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_commands_that_hang_are_given_up_and_leave_nothing(
    call: Callable[[Scheduler], Any], ask: Ask, make_cli: Make, tmp_path: Path
) -> None:
    for name in ("squeue", "sinfo", "scontrol", "scancel"):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\nsleep 300 &\nreadlink /proc/self >{tmp_path}/pid\nsleep 300\n")
        program.chmod(0o755)
    tmp_path.chmod(0o755)
    with pytest.raises(SlurmUnavailable, match="did not answer within"):
        ask(call(make_cli(timeout_s=1.5, PATH=f"{tmp_path}:{os.environ['PATH']}")))


def test_a_controller_that_hangs(ask: Ask, make: Make, cluster: DevCluster) -> None:
    pid = cluster.status().slurmctld_pid
    assert pid is not None
    before = set(cluster.processes("ctl"))
    os.kill(pid, signal.SIGSTOP)
    try:
        scheduler = make(timeout_s=2)
        for call in (CALLS["jobs"], CALLS["nodes"], CALLS["drain"]):
            with pytest.raises(SlurmUnavailable):
                ask(call(scheduler))
        wait_for(lambda: set(cluster.processes("ctl")) <= before, "no command is left behind", WAIT_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: bool(ask(make().nodes())), "the controller is back", WAIT_S)
    cluster.run(["scontrol", "update", "nodename=n1", "state=undrain"], check=False)
