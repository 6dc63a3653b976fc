"""The administrators' side of pools with real Slurm: submit filters, `flashrec pool`, prolog and epilog.

Everything that a user does here is done as an unprivileged user.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashrec.devcluster.cluster import DevCluster
from flashrec.devcluster.errors import NotReadyError
from flashrec.devcluster.spec import DEFAULT_STATE_DIR, Layout
from tests.support.cluster import await_no_jobs, dev_cluster, new_name, wait_for
from tests.support.plugin import SOURCES, build_plugin

pytestmark = pytest.mark.devcluster

USER, OTHER = "mail", "games"
FLASHREC = [sys.executable, "-m", "flashrec.cli.main"]
ARGUMENTS = "pool=flashspare max_per_job=1 max_per_user=2 extend=5 drain=user no_kill=cli_filter"


def conf_files(etc: Path) -> dict[str, str]:
    """The example scripts as an administrator would install them, and the modules beside them."""
    lua = SOURCES / "lua"
    files = {name: (lua / name).read_text() for name in ("flashrec_cli_filter.lua", "flashrec_job_submit.lua")}
    for name in ("cli_filter.lua", "job_submit.lua"):
        text = (lua / f"{name}.example").read_text()
        text = text.replace("/etc/slurm/plugstack.conf.d/flashrecovery.conf", str(etc / "plugstack.conf"))
        files[name] = text.replace("/etc/slurm/", f"{etc}/")
    return files


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    name = new_name()
    hooks = SOURCES / "hooks"
    with dev_cluster(
        name=name,
        num_nodes=6,
        slurmd_timeout_s=3600,
        features={"n3": "gpu", "n4": "flashspare", "n5": "flashspare"},
        plugstack=(f"optional {build_plugin()} {ARGUMENTS}",),
        conf_files=conf_files(Layout(DEFAULT_STATE_DIR, name).conf_dir),
        extra_conf=(
            "JobSubmitPlugins=lua",
            "CliFilterPlugins=cli_filter/lua",
            "NodeSet=spares Feature=flashspare",
            f"Prolog={hooks / 'flashrec-prolog'}",
            f"Epilog={hooks / 'flashrec-epilog'}",
            "PrologFlags=Alloc",
        ),
    ) as cluster:
        yield cluster
        shutil.rmtree(f"/var/spool/flashrec/{name}", ignore_errors=True)


@pytest.fixture(autouse=True)
def clean(cluster: DevCluster) -> Iterator[None]:
    """Each test begins with a pool of n4 and n5, and leaves no job and no drained node."""
    pool(cluster, "sync")
    yield
    cluster.run(["scancel", f"--user={USER}"])
    cluster.run(["scancel", f"--user={OTHER}"])
    await_no_jobs(cluster)
    for node in cluster.nodes:
        cluster.run(["scontrol", "update", f"nodename={node}", "state=resume"], check=False)
    wait_for(lambda: all(cluster.slurm_state(n) in ("idle", "reserved") for n in cluster.nodes), "idle nodes", 60)


def pool(cluster: DevCluster, *arguments: str, user: str | None = None) -> subprocess.CompletedProcess[str]:
    plugstack = str(cluster.layout.conf_dir / "plugstack.conf")
    return cluster.run([*FLASHREC, "pool", "--plugstack", plugstack, *arguments], user=user, cwd="/", check=False)


def jobs(cluster: DevCluster) -> dict[int, dict[str, Any]]:
    found = json.loads(cluster.run(["squeue", "--json", "--states=all"]).stdout)["jobs"]
    return {job["job_id"]: job for job in found}


def states(job: dict[str, Any]) -> set[str]:
    state = job["job_state"]
    return set(state) if isinstance(state, list) else {state}


def submit(cluster: DevCluster, *options: str, script: str = "sleep 600", user: str = USER) -> int:
    """A job that runs."""
    wrapped = f"--wrap={script}"
    argv = ["sbatch", "--parsable", "--output=/dev/null", "--time=10", *options, wrapped]
    job_id = int(cluster.run(argv, user=user, cwd="/tmp").stdout)
    try:
        wait_for(lambda: "PENDING" not in states(jobs(cluster)[job_id]), f"job {job_id} to run", 60)
    except NotReadyError as err:
        seen = [cluster.run(argv).stdout for argv in (["squeue", "-o%i %T %r %N"], ["sinfo", "-N", "-o%N %T %E"])]
        raise AssertionError("\n".join([str(err), *seen])) from err
    return job_id


def salloc(cluster: DevCluster, *options: str, user: str = USER) -> subprocess.CompletedProcess[str]:
    argv = ["salloc", "--no-shell", "--immediate=20", "--no-kill", "--nodes=1", *options]
    return cluster.run(argv, user=user, cwd="/tmp", check=False)


def companion(
    cluster: DevCluster, main: int, *options: str, user: str = USER, comment: str = "", owner: str = USER
) -> subprocess.CompletedProcess[str]:
    """As the manager does it: renew job_submit's view of the jobs, which takes effect in a later second."""
    said = comment or f"flashrec:spare-for={main}"
    for _ in range(3):
        cluster.run(["scontrol", "update", f"jobid={main}", "timelimit=+0"], user=owner, check=False)
        done = salloc(cluster, "--reservation=flashspare", f"--comment={said}", *options, user=user)
        if "is not running" not in done.stderr:
            break
        second = int(time.time())
        wait_for(lambda now=second: int(time.time()) > now, "the next second", 5)  # type: ignore[misc]
    return done


