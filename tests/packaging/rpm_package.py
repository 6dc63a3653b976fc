"""`make -C slurm_plugin rpm`. Not part of `make test`, because RPM's tools are no small thing to install on Debian:
`make test-packages` runs it, and says what to install."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.packaging.support import VERSION, files_below, installed, output, release
from tests.support.plugin import make


@pytest.fixture(scope="module")
def rpm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert shutil.which("rpmbuild"), "rpmbuild is missing; on Debian: apt-get install rpm"
    folder = tmp_path_factory.mktemp("rpm")
    os.environ.setdefault("RPMBUILD_OPTIONS", "--nodeps")  # this machine's packages are not RPM's
    make("rpm", f"PACKAGES={folder}")
    (found,) = folder.glob("*.rpm")
    return found


def query(rpm: Path, *options: str) -> list[str]:
    return output("rpm", "--query", "--package", *options, rpm).splitlines()


def test_version_and_release(rpm: Path) -> None:
    assert query(rpm, "--queryformat=%{NAME} %{VERSION}") == [f"slurm-flashrecovery {VERSION}"]
    assert f".slurm{release()}" in query(rpm, "--queryformat=%{RELEASE}")[0]


def test_it_requires_exactly_the_release_it_was_built_for(rpm: Path) -> None:
    major, minor = release().split(".")
    assert {f"slurm >= {release()}", f"slurm < {major}.{int(minor) + 1:02d}"} <= set(query(rpm, "--requires"))


def test_it_contains_what_make_install_installs(rpm: Path, tmp_path: Path) -> None:
    wanted = installed(tmp_path, "PLUGINDIR=/usr/lib64/slurm")
    root = tmp_path / "unpacked"
    root.mkdir()
    output("rpm2archive", rpm)
    output("tar", "-xzf", f"{rpm}.tgz", "-C", root)
    found = {path: file for path, file in files_below(root).items() if not path.endswith("/README.md")}
    assert found.keys() == wanted.keys()
    for path, (mode, content) in wanted.items():
        assert found[path][0] == mode, path
        if not path.endswith(".so"):
            assert found[path][1] == content, path


def test_configuration_of_the_administrator_is_kept(rpm: Path) -> None:
    kept = query(rpm, "--configfiles")
    assert kept == [path for path in query(rpm, "--list") if path.startswith("/etc/")]
    assert "/etc/slurm/plugstack.conf.d/flashrecovery.conf" in kept


def test_nothing_runs_when_it_is_installed(rpm: Path) -> None:
    assert query(rpm, "--scripts") == []
