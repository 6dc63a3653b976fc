"""What `make` does to a stranger's machine: it finds a Python that will do, and installs what is missing, only that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = [
    "slurmctld",
    "slurmd",
    "srun",
    "munged",
    "ip",
    "tc",
    "nft",
    "nsenter",
    "setpriv",
    "shellcheck",
    "clang-format",
    "lua5.1",
    "gcc",
    "dpkg-buildpackage",
]
HEADERS = ["stdio.h", "slurm/spank.h"]
SYSTEM = ["sh", "bash", "dirname", "env", "id"]


class Machine:
    """A PATH of our own: only the programs that are put there, and a log of what apt-get was asked."""

    def __init__(self, path: Path) -> None:
        self.bin, self.log, self.include = path / "bin", path / "log", path / "include"
        self.bin.mkdir()
        self.log.touch()
        for name in SYSTEM:
            found = next(Path(folder) / name for folder in ("/bin", "/usr/bin") if (Path(folder) / name).exists())
            (self.bin / name).symlink_to(found)

    def add(self, name: str, script: str = "exit 0") -> Path:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    def add_header(self, name: str) -> None:
        path = self.include / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def run(self, script: str, **environment: str) -> subprocess.CompletedProcess:
        # Later entries of the scripts' own PATH would find this machine's programs: they are replaced by ours.
        text = (ROOT / ".ci" / script).read_text()
        text = text.replace("/usr/include", str(self.include))
        text = text.replace(':/usr/local/sbin:/usr/sbin:/sbin"', '"').replace("/usr/bin/python3", "no-such-python")
        copy = self.bin.parent / script
        copy.write_text(text)
        copy.chmod(0o755)
        env = {"PATH": str(self.bin)} | environment
        return subprocess.run([copy], env=env, check=False, capture_output=True, text=True, timeout=30)


@pytest.fixture
def machine(tmp_path):
    made = Machine(tmp_path)
    made.add("apt-get", f'echo "$@" >> {made.log}')
    finder = (ROOT / ".ci/find-python").read_text().replace("/usr/bin/python3", "no-such-python")
    (tmp_path / "find-python").write_text(finder)
    (tmp_path / "find-python").chmod(0o755)
    return made


def test_new_python_is_found(machine):
    python = machine.add("python3", f'exec {sys.executable} "$@"')
    assert machine.run("find-python").stdout.strip() == str(python)


def test_old_python_is_passed_over_for_a_newer_one_beside_it(machine):
    machine.add("python3", "exit 1")
    newer = machine.add("python3.12", f'exec {sys.executable} "$@"')
    assert machine.run("find-python").stdout.strip() == str(newer)


def test_wanted_python_comes_first(machine):
    machine.add("python3", f'exec {sys.executable} "$@"')
    mine = machine.add("mine", f'exec {sys.executable} "$@"')
    assert machine.run("find-python", PYTHON=str(mine)).stdout.strip() == str(mine)


def test_no_usable_python_names_the_remedy(machine):
    done = machine.run("find-python")
    assert done.returncode == 1
    assert "apt-get install python3.11 python3.11-venv" in done.stderr


def test_nothing_missing_asks_apt_for_nothing(machine):
    for name in PROGRAMS:
        machine.add(name)
    for name in HEADERS:
        machine.add_header(name)
    machine.add("python3", f'exec {sys.executable} "$@"')
    done = machine.run("install-system")
    assert (done.returncode, done.stdout, machine.log.read_text()) == (0, "", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="without root the script goes through sudo")
def test_only_what_is_missing_is_installed(machine):
    for name in PROGRAMS:
        if name not in ("slurmd", "ip"):
            machine.add(name)
    machine.add_header("stdio.h")
    machine.add("python3", f'exec {sys.executable} "$@"')
    assert machine.run("install-system").returncode == 0
    update, install = machine.log.read_text().splitlines()
    assert update.startswith("update")
    assert install == "install -y --no-install-recommends slurmd iproute2 libslurm-dev"


@pytest.mark.skipif(os.geteuid() != 0, reason="without root the script goes through sudo")
def test_machine_that_only_has_an_old_python_gets_the_newer_one_of_its_release(machine):
    for name in PROGRAMS:
        machine.add(name)
    for name in HEADERS:
        machine.add_header(name)
    done = machine.run("install-system")
    lines = machine.log.read_text().splitlines()
    assert lines[-1] == "install -y --no-install-recommends python3.11 python3.11-venv"
    assert done.returncode == 1, "apt-get of this test installs nothing, so there still is no Python"


def test_neither_root_nor_sudo_names_what_is_missing(machine):
    (machine.bin / "id").unlink()
    machine.add("id", "echo 1000")
    done = machine.run("install-system")
    assert done.returncode == 1
    assert "slurmctld" in done.stderr and "Neither root nor sudo" in done.stderr
    assert machine.log.read_text() == ""


def test_other_distributions_are_told_what_to_install(machine):
    (machine.bin / "apt-get").unlink()
    machine.add("sudo")
    done = machine.run("install-system")
    assert done.returncode == 1
    assert "There is no apt-get here" in done.stderr and "munge" in done.stderr


def test_make_alone_explains_itself():
    done = subprocess.run(["make", "-C", ROOT], check=True, capture_output=True, text=True)
    for target in ("demo", "test", "test-fast", "lint", "venv", "clean", "NODE="):
        assert target in done.stdout