def granted(done: subprocess.CompletedProcess[str]) -> int:
    assert done.returncode == 0, done.stderr
    return int(done.stderr.split("Granted job allocation ")[1].split()[0])


def reserved(cluster: DevCluster) -> list[str]:
    line = cluster.run(["scontrol", "-o", "show", "reservation", "flashspare"]).stdout
    nodes = line.split(" Nodes=")[1].split()[0]
    return cluster.run(["scontrol", "show", "hostnames", nodes]).stdout.split()


# ---- the submit filters


@pytest.mark.parametrize("command", ["sbatch", "srun", "salloc"])
def test_an_ordinary_job_does_not_get_into_the_pool(cluster: DevCluster, command: str) -> None:
    argv = {
        "sbatch": ["sbatch", "--reservation=flashspare", "--wrap=true"],
        "srun": ["srun", "--reservation=flashspare", "true"],
        "salloc": ["salloc", "--reservation=flashspare", "true"],
    }[command]
    done = cluster.run(argv, user=USER, cwd="/tmp", check=False)
    assert done.returncode != 0
    assert (
        "only flashrec takes nodes from it" in done.stderr and "Submit without --reservation=flashspare" in done.stderr
    )


def test_pool_nodes_run_no_ordinary_jobs(cluster: DevCluster) -> None:
    submit(cluster, "--nodes=4")
    done = cluster.run(["srun", "--immediate=3", "--nodes=1", "true"], user=USER, cwd="/tmp", check=False)
    assert done.returncode != 0


def test_the_option_adds_spares_and_no_kill(cluster: DevCluster) -> None:
    job_id = submit(cluster, "--nodes=2", "--flashrecovery=spares=1")
    nodes = cluster.run(["scontrol", "show", "hostnames", jobs(cluster)[job_id]["nodes"]]).stdout.split()
    assert len(nodes) == 3
    cluster.run(["scontrol", "update", f"nodename={nodes[-1]}", "state=down", "reason=test"])
    wait_for(lambda: nodes[-1] not in jobs(cluster)[job_id]["nodes"], "the job to shrink", 30)
    assert states(jobs(cluster)[job_id]) == {"RUNNING"}, "without --no-kill Slurm ends the job"


