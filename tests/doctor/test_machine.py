"""The machine part, on this machine, with one thing spoilt at a time."""

from __future__ import annotations

import asyncio
import resource
import socket
from pathlib import Path

import pytest

from flashrec.admin.doctor import machine
from flashrec.admin.doctor.finding import Finding, Status
from flashrec.slurm.command import Commands
from tests.doctor.fakes import FakeCommands

MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
tmpfs /run tmpfs rw 0 0
nas:/home /home nfs4 rw 0 0
nas:/data /data\\040of\\040ours lustre rw 0 0
/dev/sdb1 /home/scratch xfs rw 0 0
"""


def munge(**programs: str) -> Finding:
    with FakeCommands(programs):
        return asyncio.run(machine.munge(Commands(timeout_s=1.0), ""))


def test_munge_that_works() -> None:
    assert munge(munge="echo MUNGE:x:", unmunge="exit 0").status is Status.OK


def test_munge_without_a_daemon() -> None:
    found = munge(munge="echo 'munge: Error: Did you start munged?' >&2; exit 6", unmunge="exit 0")
    assert found.status is Status.FAIL and "Did you start munged?" in found.what


def test_credential_that_is_refused() -> None:
    found = munge(munge="echo MUNGE:x:", unmunge="echo 'unmunge: Error: Expired credential' >&2; exit 15")
    assert found.status is Status.FAIL and "Expired" in found.what


def test_munge_that_is_not_installed_or_hangs_is_unknown() -> None:
    assert munge().status is Status.UNKNOWN
    assert munge(munge="sleep 60", unmunge="exit 0").status is Status.UNKNOWN


def test_socket_of_munge_is_taken_from_slurm_conf(tmp_path: Path) -> None:
    said = tmp_path / "said"
    with FakeCommands({"munge": f'echo "$@" >> {said}', "unmunge": f'echo "$@" >> {said}'}):
        asyncio.run(machine.munge(Commands(), "ttl=60,socket=/run/other,x=1"))
    assert said.read_text().count("--socket=/run/other") == 2


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert machine.open_files(4).status is Status.OK
    found = machine.open_files(1000)
    assert found.status is Status.WARN and "ulimit -n 4256" in found.do


def test_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: str(tmp_path))
    short = Path("/tmp")
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: str(short))
    assert machine.temporary_folder().status is Status.OK
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: "/tmp/" + "x" * 60)
    assert "no unix socket fits" in machine.temporary_folder().what
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: "/proc/no/such")
    assert machine.temporary_folder().status is Status.FAIL


def test_socket_folder_of_somebody_else(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    short = Path("/tmp") / f"fd{id(request):x}"
    short.mkdir()
    request.addfinalizer(short.rmdir)
    mine = short / f"flashrec-{machine.os.geteuid()}"
    mine.mkdir(mode=0o755)
    request.addfinalizer(mine.rmdir)
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: str(short))
    assert "0700" in machine.temporary_folder().what
    mine.chmod(0o700)
    assert machine.temporary_folder().status is Status.OK


@pytest.mark.parametrize(
    ("variable", "value", "status"),
    [
        ("GLOO_SOCKET_IFNAME", "lo", Status.OK),
        ("GLOO_SOCKET_IFNAME", "nosuch0", Status.FAIL),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", Status.OK),
        ("NCCL_SOCKET_IFNAME", "l", Status.OK),  # NCCL takes beginnings of names
        ("NCCL_SOCKET_IFNAME", "=l", Status.FAIL),
        ("NCCL_SOCKET_IFNAME", "nosuch", Status.FAIL),
    ],
)
def test_interfaces_that_the_environment_names(
    variable: str, value: str, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    assert machine.interface({variable: value}).status is status


def test_machine_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo")])
    assert machine.interface({}).status is Status.FAIL


def test_control_port() -> None:
    assert machine.control_port(0).status is Status.OK
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert machine.control_port(port).status is Status.WARN
    assert machine.control_port(port).status is Status.OK


@pytest.mark.parametrize(
    ("folder", "status", "where"),
    [
        ("/home/me", Status.OK, "nfs4 (/home)"),
        ("/home", Status.OK, "nfs4 (/home)"),
        ("/data of ours/x", Status.OK, "lustre"),
        ("/home/scratch/me", Status.UNKNOWN, "xfs (/home/scratch)"),
        ("/homework", Status.UNKNOWN, "ext4 (/)"),
    ],
)
def test_job_directory_on_a_shared_file_system(folder: str, status: Status, where: str) -> None:
    found = machine.file_system(Path(folder), MOUNTS)
    assert found.status is status and where in found.what


def test_folder_on_no_mount_is_unknown() -> None:
    assert machine.file_system(Path("/x"), "").status is Status.UNKNOWN
