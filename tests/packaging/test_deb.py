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


def test_nothing_is_started_when_it_is_installed(unpacked: Path) -> None:
    """The two scripts only put a configuration file aside and back."""
    assert {path.name for path in (unpacked / "DEBIAN").iterdir()} == {
        "control", "conffiles", "md5sums", "preinst", "postrm",
    }  # fmt: skip


class Root:
    """A root of its own, in which dpkg knows of no Slurm: hence the one forced dependency."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "var/lib/dpkg").mkdir(parents=True)
        (path / "var/lib/dpkg/status").touch()
        self.conf = path / "etc/slurm/plugstack.conf.d/flashrecovery.conf"

    def dpkg(self, *arguments: str | Path) -> None:
        forced = ("--force-depends", "--force-script-chrootless", "--force-not-root", "--force-confold")
        output("dpkg", f"--root={self.path}", *forced, "--log=/dev/null", *arguments)

    def files(self) -> list[str]:
        return sorted(path for path in files_below(self.path) if "/dpkg/" not in path)

    def configured(self) -> list[Path]:
        """What plugstack.conf would include."""
        return list(self.conf.parent.glob("*.conf"))


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path / "root")


def test_it_installs_and_is_purged_without_a_trace(deb: Path, root: Root) -> None:
    root.dpkg("--install", deb)
    assert list(root.path.rglob("flashrecovery.so")) and root.configured() == [root.conf]
    root.dpkg("--purge", "slurm-flashrecovery")
    assert root.files() == []


def test_removed_package_leaves_no_line_that_names_a_missing_plugin(deb: Path, root: Root) -> None:
    root.dpkg("--install", deb)
    root.conf.write_text("optional flashrecovery.so pool=mine\n")
    root.dpkg("--remove", "slurm-flashrecovery")
    assert not list(root.path.rglob("flashrecovery.so"))
    assert root.configured() == [], "every srun would complain"
    root.dpkg("--install", deb)
    assert root.conf.read_text() == "optional flashrecovery.so pool=mine\n", "the administrator's words are back"
    root.dpkg("--remove", "slurm-flashrecovery")
    root.dpkg("--purge", "slurm-flashrecovery")
    assert root.files() == []


def test_upgrade_keeps_the_administrators_line_in_place(deb: Path, root: Root) -> None:
    root.dpkg("--install", deb)
    root.conf.write_text("optional flashrecovery.so pool=mine\n")
    root.dpkg("--install", deb)
    assert root.configured() == [root.conf]
    assert "pool=mine" in root.conf.read_text()


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