@pytest.mark.parametrize(
    ("options", "nodes"),
    [
        (["--nodes=2"], 2),
        (["--nodes=2", "--flashrecovery=off"], 2),
        (["--nodes=2", "--flashrecovery"], 3),
        (["--nodes=2", "--ntasks=2", "--flashrecovery=spares=1"], 3),
        (["--nodes=2", "--flashrecovery=tier=pool"], 2),
    ],
)
def test_how_many_nodes_a_job_gets(cluster: DevCluster, options: list[str], nodes: int) -> None:
    job_id = submit(cluster, *options)
    assert len(cluster.run(["scontrol", "show", "hostnames", jobs(cluster)[job_id]["nodes"]]).stdout.split()) == nodes


def test_a_companion_job_is_admitted_marked_and_bounded(cluster: DevCluster) -> None:
    main = submit(cluster, "--nodes=1")
    job_id = granted(companion(cluster, main))
    job = jobs(cluster)[job_id]
    assert job["admin_comment"] == f"flashrec:spare-for={main}" and job["nodes"] in ("n4", "n5")
    second = companion(cluster, main)
    assert second.returncode == 1
    assert f"flashrec: pool flashspare: job {main} holds 1 spare nodes, and no more than 1" in second.stderr


def test_limit_per_user(cluster: DevCluster) -> None:
    mains = [submit(cluster, "--nodes=1") for _ in range(3)]
    for main in mains[:2]:
        granted(companion(cluster, main))
    assert "this user holds 2 spare nodes" in companion(cluster, mains[2]).stderr


@pytest.mark.parametrize(
    "forged", ["flashrec:spare-for=1\nflashrec:spare-for={main}", "{main}", "x flashrec:spare-for={main}"]
)
def test_forged_comments_are_refused(cluster: DevCluster, forged: str) -> None:
    main = submit(cluster, "--nodes=1")
    assert "only flashrec takes nodes" in companion(cluster, main, comment=forged.format(main=main)).stderr


def test_nobody_takes_a_spare_for_a_job_of_others_or_a_job_that_does_not_run(cluster: DevCluster) -> None:
    main = submit(cluster, "--nodes=1")
    assert f"job {main} is not yours" in companion(cluster, main, user=OTHER).stderr
    cluster.run(["scancel", str(main)])
    wait_for(lambda: states(jobs(cluster)[main]) == {"CANCELLED"}, "the job to end", 30)
    assert f"job {main} is not running" in companion(cluster, main).stderr


def test_no_job_is_moved_into_the_pool_and_no_mark_is_forged(cluster: DevCluster) -> None:
    main, other = submit(cluster, "--nodes=1"), submit(cluster, "--nodes=1")
    for change in ("reservation=flashspare", f"admincomment=flashrec:spare-for={main}"):
        assert cluster.run(["scontrol", "update", f"jobid={other}", change], user=USER, check=False).returncode != 0
    job = jobs(cluster)[other]
    assert not job["resv_name"] and not job["admin_comment"]


# ---- flashrec pool


def test_sync_restores_the_size_after_a_node_went_down(cluster: DevCluster) -> None:
    assert reserved(cluster) == ["n4", "n5"]
    cluster.run(["scontrol", "update", "nodename=n4", "state=down", "reason=test"])
    done = pool(cluster, "--substitutes=gpu", "sync")
    assert done.returncode == 0 and "-n4 (" in done.stdout and "+n3" in done.stdout
    assert reserved(cluster) == ["n3", "n5"]
    assert pool(cluster, "--substitutes=gpu", "sync").stdout == "pool flashspare: nothing to do\n"
    cluster.run(["scontrol", "update", "nodename=n4", "state=resume"])
    wait_for(lambda: cluster.slurm_state("n4") == "idle", "n4 to return", 60)
    assert pool(cluster, "--substitutes=gpu", "sync").returncode == 0
    assert reserved(cluster) == ["n4", "n5"]


