"""`make -C slurm_plugin deb`: really built, looked into, unpacked, installed into a root of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from flashrec.admin.doctor.elf import read_plugin
from tests.packaging.support import ROOT, VERSION, files_below, installed, output, release
from tests.support.plugin import make


@pytest.fixture(scope="module")
def deb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deb")
    make("deb", f"PACKAGES={folder}")
    (found,) = folder.glob("*.deb")
    return found


@pytest.fixture(scope="module")
def unpacked(deb: Path) -> Path:
    root = deb.parent / "unpacked"
    output("dpkg-deb", "-R", deb, root)
    return root


def field(deb: Path, name: str) -> str:
    return output("dpkg-deb", "-f", deb, name).strip()


def test_version_is_that_of_the_project_and_of_slurm(deb: Path) -> None:
    assert field(deb, "Package") == "slurm-flashrecovery"
    assert field(deb, "Version") == f"{VERSION}-1+slurm{release()}"
    assert field(deb, "Architecture") == output("dpkg", "--print-architecture").strip()


def test_it_depends_on_exactly_the_release_it_was_built_for(deb: Path) -> None:
    depends = field(deb, "Depends")
    major, minor = release().split(".")
    after = f"{major}.{int(minor) + 1:02d}~"
    for bound in (f"slurm-wlm-basic-plugins (>= {release()})", f"slurm-wlm-basic-plugins (<< {after})"):
        assert bound in depends
    assert "libc6" in depends, "what the plugin is linked with"
    for mine, fits in [
        (f"{release()}.8-4", True),
        (f"{major}.{int(minor) + 6:02d}.1", False),
        (f"{int(major) - 1}.05", False),
    ]:
        within = [
            subprocess.run(["dpkg", "--compare-versions", mine, *bound], check=False).returncode == 0
            for bound in (("ge", release()), ("lt", after))
        ]
        assert all(within) is fits, mine


def test_it_contains_what_make_install_installs_and_its_documentation(unpacked: Path, tmp_path: Path) -> None:
    wanted = installed(tmp_path, "SYSTEMDDIR=/lib/systemd/system")
    found = {path: file for path, file in files_below(unpacked).items() if not path.startswith("/DEBIAN/")}
    ours = {path for path in found.keys() - wanted.keys() if path.startswith("/usr/share/doc/slurm-flashrecovery/")}
    assert {path.rpartition("/")[2] for path in ours} == {"README.md", "changelog.Debian.gz", "copyright"}
    assert found.keys() - ours == wanted.keys()
    for path, (mode, content) in wanted.items():
        assert found[path][0] == mode, path
        if not path.endswith(".so"):  # which is stripped in the package
            assert found[path][1] == content, path


def test_plugin_in_it_is_for_this_slurm(unpacked: Path) -> None:
    (plugin,) = unpacked.rglob("flashrecovery.so")
    assert "{}.{:02d}".format(*read_plugin(plugin).built_for[:2]) == release()
    assert plugin.parent == unpacked / plugin.parent.relative_to(unpacked)
    assert ".symtab" not in output("readelf", "-SW", plugin)


def test_configuration_of_the_administrator_is_kept_by_dpkg(unpacked: Path) -> None:
    kept = set((unpacked / "DEBIAN/conffiles").read_text().split())
    assert kept == {path for path in files_below(unpacked) if path.startswith("/etc/")}
    assert "/etc/slurm/plugstack.conf.d/flashrecovery.conf" in kept


def test_nothing_runs_when_it_is_installed(unpacked: Path) -> None:
    assert {path.name for path in (unpacked / "DEBIAN").iterdir()} == {"control", "conffiles", "md5sums"}


def test_it_installs_and_goes_without_a_trace(deb: Path, tmp_path: Path) -> None:
    """Into a root of its own, in which dpkg knows of no Slurm: hence the one forced dependency."""
    root = tmp_path / "root"
    (root / "var/lib/dpkg").mkdir(parents=True)
    (root / "var/lib/dpkg/status").touch()
    dpkg = (
        "dpkg",
        f"--root={root}",
        "--force-depends",
        "--force-script-chrootless",
        "--force-not-root",
        "--log=/dev/null",
    )
    output(*dpkg, "--install", deb)
    assert "install ok installed" in output(
        "dpkg-query", f"--admindir={root}/var/lib/dpkg", "-s", "slurm-flashrecovery"
    )
    assert list(root.rglob("flashrecovery.so"))
    output(*dpkg, "--purge", "slurm-flashrecovery")
    assert [path for path in root.rglob("*") if path.is_file() and "dpkg" not in path.parts] == []


def test_sources_are_left_as_they_were() -> None:
    assert not (ROOT / "slurm_plugin/debian").exists()


def test_descriptions_of_the_packages_name_the_version_of_the_project() -> None:
    changelog = (ROOT / "slurm_plugin/packaging/deb/changelog").read_text()
    assert re.match(r"slurm-flashrecovery \((.*)-1\)", changelog)[1] == VERSION  # type: ignore[index]
    spec = (ROOT / "slurm_plugin/packaging/rpm/slurm-flashrecovery.spec").read_text()
    assert re.search(r"^Version: (.*)$", spec, re.MULTILINE)[1] == VERSION  # type: ignore[index]


def test_a_build_that_fails_says_why(tmp_path: Path) -> None:
    headers = tmp_path / "include"
    shutil.copytree("/usr/include/slurm", headers / "slurm")
    (headers / "slurm/spank.h").write_text("#error no spank here\n")
    with pytest.raises(AssertionError, match="no spank here"):
        make("deb", f"PACKAGES={tmp_path}", f"SLURM_INCLUDE={headers}")
