"""What root does when jobs start and end, against commands that play Slurm; tests/e2e/test_pool_admin.py has real ones.

The reports, names and comments in here are what a user would write who wants more than is his.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HOOKS = Path(__file__).parents[2] / "slurm_plugin/hooks"
UID = os.getuid()

COMMANDS = {
    "squeue": 'echo "$*" >> "$PLAY/asked"; case "$*" in *--format*) cat "$PLAY/held";; *) cat "$PLAY/jobs.json";; esac',
    "sinfo": 'case "$*" in *%T\\|%E) cat "$PLAY/marked";; *) cat "$PLAY/state";; esac',
    "scontrol": 'if [ "$2" = hostnames ]; then echo "$3" | tr , "\\n"; exit; fi\n'
    '{ printf "%s|" "$@"; echo; } >> "$PLAY/done"\n'
    '[ ! -e "$PLAY/after" ] || mv "$PLAY/after" "$PLAY/marked"',
    "scancel": '[ "$1" != "$(cat "$PLAY/gone")" ] || exit 1\necho "cancel $*" >> "$PLAY/done"',
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, with a spool and a Slurm of its own."""
    spec = importlib.util.spec_from_file_location("flashrec_root", HOOKS / "flashrec_root.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    spec.loader.exec_module(module)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, body in COMMANDS.items():
        (commands / name).write_text(f"#!/bin/sh\n{body}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("PLAY", str(tmp_path))
    said: list[str] = []
    monkeypatch.setattr(module, "SPOOL", str(tmp_path / "spool"))
    monkeypatch.setattr(module, "log", said.append)
    module.said = said  # type: ignore[attr-defined]
    module.play = tmp_path  # type: ignore[attr-defined]
    play(module)
    return module


def play(
    root: Any, jobs: list[dict[str, Any]] | None = None, state: str = "idle\n", marked: str = "", gone: str = ""
) -> None:
    """What Slurm says from now on. gone: a job that cannot be cancelled."""
    (root.play / "held").write_text("8\n" if jobs is None or jobs else "")
    (root.play / "gone").write_text(gone)
    (root.play / "jobs.json").write_text(json.dumps({"jobs": jobs or []}))
    (root.play / "state").write_text(state)
    (root.play / "marked").write_text(marked)


def done(root: Any) -> list[str]:
    path = root.play / "done"
    return path.read_text().splitlines() if path.exists() else []


def raw(job_id: int, state: Any = "RUNNING", admin: str = "", uid: int = UID, **more: Any) -> dict[str, Any]:
    return {"job_id": job_id, "job_state": state, "user_id": uid, "admin_comment": admin, **more}


def environ(root: Any, job_id: int = 7, node: str = "n1", nodes: str = "n1,n2,n3", **more: str) -> dict[str, str]:
    conf = root.play / "slurm.conf"
    return {
        "SLURM_JOB_ID": str(job_id), "SLURM_JOB_UID": str(UID), "SLURMD_NODENAME": node, "SLURM_NODELIST": nodes,
        "SLURM_JOB_NUM_NODES": str(len(nodes.split(","))), "SLURM_CLUSTER_NAME": "c", "SLURM_CONF": str(conf),
        "SLURM_SCRIPT_CONTEXT": "epilog_slurmd", **more,
    }  # fmt: skip


def configure(root: Any, arguments: str) -> None:
    (root.play / "plugstack.conf").write_text(
        f"# optional x/flashrecovery.so drain=user\noptional flashrecovery.so {arguments}\n"
    )


def start(root: Any, **more: Any) -> Path:
    """The job starts; returns the folder for its report."""
    root.main("prolog", environ(root, **more))
    return Path(root.SPOOL) / "c" / more.get("node", "n1") / str(more.get("job_id", 7)) / "report"


def end(root: Any, **more: Any) -> None:
    root.main("epilog", environ(root, **more))


# ---- companion jobs


def test_companion_jobs_of_the_ended_job_are_cancelled_and_nothing_else(root: Any) -> None:
    mark = "flashrec:spare-for=7"
    play(root, [
        raw(7, "COMPLETING"), raw(8, admin=mark), raw(9, ["RUNNING"], mark), raw(10, "PENDING", mark),
        raw(11, "COMPLETED", mark), raw(12, admin="flashrec:spare-for=6"), raw(13, admin=mark, uid=UID + 1),
        raw(14, comment=mark, name=mark), raw(15, admin=mark + "\n"), raw(16, admin="x " + mark),
        raw(17, admin=mark + "7"),
    ])  # fmt: skip
    end(root)
    assert done(root) == ["cancel 8", "cancel 9", "cancel 10"]


def test_a_job_that_slurm_has_forgotten_has_ended(root: Any) -> None:
    play(root, [raw(8, admin="flashrec:spare-for=7")])
    end(root)
    assert done(root) == ["cancel 8"]


def test_one_that_cannot_be_cancelled_keeps_no_other(root: Any) -> None:
    play(root, [raw(8, admin="flashrec:spare-for=7"), raw(9, admin="flashrec:spare-for=7")], gone="8")
    end(root)
    assert done(root) == ["cancel 9"]


@pytest.mark.parametrize(("arguments", "pool"), [("pool=reserve", "reserve"), ("drain=user", "flashspare")])
def test_a_user_without_a_node_of_the_pool_costs_one_small_question(root: Any, arguments: str, pool: str) -> None:
    """Every job of the cluster ends with this hook, and 22.05 answers `squeue --json` with everybody's jobs."""
    configure(root, arguments)
    play(root, [])
    end(root)
    asked = (root.play / "asked").read_text().splitlines()
    assert asked == [f"--all --noheader --user={UID} --reservation={pool} --format=%A"]


@pytest.mark.parametrize("state", ["RUNNING", ["RUNNING"], "SUSPENDED", "PENDING"])
def test_where_a_node_leaves_a_job_that_goes_on_its_companions_stay(root: Any, state: Any) -> None:
    play(root, [raw(7, state), raw(8, admin="flashrec:spare-for=7")])
    end(root)
    assert done(root) == []


@pytest.mark.parametrize(
    "answer", ["", "{}", "[]", '{"jobs": [{}]}', '{"jobs": [{"job_id": "x", "job_state": 1, "user_id": 0}]}']
)
def test_an_answer_that_is_none_cancels_nothing(root: Any, answer: str) -> None:
    (root.play / "jobs.json").write_text(answer)
    end(root)
    assert done(root) == [] and any("cancel_companions" in line for line in root.said)


def test_in_a_large_job_some_nodes_look_not_all(root: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(root, "jobs_of", lambda uid: asked.append(uid) or {})
    for index in range(1000):
        end(root, node=f"n{index}", SLURM_JOB_NUM_NODES="1000")
    assert 1 <= len(asked) <= 30


def test_on_the_controller_it_always_looks(root: Any) -> None:
    play(root, [raw(8, admin="flashrec:spare-for=7")])
    end(root, node="", SLURM_JOB_NUM_NODES="1000", SLURM_SCRIPT_CONTEXT="epilog_slurmctld")
    assert done(root) == ["cancel 8"]


# ---- the report of a bad node


def test_a_reported_node_of_the_job_is_drained_with_job_and_reason(root: Any) -> None:
    configure(root, "drain=user")
    report = start(root)
    (report / "faulty").write_text("n2 silent for 2.01 s\n")
    end(root)
    assert done(root) == ["update|nodename=n2|state=drain|reason=flashrec: job 7: silent for 2.01 s|"]
    assert not report.parent.exists()


@pytest.mark.parametrize("arguments", ["", "drain=admin", "drain=users", "pool=x"])
def test_only_a_site_that_says_so_lets_reports_drain(root: Any, arguments: str) -> None:
    configure(root, arguments)
    (start(root) / "faulty").write_text("n2 broken\n")
    end(root)
    assert done(root) == [] and any("drain=user would drain it" in line for line in root.said)


def test_foreign_nodes_are_not_drained(root: Any) -> None:
    configure(root, "drain=user max_drain=9")
    (start(root) / "faulty").write_text(
        "n4 x\nn[1-3] x\nall x\nALL x\nn2,n3 x\n-n2 x\nn2;n3 x\n\nn3 good\n n9 x\n../n1 x\n"
    )
    end(root)
    assert done(root) == ["update|nodename=n3|state=drain|reason=flashrec: job 7: good|"]
    assert any("n4, which was not its own" in line for line in root.said)


def test_a_node_that_slurm_has_taken_from_the_job_is_still_its_own(root: Any) -> None:
    configure(root, "drain=user")
    (start(root) / "faulty").write_text("n3 gone\n")
    end(root, nodes="n1,n2")
    assert "nodename=n3" in done(root)[0]


def test_nodes_of_companion_jobs_are_the_jobs_own(root: Any) -> None:
    configure(root, "drain=user max_drain=9")
    mark = "flashrec:spare-for=7"
    foreign = raw(10, admin=mark, uid=UID + 1, nodes="s3")
    play(root, [raw(8, "RUNNING", mark, nodes="s1"), raw(9, nodes="s2"), foreign])
    (start(root) / "faulty").write_text("s1 bad\ns2 bad\ns3 bad\n")
    end(root)
    assert [line for line in done(root) if "drain" in line] == [
        "update|nodename=s1|state=drain|reason=flashrec: job 7: bad|"
    ]


def test_without_a_record_of_our_own_nothing_is_drained(root: Any) -> None:
    configure(root, "drain=user")
    report = start(root)
    (report / "faulty").write_text("n2 x\n")
    (report.parent / "nodes").unlink()
    end(root)
    assert done(root) == []


def test_only_the_first_node_of_the_job_acts(root: Any) -> None:
    configure(root, "drain=user")
    (start(root, node="n2") / "faulty").write_text("n2 x\n")
    end(root, node="n2")
    assert done(root) == []


def test_the_reason_is_one_printable_line_of_bounded_length(root: Any) -> None:
    configure(root, "drain=user")
    (start(root) / "faulty").write_bytes(b'n2 a\x1b[31m\tb\xc3\xa9 "q" State=IDLE ' + b"x" * 500 + b"\n")
    end(root)
    (line,) = done(root)
    reason = line.split("reason=flashrec: job 7: ")[1].rstrip("|")
    assert reason.startswith("a?[31m?b?? 'q' State=IDLE xxx") and len(reason) == 100


def test_a_node_that_is_drained_already_keeps_its_reason(root: Any) -> None:
    configure(root, "drain=user")
    for state in ("drained\n", "draining\n", "idle+drain\n"):
        play(root, state=state)
        (start(root) / "faulty").write_text("n2 x\n")
        end(root)
    assert done(root) == []


def test_no_more_nodes_than_the_site_allows(root: Any) -> None:
    configure(root, "drain=user max_drain=2")
    ours = "n8|drained|flashrec: job 5: x\nn9|drained|flashrec: job 6: x\n"
    play(root, marked=ours + "n7|drained|memory\nn6|idle|flashrec: job 1: x\n")
    (start(root) / "faulty").write_text("n2 x\n")
    end(root)
    assert done(root) == [] and any("max_drain" in line for line in root.said)


def test_nodes_that_are_back_in_service_do_not_count(root: Any) -> None:
    configure(root, "drain=user max_drain=2")
    play(root, marked="n8|drained|flashrec: job 5: x\nn6|idle|flashrec: job 1: x\nn7|drained|x flashrec: job 1: x\n")
    (start(root) / "faulty").write_text("n2 x\n")
    end(root)
    assert len(done(root)) == 1


def test_several_jobs_at_once_take_their_own_back(root: Any) -> None:
    configure(root, "drain=user max_drain=1")
    (root.play / "after").write_text("n2|drained|flashrec: job 7: x\nn8|drained|flashrec: job 8: x\n")
    (start(root) / "faulty").write_text("n2 x\n")
    end(root)
    assert [line.split("|")[2] for line in done(root)] == ["state=drain", "state=undrain"]


def forge_link(report: Path, elsewhere: Path) -> None:
    elsewhere.write_text("n2 x\n")
    (report / "faulty").symlink_to(elsewhere)


def forge_hard_link(report: Path, elsewhere: Path) -> None:
    elsewhere.write_text("n2 x\n")
    os.link(elsewhere, report / "faulty")


def forge_folder(report: Path, elsewhere: Path) -> None:
    report.rmdir()
    elsewhere.mkdir()
    (elsewhere / "faulty").write_text("n2 x\n")
    report.symlink_to(elsewhere)


def forge_pipe(report: Path, elsewhere: Path) -> None:
    os.mkfifo(report / "faulty")


def forge_size(report: Path, elsewhere: Path) -> None:
    (report / "faulty").write_text("n2 x\n" + "\n" * 5000)


def forge_directory(report: Path, elsewhere: Path) -> None:
    (report / "faulty").mkdir()


FORGERIES = [forge_link, forge_hard_link, forge_folder, forge_pipe, forge_size, forge_directory]


@pytest.mark.parametrize("forge", FORGERIES)
def test_a_report_that_is_no_plain_small_file_is_not_read(root: Any, forge: Callable[[Path, Path], None]) -> None:
    configure(root, "drain=user")
    elsewhere = root.play / "elsewhere"
    forge(start(root), elsewhere)
    end(root)
    assert done(root) == [] and any("drain_reported" in line for line in root.said)
    assert not elsewhere.exists() or elsewhere.is_file() or (elsewhere / "faulty").exists(), (
        "cleaning followed the link"
    )


def test_whatever_a_user_left_in_the_folder_it_goes(root: Any) -> None:
    """A tree deeper than Python's recursion; else a user could keep a folder of root's spool for ever."""
    report = start(root)
    here = os.open(report, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    end(root)
    assert not report.parent.exists()


def test_a_report_of_another_user_is_not_read(root: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(root, "drain=user")
    monkeypatch.setattr(os, "chown", lambda *_: None)
    monkeypatch.setattr(root.pwd, "getpwuid", lambda _: type("P", (), {"pw_gid": 0}))
    (start(root, SLURM_JOB_UID=str(UID + 1)) / "faulty").write_text("n2 x\n")
    end(root, SLURM_JOB_UID=str(UID + 1))
    assert done(root) == [] and any("not a plain file of user" in line for line in root.said)


def test_no_more_than_some_nodes_of_one_report(root: Any) -> None:
    configure(root, "drain=user max_drain=99")
    nodes = ",".join(f"n{index}" for index in range(1, 21))
    (start(root, nodes=nodes) / "faulty").write_text("".join(f"n{index} x\n" for index in range(1, 21)))
    end(root, nodes=nodes)
    assert len(done(root)) == 8


def test_a_requeued_job_begins_with_an_empty_folder(root: Any) -> None:
    (start(root) / "faulty").write_text("n2 x\n")
    assert not list(start(root).iterdir())


# ---- more time for the repaired job


def companion(**more: Any) -> dict[str, Any]:
    return raw(8, "RUNNING", "flashrec:spare-for=7", submit_time=1000, start_time=1130, **more)


def limits(root: Any, arguments: str, jobs: list[dict[str, Any]], nodes: str = "n1") -> list[str]:
    """What is done about time limits when companion job 8 starts; the note in the job's admin comment is left out."""
    configure(root, arguments)
    play(root, jobs)
    start(root, job_id=8, nodes=nodes, SLURM_JOB_COMMENT="flashrec:spare-for=7")
    return [line for line in done(root) if "admincomment=" not in line]


def noted(root: Any) -> list[str]:
    return [line for line in done(root) if "admincomment=" in line]


def test_a_replacement_gives_time_to_the_job_and_all_its_companions(root: Any) -> None:
    jobs = [raw(7), companion(), raw(9, admin="flashrec:spare-for=7"), raw(10, admin="flashrec:spare-for=6")]
    assert limits(root, "extend=5", jobs) == [f"update|jobid={job}|timelimit=+5|" for job in (7, 8, 9)]


def test_waiting_is_given_back_up_to_the_limit(root: Any) -> None:
    assert limits(root, "delay=10", [raw(7), companion()])[0].endswith("timelimit=+3|"), "130 s are 3 min"
    (root.play / "done").unlink()
    assert limits(root, "delay=2 extend=1", [raw(7), companion()])[0].endswith("timelimit=+3|")


def test_no_time_is_given_away(root: Any) -> None:
    assert limits(root, "", [raw(7), companion()]) == []
    assert limits(root, "extend=x", [raw(7), companion()]) == []
    assert limits(root, "extend=5", [raw(7), raw(8, comment="flashrec:spare-for=7")]) == [], (
        "only the admin comment says so"
    )
    assert limits(root, "extend=5", [raw(7, uid=UID + 1), companion()]) == [], "another user's job"
    assert limits(root, "extend=5", [raw(7, ["RUNNING", "COMPLETING"]), companion()]) == []
    assert limits(root, "extend=5", [raw(7, "PENDING"), companion()]) == []
    assert limits(root, "extend=5", [companion()]) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "flashrec:extended=1"),
        ("of the site", "of the site flashrec:extended=1"),
        ("of the site flashrec:extended=1", "of the site flashrec:extended=2"),
        ("flashrec:extended=9 is not ours", "flashrec:extended=9 is not ours flashrec:extended=1"),
    ],
)
def test_how_often_a_job_was_given_time_is_noted_before_it_is_given(root: Any, before: str, after: str) -> None:
    assert limits(root, "extend=5", [raw(7, admin=before), companion()]) != []
    assert noted(root) == [f"update|jobid=7|admincomment={after}|"] == done(root)[:1]


@pytest.mark.parametrize(
    ("arguments", "times"), [("extend=5", 2), ("extend=5 max_per_job=3", 3), ("extend=5 max_per_job=x", 0)]
)
def test_taking_nodes_and_giving_them_back_buys_no_endless_time(root: Any, arguments: str, times: int) -> None:
    assert limits(root, arguments, [raw(7, admin=f"flashrec:extended={times}"), companion()]) == []
    assert noted(root) == []


def test_time_that_cannot_be_noted_is_not_given(root: Any) -> None:
    (root.play / "bin" / "scontrol").write_text(
        '#!/bin/sh\ncase "$3" in admin*) exit 1;; esac; echo "$3" >> "$PLAY/done"'
    )
    assert limits(root, "extend=5", [raw(7), companion()]) == []


def test_a_large_job_with_such_a_comment_asks_nothing(root: Any) -> None:
    """A user may write any comment; a companion job has one node."""
    assert limits(root, "extend=5", [raw(7), companion()], nodes="n1,n2") == []
    assert not (root.play / "asked").exists()


# ---- whatever happens, the hook ends well and in time


@pytest.mark.parametrize("hook", ["flashrec-prolog", "flashrec-epilog"])
@pytest.mark.parametrize("broken", [{"SLURM_JOB_ID": "x"}, {"SLURM_JOB_UID": ""}, {"SLURMD_NODENAME": "../.."}, {}])
def test_the_hooks_always_end_well(root: Any, hook: str, broken: dict[str, str]) -> None:
    env = {**os.environ, **environ(root), "SLURM_CLUSTER_NAME": "../nowhere", **broken}
    assert subprocess.run([HOOKS / hook], env=env, timeout=40, check=False).returncode == 0


def test_they_end_well_without_an_environment() -> None:
    for hook in ("flashrec-prolog", "flashrec-epilog"):
        assert subprocess.run([HOOKS / hook], env={}, timeout=40, check=False).returncode == 0


def test_commands_that_hang_are_given_up(root: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root, "CALL_TIMEOUT_S", 0.3)
    for name in ("squeue", "scontrol", "sinfo"):
        (root.play / "bin" / name).write_text(f'#!/bin/sh\necho $$ >> "$PLAY/{name}.pid"\nsleep 1000\n')
    configure(root, "drain=user extend=5")
    report = start(root, SLURM_JOB_COMMENT="flashrec:spare-for=7", SLURM_JOB_NUM_NODES="1")
    (report / "faulty").write_text("n2 x\n")
    began = time.monotonic()
    end(root)
    assert time.monotonic() - began < 30
    assert sum("did not answer" in line for line in root.said) == 3
    pids = [int(pid) for path in root.play.glob("*.pid") for pid in path.read_text().split()]
    assert pids and not any(is_running(pid) for pid in pids)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_the_hook_as_a_whole_is_bounded(root: Any) -> None:
    """The wrapper's own limit is a last resort; here every call hangs, each up to its own limit."""
    for name in ("squeue", "scontrol", "sinfo"):
        (root.play / "bin" / name).write_text("#!/bin/sh\nexec sleep 1000\n")
    began = time.monotonic()
    env = {**os.environ, **environ(root), "SLURM_CLUSTER_NAME": "../nowhere"}
    assert subprocess.run([HOOKS / "flashrec-epilog"], env=env, timeout=60, check=False).returncode == 0
    assert time.monotonic() - began < 40