def test_sync_makes_the_pool_and_a_dry_run_does_not(cluster: DevCluster) -> None:
    cluster.run(["scontrol", "delete", "reservation=flashspare"])
    assert pool(cluster, "sync", "--dry-run").stdout.startswith("would create reservation flashspare with n4,n5")
    assert pool(cluster, "status").returncode == 3
    assert pool(cluster, "sync").returncode == 0
    assert reserved(cluster) == ["n4", "n5"] and pool(cluster, "status").returncode == 0


def test_sync_makes_a_foreign_reservation_anew(cluster: DevCluster) -> None:
    cluster.run(["scontrol", "delete", "reservation=flashspare"])
    cluster.run([
        "scontrol", "create", "reservation", "reservationname=flashspare", "nodecnt=1", "users=root", "starttime=now",
        "duration=infinite", "flags=REPLACE_DOWN", "features=flashspare",
    ])  # fmt: skip
    assert pool(cluster, "sync").returncode == 0
    assert reserved(cluster) == ["n4", "n5"]
    assert pool(cluster, "sync").stdout == "pool flashspare: nothing to do\n"


def test_sync_repairs_the_users(cluster: DevCluster) -> None:
    cluster.run(["scontrol", "update", "reservationname=flashspare", "users=root"])
    assert pool(cluster, "sync").returncode == 0
    assert pool(cluster, "sync").stdout == "pool flashspare: nothing to do\n"
    assert " Users=-daemon " in cluster.run(["scontrol", "-o", "show", "reservation", "flashspare"]).stdout


def test_sync_cancels_a_companion_job_whose_job_has_ended(cluster: DevCluster) -> None:
    lonely, forged = submit(cluster, "--nodes=1"), submit(cluster, "--nodes=1", "--comment=flashrec:spare-for=999")
    cluster.run(["scontrol", "update", f"jobid={lonely}", "admincomment=flashrec:spare-for=999"])
    assert f"cancel job {lonely}: companion job of job 999" in pool(cluster, "sync").stdout
    wait_for(lambda: states(jobs(cluster)[lonely]) == {"CANCELLED"}, "the companion job to end", 30)
    assert states(jobs(cluster)[forged]) == {"RUNNING"}


def test_status_names_who_uses_what(cluster: DevCluster) -> None:
    main = submit(cluster, "--nodes=1")
    job_id = granted(companion(cluster, main))
    shown = json.loads(pool(cluster, "status", "--json", user=USER).stdout)
    assert shown["usable"] == 2 and shown["free"] == 1 and shown["limits"]["max_per_job"] == "1"
    (row,) = [row for row in shown["nodes"] if row["companion"]]
    assert (row["companion"], row["serves"], row["user"]) == (job_id, main, USER)
    assert f" {job_id} " in pool(cluster, "status").stdout


def test_drain_and_return_a_pool_node(cluster: DevCluster) -> None:
    assert pool(cluster, "--size=1", "drain", "n4", "fan").returncode == 0
    assert reserved(cluster) == ["n5"]
    assert cluster.run(["sinfo", "-hN", "-nn4", "-o%T|%E"]).stdout.strip() == "drained|flashrec pool: fan"
    assert pool(cluster, "return", "n4").returncode == 0
    assert reserved(cluster) == ["n4", "n5"]
    cluster.run(["scontrol", "update", "nodename=n4", "state=drain", "reason=memory"])
    refused = pool(cluster, "return", "n4")
    assert refused.returncode == 1 and "not drained by `flashrec pool drain`" in refused.stderr
    assert cluster.slurm_state("n4") == "drained"


@pytest.mark.parametrize("arguments", [("drain", "n4"), ("--size=1", "sync"), ("return", "n1")])
def test_users_change_nothing(cluster: DevCluster, arguments: tuple[str, ...]) -> None:
    cluster.run(["scontrol", "update", "nodename=n1", "state=drain", "reason=flashrec pool: x"])
    done = pool(cluster, *arguments, user=USER)
    assert done.returncode == 1, done.stdout + done.stderr
    assert reserved(cluster) == ["n4", "n5"] and cluster.slurm_state("n4") in ("idle", "reserved")
    assert cluster.slurm_state("n1") == "drained"


