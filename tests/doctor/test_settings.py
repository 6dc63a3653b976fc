"""Each rule about slurm.conf: a healthy value passes, a harmful one is named with what to do."""

from pathlib import Path

import pytest

from flashrec.admin.doctor.facts import parse_version
from flashrec.admin.doctor.finding import Status
from flashrec.admin.doctor.plugin_checks import plugstack_path
from flashrec.admin.doctor.settings import Settings, check_settings
from flashrec.slurm.plaintext import config_of
from tests.doctor.builders import HEALTHY, by_name, not_ok

NEW = (24, 11, 5)
FIXTURES = Path(__file__).parents[1] / "slurm/fixtures"


def test_healthy_cluster_is_fine() -> None:
    assert not_ok(check_settings(HEALTHY, NEW)) == []


@pytest.mark.parametrize(
    ("key", "value", "check", "status", "says"),
    [
        ("BatchStartTimeout", "10 sec", "slurm.BatchStartTimeout", Status.WARN, "BatchStartTimeout=65000"),
        ("SlurmdTimeout", "0 sec", "slurm.SlurmdTimeout", Status.WARN, "SlurmdTimeout=300"),
        ("SlurmdTimeout", "30 sec", "slurm.SlurmdTimeout", Status.WARN, "time a node needs to boot"),
        ("MessageTimeout", "61 sec", "slurm.MessageTimeout", Status.WARN, "at most 60"),
        ("UnkillableStepTimeout", "49 sec", "slurm.UnkillableStepTimeout", Status.WARN, "UnkillableStepTimeout=50"),
        ("ReturnToService", "0", "slurm.ReturnToService", Status.WARN, "ReturnToService=2"),
        ("SlurmctldParameters", "enable_stepmgr", "slurm.stepmgr", Status.FAIL, "take enable_stepmgr out"),
        ("SelectType", "select/linear", "slurm.SelectType", Status.WARN, "before you rely"),
        ("ProctrackType", "proctrack/linuxproc", "slurm.ProctrackType", Status.WARN, "proctrack/cgroup"),
        ("SchedulerParameters", "bf_interval=1,defer", "slurm.SchedulerParameters", Status.WARN, "take defer out"),
        ("SchedulerParameters", "defer_batch", "slurm.SchedulerParameters", Status.WARN, "take defer out"),
        ("PrivateData", "jobs,nodes", "slurm.PrivateData", Status.WARN, "nodes out of"),
        ("PrivateData", "reservations", "slurm.PrivateData", Status.WARN, "reservations out of"),
        ("HealthCheckProgram", "(null)", "health.program", Status.WARN, "flashrec-node-health"),
        ("HealthCheckInterval", "0 sec", "health.program", Status.WARN, "HealthCheckInterval=300"),
        ("HealthCheckInterval", "3600 sec", "health.program", Status.WARN, "HealthCheckInterval=300"),
        ("SrunPortRange", "60001-63000", "slurm.SrunPortRange", Status.WARN, "control.port"),
    ],
)
def test_harmful_value_is_named_with_the_remedy(key: str, value: str, check: str, status: Status, says: str) -> None:
    findings = check_settings(HEALTHY | {"UnkillableStepTimeout": "500 sec"} | {key: value}, NEW)
    assert not_ok(findings) == [check]
    found = by_name(findings)[check]
    assert found.status is status
    assert says in found.do


def test_extern_steps_die_with_contain_only_on_old_slurm() -> None:
    for version, status in [((22, 5, 8), Status.WARN), ((23, 2, 5), Status.WARN), ((23, 2, 6), Status.OK)]:
        assert by_name(check_settings(HEALTHY, version))["slurm.PrologFlags"].status is status
    assert (
        by_name(check_settings(HEALTHY | {"PrologFlags": "Alloc"}, (22, 5, 8)))["slurm.PrologFlags"].status is Status.OK
    )


@pytest.mark.parametrize("key", ["BatchStartTimeout", "SlurmctldParameters", "HealthCheckProgram"])
def test_setting_that_slurm_does_not_show_is_unknown_and_spoils_no_other(key: str) -> None:
    findings = check_settings({name: value for name, value in HEALTHY.items() if name != key}, NEW)
    assert [(found.check, found.status) for found in findings if found.status is not Status.OK] == [
        ("slurm.settings", Status.UNKNOWN)
    ]
    assert any(key in found.what for found in findings)


def test_unreadable_number_is_unknown() -> None:
    findings = check_settings(HEALTHY | {"SlurmdTimeout": "soon"}, NEW)
    assert not_ok(findings) == ["slurm.settings"]


def test_values_are_read_as_slurm_writes_them() -> None:
    settings = Settings({"a": "300 sec", "b": "5 min", "c": "(null)", "d": "Alloc, Contain", "e": "65534"})
    assert [settings.seconds(key) for key in "abce"] == [300, 300, 0, 65534]
    assert settings.words("d") == {"alloc", "contain"}
    assert settings.text("c") == ""


@pytest.mark.parametrize("release", ["22.05", "24.11", "26.05"])
def test_every_setting_is_found_in_what_each_release_prints(release: str) -> None:
    """Recorded from real controllers (tests/slurm/fixtures)."""
    text = (FIXTURES / release / "show-config.txt").read_text()
    shown = config_of(text)
    version = parse_version(shown["SLURM_VERSION"])
    assert version is not None
    findings = check_settings(shown, version)
    assert [found.what for found in findings if found.status is Status.UNKNOWN] == []
    assert text.startswith("Configuration data as of 2"), "where the controller's clock is read"
    assert plugstack_path(shown) is not None
