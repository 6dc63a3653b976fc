"""What must not be believed: records and pid files of an earlier life."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flashrec.devcluster import daemon, process
from flashrec.devcluster.errors import DevClusterError
from flashrec.devcluster.spec import Layout
from flashrec.devcluster.station import Station


@pytest.fixture
def station(tmp_path: Path) -> Station:
    station = Station("n0", Layout(tmp_path, "x"))
    station.layout.init_record("n0").parent.mkdir(parents=True)
    return station


def record_of_the_dead() -> process.InitRecord:
    """The namespace's number was given to another since: to the one this test runs in."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    return process.InitRecord(pid=ended.pid, start_time=1, pid_namespace=process.own_pid_namespace())


def test_a_dead_station_has_no_processes_even_if_its_number_was_given_away(station: Station) -> None:
    station.write_record(record_of_the_dead())
    assert station.processes() == {}
    assert not station.is_alive
    with pytest.raises(DevClusterError, match="heal-node n0"):
        station.living_init()


def test_a_station_that_never_booted_has_no_power(station: Station) -> None:
    assert station.init is None and not station.is_alive and station.processes() == {}
    station.kill()


def test_a_pid_file_of_an_earlier_life_is_gone_before_the_daemon_starts(
    station: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurmd = daemon.slurmd(station, station.layout)
    slurmd.pid_file.parent.mkdir(parents=True)
    slurmd.pid_file.write_text("7\n")
    seen: list[bool] = []
    monkeypatch.setattr(station, "start_daemon", lambda argv: seen.append(slurmd.pid_file.exists()))
    monkeypatch.setattr(station, "has_program", lambda program: False)
    with pytest.raises(DevClusterError, match="slurmd on n0: ended while starting"):
        slurmd.start()
    assert seen == [False]