def test_a_controller_that_is_away_is_said_and_changes_nothing(cluster: DevCluster) -> None:
    cluster.stop_daemon("slurmctld")
    try:
        began = time.monotonic()
        done = pool(cluster, "sync")
        assert done.returncode == 1 and done.stderr.startswith("Error: "), done.stderr
        assert time.monotonic() - began < 100
    finally:
        cluster.start_daemon("slurmctld")
    assert reserved(cluster) == ["n4", "n5"]


# ---- verbs


def verb(cluster: DevCluster, *arguments: str, user: str | None = None) -> subprocess.CompletedProcess[str]:
    return cluster.run([*FLASHREC, *arguments], user=user, cwd="/", check=False)


def limit(cluster: DevCluster, job_id: int) -> str:
    return cluster.run(["squeue", "-h", "-j", str(job_id), "-o", "%l"]).stdout.strip()


def test_extend_is_for_operators(cluster: DevCluster) -> None:
    main = submit(cluster, "--nodes=1")
    refused = verb(cluster, "extend", str(main), "7", user=USER)
    assert refused.returncode == 1 and limit(cluster, main) == "10:00", refused.stderr
    done = verb(cluster, "extend", str(main), "7")
    assert done.stdout == f"job {main}: time limit 17 min\n" and limit(cluster, main) == "17:00"


def test_faulty_lists_failing_nodes(cluster: DevCluster) -> None:
    main = submit(cluster, "--nodes=2", "--nodelist=n0,n1")
    assert verb(cluster, "faulty", str(main), user=USER).stdout == f"job {main}: no node is failing\n"
    cluster.run(["scontrol", "update", "nodename=n1", "state=drain", "reason=xid 79"])
    done = verb(cluster, "faulty", str(main), user=USER)
    assert done.returncode == 3 and "n1" in done.stdout and "xid 79" in done.stdout and "n0" not in done.stdout
    assert verb(cluster, "faulty", "999999", user=USER).returncode == 1


# ---- prolog and epilog


def test_a_companion_job_ends_with_its_job_after_all_of_ours_was_killed(cluster: DevCluster) -> None:
    main = submit(cluster, "--nodes=2", "--no-kill", script="sleep 601")
    job_id = granted(companion(cluster, main))
    cluster.run(["scancel", "--signal=KILL", "--full", str(main)], user=USER)
    wait_for(lambda: states(jobs(cluster)[main]) & {"FAILED", "CANCELLED"}, "the job to end", 60)
    wait_for(lambda: states(jobs(cluster)[job_id]) == {"CANCELLED"}, "its companion job to end", 60)


def test_a_companion_job_outlives_a_node_that_leaves_its_job(cluster: DevCluster) -> None:
    main = submit(cluster, "--nodes=3", "--no-kill")
    job_id = granted(companion(cluster, main))
    spool = Path("/var/spool/flashrec") / cluster.spec.name
    nodes = cluster.run(["scontrol", "show", "hostnames", jobs(cluster)[main]["nodes"]]).stdout.split()
    wait_for((spool / nodes[2] / str(main)).exists, "the prolog", 30)
    cluster.run(["scontrol", "update", f"jobid={main}", f"nodelist={nodes[0]}"])
    wait_for(lambda: not (spool / nodes[2] / str(main)).exists(), "the epilog on the node that left", 30)
    assert states(jobs(cluster)[job_id]) == {"RUNNING"}
    # 22.05 with an Epilog, whatever it does: after one more job a node that left so gets no work until this.
    cluster.run(["scancel", f"--user={USER}"])
    await_no_jobs(cluster)
    cluster.run(["scontrol", "reconfigure"])


def test_a_replacement_gives_the_job_more_time(cluster: DevCluster) -> None:
    main = submit(cluster, "--nodes=1")
    granted(companion(cluster, main))
    wait_for(lambda: limit(cluster, main) == "15:00", "5 more minutes", 30)


