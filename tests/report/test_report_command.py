"""What people and programs see of a journal: text, JSON, HTML, and the status of a running job."""

import json
import os
import re
import time
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from flashrec.cli.report import report
from flashrec.cli.status import status
from flashrec.report.text import bar, size
from flashrec.report.timeline import Span

from .journals import Writer, fault


@pytest.fixture
def job_dir(tmp_path):
    writer = Writer().start().node_dies(10.0)
    writer.line(20.0, "note", what="job over", exit_code=0)
    (tmp_path / "journal.jsonl").write_bytes(writer.content)
    (tmp_path / "faults.jsonl").write_bytes(fault(8.0))
    return tmp_path


def run(command, *arguments):
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_text_names_phases_times_and_reasons(job_dir):
    done = run(report, job_dir)
    assert done.exit_code == 0
    for text in ("4.800 s from fault", "detect", "2.000 s", "node n1 silent for 2.0 s", "rank 0 on n3", "5.0 MB", "█"):
        assert text in done.output
    assert "unknown" not in done.output


def test_unknown_is_shown_as_unknown(job_dir):
    (job_dir / "faults.jsonl").unlink()
    line = next(line for line in run(report, job_dir).output.splitlines() if line.strip().startswith("detect "))
    assert "unknown" in line and "0.000" not in line


def test_json_has_the_same_figures(job_dir):
    data = json.loads(run(report, job_dir, "--json").output)
    (recovery,) = data["recoveries"]
    assert recovery["rto_s"] == pytest.approx(4.8)
    assert recovery["durations"]["fence"] == pytest.approx(0.2)
    (job_dir / "faults.jsonl").unlink()
    (recovery,) = json.loads(run(report, job_dir, "--json").output)["recoveries"]
    assert recovery["durations"]["detect"] is None


def test_faults_can_lie_elsewhere(job_dir):
    (job_dir / "faults.jsonl").rename(job_dir / "other.jsonl")
    data = json.loads(run(report, job_dir, "--json", "--faults", job_dir / "other.jsonl").output)
    assert data["recoveries"][0]["rto_from"] == "fault"


def test_html_is_self_contained_and_well_formed(job_dir):
    page = job_dir / "page.html"
    assert run(report, job_dir, "--html", page).exit_code == 0
    content = page.read_text()
    (svg,) = re.findall(r"<svg.*</svg>", content, re.DOTALL)
    assert len(ElementTree.fromstring(svg).findall("rect")) == 6
    assert not re.search(r"(src|href)\s*=|https?://", content)


def test_reasons_cannot_inject_markup(tmp_path):
    writer = Writer().start()
    writer.move(10.0, "RUNNING", "FENCING", "<script>alert(1)</script> [bold]x[/nonsense]")
    (tmp_path / "journal.jsonl").write_bytes(writer.content)
    page = tmp_path / "page.html"
    assert run(report, tmp_path, "--html", page).exit_code == 0
    assert "<script" not in page.read_text()
    assert "[bold]x[/nonsense]" in run(report, tmp_path).output


def test_torn_and_unreadable_lines_are_mentioned(job_dir):
    path = job_dir / "journal.jsonl"
    path.write_bytes(b"rubbish\n" + path.read_bytes() + b'{"seq')
    output = run(report, job_dir).output
    assert "cannot be read: 1" in output and "last line of the journal is cut" in output


def test_directory_without_journal_is_explained(tmp_path):
    done = run(report, tmp_path)
    assert done.exit_code == 1
    assert "no journal.jsonl" in done.output and "flashrec-JOBID" in done.output


def test_bar_shows_even_the_shortest_span():
    assert bar([Span("fence", 0.0, 0.001)], total=10.0, width=10) == "█         "
    assert bar([Span("fence", 5.0, 10.0)], total=10.0, width=10) == "     █████"
    assert bar([Span("fence", 10.0, 10.0)], total=10.0, width=10) == "         █"
    assert bar([], total=0.0, width=3) == "   "


def test_sizes_are_for_people():
    assert [size(value) for value in (None, 0, 999, 2_800_000, 5 * 10**12)] == [
        "unknown",
        "0 B",
        "999 B",
        "2.8 MB",
        "5.0 TB",
    ]


STATUS = {
    "job_id": 4711,
    "phase": "RUNNING",
    "generation": 2,
    "step": 12,
    "exit_code": None,
    "stop_reason": "",
    "nodes": [
        {"node": "n1", "state": "dead", "ranks": [], "lost_because": "silent for 2.0 s"},
        {"node": "n3", "state": "alive", "ranks": [0, 1], "lost_because": ""},
    ],
    "something_new": [{"colour": "green"}],
}


@pytest.fixture
def running(job_dir):
    (job_dir / "status.json").write_text(json.dumps(STATUS))
    return job_dir


def test_status_shows_phase_step_nodes_and_what_happened_last(running):
    done = run(status, running)
    assert done.exit_code == 0
    for text in (
        "job 4711",
        "RUNNING",
        "generation 2",
        "step 12",
        "silent for 2.0 s",
        "0 1",
        "green",
        "RESTORING -> RUNNING",
    ):
        assert text in done.output


def test_status_says_when_it_is_old(running):
    long_ago = time.time() - 60
    os.utime(running / "status.json", (long_ago, long_ago))
    done = run(status, running)
    assert done.exit_code == 3
    assert "the manager is gone" in done.output


def test_status_of_a_job_that_is_over(running):
    over = STATUS | {"phase": "STOPPED", "exit_code": 75, "stop_reason": "no spare left"}
    (running / "status.json").write_text(json.dumps(over))
    done = run(status, running)
    assert done.exit_code == 3
    assert "exit code 75: no spare left" in done.output


def test_status_finds_the_newest_job_here(running, tmp_path_factory, monkeypatch):
    here = tmp_path_factory.mktemp("here")
    for age, name in enumerate(("flashrec-2", "flashrec-1")):
        (here / name).mkdir()
        path = here / name / "status.json"
        path.write_text(json.dumps(STATUS | {"job_id": name}))
        os.utime(path, (time.time() - age, time.time() - age))
    monkeypatch.chdir(here)
    assert "job flashrec-2" in run(status).output
    monkeypatch.chdir(running)
    done = run(status)
    assert (done.exit_code, "name the job directory" in done.output) == (1, True)


def test_status_json_is_the_managers_own(running):
    assert json.loads(run(status, running, "--json").output) == STATUS


def test_missing_or_bad_status_is_explained(job_dir):
    assert "no status.json" in run(status, job_dir).output
    (job_dir / "status.json").write_text("{")
    assert "cannot read" in run(status, job_dir).output


def test_what_mirrors_cost_is_shown_everywhere(job_dir, tmp_path):
    assert "Mirrors" not in run(report, job_dir).output
    writer = Writer().start()
    cost = {"own_bytes": 4000, "held_bytes": 2000, "wait_ms": 0.25, "steps": 20}
    writer.line(10.0, "note", what="mirrors", rank=3, generation=1, **cost)
    (job_dir / "journal.jsonl").write_bytes(writer.content)
    line = "on 1 ranks, up to 6.0 kB of host memory (rank 3: 4.0 kB of its own, 2.0 kB held for others)"
    assert f"Mirrors {line}" in run(report, job_dir).output
    assert json.loads(run(report, job_dir, "--json").output)["mirrors"][0]["wait_ms"] == 0.25
    assert run(report, job_dir, "--html", tmp_path / "page.html").exit_code == 0
    assert line in (tmp_path / "page.html").read_text()
