"""Files by which somebody could make root do something."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashrec.admin.doctor.finding import Finding, Status
from flashrec.admin.doctor.root_files import check_root_files
from tests.doctor.builders import by_name

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="files of root can only be made by root")

ROOT = Path(__file__).parents[2]
WITH_HEALTH = {"HealthCheckProgram": "/usr/sbin/flashrec-node-health"}


@pytest.fixture
def folder() -> Iterator[Path]:
    """Below folders that only root can write to, unlike pytest's."""
    made = Path("/run") / f"flashrec-doctor-{os.getpid()}"
    made.mkdir(mode=0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def check_file(folder: Path) -> Path:
    path = folder / "node-health.conf"
    path.write_text((ROOT / "slurm_plugin/health/node-health.conf").read_text())
    path.chmod(0o644)
    return path


def look(check_file: Path, spool: Path = Path("/no/such"), config: dict[str, str] = WITH_HEALTH) -> dict[str, Finding]:
    return by_name(check_root_files(config, check_file, spool))


def test_check_file_as_shipped_is_fine(check_file: Path) -> None:
    assert look(check_file)["health.check-file"].status is Status.OK


def test_check_file_with_a_mistake(check_file: Path) -> None:
    check_file.write_text("* || no-such-thing || x\nfail_runs = soon\n")
    found = look(check_file)["health.check-file"]
    assert found.status is Status.FAIL and str(check_file) in found.what


def test_check_file_that_others_can_write_to(check_file: Path) -> None:
    check_file.chmod(0o666)
    found = look(check_file)["health.check-file"]
    assert found.status is Status.FAIL and found.do == "chmod go-w it"
    check_file.chmod(0o644)
    os.chown(check_file, 65534, 65534)
    assert "chown root" in look(check_file)["health.check-file"].do


def test_check_file_that_may_not_be_read_is_unknown(check_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert look(check_file)["health.check-file"].status is Status.UNKNOWN


def test_what_is_not_in_use_is_not_looked_at(check_file: Path) -> None:
    assert look(check_file, config={"HealthCheckProgram": "/usr/sbin/nhc"}) == {}
    assert look(Path("/no/such")) == {}


def test_record_of_the_hooks_that_others_can_write_to(folder: Path) -> None:
    spool = folder / "spool"
    spool.mkdir(mode=0o755)
    assert look(Path("/no/such"), spool)["hooks.spool"].status is Status.OK
    spool.chmod(0o777)
    found = look(Path("/no/such"), spool)["hooks.spool"]
    assert found.status is Status.FAIL and "make root drain nodes" in found.what