def report(cluster: DevCluster, text: str, *options: str) -> tuple[int, list[str]]:
    """A job whose script leaves this report, as the manager would, and ends; returns its id and nodes."""
    place = f"/var/spool/flashrec/{cluster.spec.name}/$SLURMD_NODENAME/$SLURM_JOB_ID/report"
    script = f"cd {place} || exit 9; {text}; sleep 3"
    job_id = submit(cluster, "--nodes=2", *options, script=script)
    nodes = cluster.run(["scontrol", "show", "hostnames", jobs(cluster)[job_id]["nodes"]]).stdout.split()
    wait_for(lambda: states(jobs(cluster)[job_id]) & {"COMPLETED", "FAILED"}, "the job to end", 60)
    assert states(jobs(cluster)[job_id]) <= {"COMPLETED", "COMPLETING"}, "there was no place for a report"
    spool = Path("/var/spool/flashrec") / cluster.spec.name
    wait_for(lambda: not list(spool.glob(f"*/{job_id}")), "the epilogs", 30)
    # Slurm hears of an epilog's end a little later, and says "draining" or "completing" until then.
    wait_for(lambda: not cluster.run(["squeue", "--noheader"]).stdout.strip(), "Slurm to know of them", 60)
    return job_id, nodes


def test_a_reported_node_is_drained_and_a_foreign_one_is_not(cluster: DevCluster) -> None:
    text = "(echo n5 broken; echo n0 a; echo n1 b; echo n2 c) > faulty"
    job_id, nodes = report(cluster, text, "--nodelist=n1,n2")
    assert nodes == ["n1", "n2"]
    lines = set(cluster.run(["sinfo", "-hN", "-o%N|%T|%E"]).stdout.split("\n"))
    assert {f"n1|drained|flashrec: job {job_id}: b", f"n2|drained|flashrec: job {job_id}: c"} <= lines
    assert cluster.slurm_state("n0") == "idle" and cluster.slurm_state("n5") in ("idle", "reserved")


@pytest.mark.parametrize(
    "forgery",
    [
        "ln -s /etc/passwd faulty",
        "echo n1 x > other; ln other faulty",
        "mkfifo faulty",
        "yes n1 x | head -c 100000 > faulty",
        r"printf 'n0 x\r\nall x\nn[0-5] x\n-n1 x\n\0n1 x\n' > faulty",
    ],
)
def test_forged_reports_drain_nothing(cluster: DevCluster, forgery: str) -> None:
    report(cluster, forgery, "--nodelist=n1,n2", "--comment=flashrec:spare-for=1", "--job-name=x\nNodeName=n1")
    assert [cluster.slurm_state(node) for node in ("n0", "n1", "n2", "n3")] == ["idle"] * 4


def test_users_cannot_reach_the_reports_of_others(cluster: DevCluster) -> None:
    job_id = submit(cluster, "--nodes=1")
    place = Path("/var/spool/flashrec") / cluster.spec.name
    wait_for(lambda: bool(list(place.glob(f"*/{job_id}/report"))), "the prolog", 30)
    (folder,) = place.glob(f"*/{job_id}/report")
    for command in (["ls", str(folder)], ["touch", f"{folder}/faulty"], ["touch", f"{folder.parent}/nodes"],
                    ["mkdir", f"{folder.parent.parent}/77"]):  # fmt: skip
        assert cluster.run(command, user=OTHER, check=False).returncode != 0, command
    assert cluster.run(["touch", f"{folder.parent}/nodes"], user=USER, check=False).returncode != 0


def test_no_node_was_drained_by_a_hook_of_ours(cluster: DevCluster) -> None:
    """Runs last: a prolog or epilog that fails drains its node."""
    assert "Epilog error" not in cluster.layout.ctl_log.read_text()
    assert "Prolog error" not in cluster.layout.ctl_log.read_text()
