"""The parsers on what real releases printed (fixtures/, made by fixtures/record.py), and on what none should print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flashrec.slurm import plaintext, records
from flashrec.slurm.scheduler import SlurmError, SlurmUnavailable

FIXTURES = Path(__file__).parent / "fixtures"
RELEASES = sorted(path.name for path in FIXTURES.iterdir() if path.name[0].isdigit())


def recorded(release: str, name: str) -> str:
    return (FIXTURES / release / name).read_text()


def raw_job(release: str = "24.11") -> dict[str, Any]:
    return json.loads(recorded(release, "squeue.json"))["jobs"][0]


def test_the_three_releases_are_recorded() -> None:
    assert RELEASES == ["22.05", "24.11", "26.05"]


@pytest.mark.parametrize("release", RELEASES)
def test_jobs(release: str) -> None:
    forged, array = map(records.job_info, records.entries(recorded(release, "squeue.json"), "jobs", "squeue"))
    assert (forged.job_id, forged.state, forged.nodes, forged.batch_host) == (1, "RUNNING", ("n0", "n1"), "n0")
    assert (forged.user_id, forged.user_name, forged.partition) == (0, "root", "main")
    assert "\nJobId=666" in forged.name and forged.name == forged.comment
    assert (forged.time_limit_s, forged.num_nodes, forged.array_job_id) == (600.0, 2, None)
    assert forged.start_time and forged.end_time == pytest.approx(forged.start_time + 600, abs=2)
    assert (array.state, array.nodes, array.batch_host) == ("PENDING", (), "")
    assert (array.array_job_id, array.array_task_id, array.time_limit_s) == (2, None, None)
    assert array.features == "rack1&flashspare"


@pytest.mark.parametrize("release", RELEASES)
def test_nodes(release: str) -> None:
    name = "show-nodes.json" if (FIXTURES / release / "show-nodes.json").exists() else "sinfo.json"
    nodes = {
        node.name: node for node in map(records.node_info, records.entries(recorded(release, name), "nodes", name))
    }
    assert {name: node.states for name, node in nodes.items()} == {
        "n0": {"ALLOCATED"}, "n1": {"ALLOCATED"}, "n2": {"DOWN"}, "n3": {"IDLE", "DRAIN"}, "n4": {"IDLE"},
    }  # fmt: skip
    assert [nodes[name].is_usable for name in sorted(nodes)] == [True, True, False, False, True]
    assert nodes["n0"].is_busy and not nodes["n4"].is_busy
    assert set(nodes["n4"].features) == {"flashspare", "rack1"}
    assert nodes["n3"].reason == "JobId=666 State=IDLE"
    assert nodes["n3"].version.startswith(release)


@pytest.mark.parametrize("release", RELEASES)
def test_reservations_steps_and_config(release: str) -> None:
    (found,) = plaintext.reservations_of(recorded(release, "show-reservation.txt"))
    assert (found.name, found.nodes, found.users, found.accounts) == ("spares", ("n4",), ("root",), ())
    assert found.flags == {"MAINT", "IGNORE_JOBS", "SPEC_NODES"}
    assert found.is_active and found.partition == ""
    steps = {step.step_id: step.nodes for step in plaintext.steps_of(recorded(release, "squeue-steps.txt"), 1)}
    assert steps == {"batch": ("n0",), "0": ("n0", "n1")}
    assert plaintext.config_of(recorded(release, "show-config.txt"))["SlurmdTimeout"] == "3600 sec"


@pytest.mark.parametrize(
    ("value", "number"),
    [(7, 7.0), (7.5, 7.5), (None, None), (0, 0.0), ({"set": True, "infinite": False, "number": 7}, 7.0),
     ({"set": False, "infinite": False, "number": 0}, None), ({"set": True, "infinite": True, "number": 0}, None)],
)  # fmt: skip
def test_numbers(value: object, number: float | None) -> None:
    assert records.num(value) == number


@pytest.mark.parametrize("value", ["7", True, [7], {"set": True, "number": "x"}])
def test_what_is_no_number(value: object) -> None:
    with pytest.raises(ValueError, match="not a number"):
        records.num(value)


def test_state_words() -> None:
    assert records.states("idle", ["DRAIN"]) == records.states(["IDLE", "DRAIN"]) == records.states("idle+drain")
    for nothing in ("", [], None):
        with pytest.raises(ValueError, match="no state"):
            records.states(nothing)
    assert records.one_word(frozenset({"RUNNING", "COMPLETING"})) == "COMPLETING"
    assert records.one_word(frozenset({"PENDING"})) == "PENDING"
    with pytest.raises(ValueError, match="not a list"):
        records.lst([1])


@pytest.mark.parametrize("text", ["", "no", "[]", "{}", '{"jobs": 1}', '{"jobs": [1]}', '{"nodes": []}'])
def test_what_is_no_list_of_jobs(text: str) -> None:
    with pytest.raises(SlurmError) as caught:
        records.entries(text, "jobs", "squeue")
    assert not isinstance(caught.value, SlurmUnavailable)


def test_22_05_without_a_controller_is_no_empty_list() -> None:
    """It ends with 0, and only this says so."""
    with pytest.raises(SlurmUnavailable, match="Failed while looking"):
        records.entries('{"errors": [{"description": "Failed while looking for jobs"}], "jobs": []}', "jobs", "squeue")


def test_control_characters_of_one_job_do_not_hide_the_others() -> None:
    assert records.entries('{"jobs": [{"name": "a\x01b"}]}', "jobs", "squeue") == [{"name": "a\x01b"}]


@pytest.mark.parametrize("field", ["job_state", "nodes", "user_id", "admin_comment", "time_limit"])
def test_a_field_that_is_missing_is_an_error(field: str) -> None:
    raw = raw_job()
    del raw[field]
    with pytest.raises(SlurmError, match=f"job 1 has no field '{field}'"):
        records.job_info(raw)


@pytest.mark.parametrize(("field", "value"), [("job_state", []), ("nodes", "n[1-"), ("user_id", None), ("name", 3)])
def test_a_field_that_cannot_be_read_is_an_error(field: str, value: object) -> None:
    with pytest.raises(SlurmError, match="job 1 cannot be read"):
        records.job_info({**raw_job(), field: value})


def test_reservations_are_read_strictly() -> None:
    assert plaintext.reservations_of("No reservations in the system\n") == ()
    line = recorded("24.11", "show-reservation.txt").strip()
    said = plaintext.reservations_of(f"{line} Comment=free text State=INACTIVE Users=eve\n")
    assert said[0].is_active and said[0].users == ("root",)
    for wrong in (
        "garbage",
        line.replace("State=ACTIVE ", ""),
        f"{line} stray",
        line.replace("NodeCnt=1", "NodeCnt=x"),
    ):
        with pytest.raises(SlurmError, match="scontrol show reservation"):
            plaintext.reservations_of(wrong)


def test_steps_are_read_strictly() -> None:
    assert plaintext.steps_of("2|1_1.0|RUNNING|n[1-2]|\n1|1_2.0|RUNNING|n3|\n", 2)[0].nodes == ("n1", "n2")
    for wrong in ("garbage", "1|1.0|RUNNING|n0", "1|1.0|RUNNING|n0|x|"):
        with pytest.raises(SlurmError, match="printed no step"):
            plaintext.steps_of(wrong, 1)
