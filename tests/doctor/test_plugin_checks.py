"""plugstack.conf, the plugin's file and whether srun has loaded it, with real shared objects."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashrec.admin.doctor.elf import NotAPlugin, read_plugin
from flashrec.admin.doctor.facts import Facts
from flashrec.admin.doctor.finding import Status
from flashrec.admin.doctor.plugin_checks import KNOWN_ARGUMENTS, check_plugin
from flashrec.admin.doctor.plugstack import read_stack
from flashrec.config.spec import PLUGIN_CONTRACT
from tests.doctor.builders import NOTHING, UNASKED, build_plugin, by_name, facts, not_ok
from tests.support.plugin import build_plugin as build_ours

ROOT = Path(__file__).parents[2]
NOW = 0x180B05  # 24.11.5


class Site:
    """A folder with slurm.conf's neighbours, and the facts that go with it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stack = path / "plugstack.conf"
        self.flashrec = path / "flashrec"
        self.flashrec.touch(0o755)
        (path / "plugstack.conf.d").mkdir()
        self.stack.write_text("# comment\ninclude plugstack.conf.d/*.conf\n")
        self.write(f"optional flashrecovery.so flashrec={self.flashrec}")
        self.plugin = build_plugin(path / "flashrecovery.so", NOW)

    def write(self, text: str, name: str = "flashrecovery.conf") -> None:
        (self.path / "plugstack.conf.d" / name).write_text(text + "\n")

    def facts(self, **changes: object) -> Facts:
        return facts({"PlugStackConfig": str(self.stack), "PluginDir": f"/nowhere:{self.path}"}, **changes)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_sound_installation_is_fine(site: Site) -> None:
    found = check_plugin(site.facts())
    assert not_ok(found) == []
    assert set(by_name(found)) == {"plugin.line", "plugin.file", "plugin.flashrec", "plugin.loaded"}


def test_no_line_for_the_plugin(site: Site) -> None:
    site.write("optional other.so")
    found = by_name(check_plugin(site.facts(help_text=("", ""))))
    assert found["plugin.line"].status is Status.FAIL
    assert "optional flashrecovery.so" in found["plugin.line"].do
    assert found["plugin.loaded"].status is Status.FAIL


def test_no_plugstack_at_all(site: Site) -> None:
    site.stack.unlink()
    assert by_name(check_plugin(site.facts()))["plugin.line"].status is Status.FAIL


def test_required_is_told(site: Site) -> None:
    site.write(f"required flashrecovery.so flashrec={site.flashrec}")
    found = by_name(check_plugin(site.facts()))["plugin.line"]
    assert found.status is Status.WARN and "write optional" in found.do


def test_loaded_twice_is_told(site: Site) -> None:
    site.write("optional flashrecovery.so", "again.conf")
    assert by_name(check_plugin(site.facts()))["plugin.line"].status is Status.FAIL


def test_commented_line_does_not_count(site: Site) -> None:
    site.write("# optional flashrecovery.so")
    assert by_name(check_plugin(site.facts()))["plugin.line"].status is Status.FAIL


def test_what_stands_behind_a_hash_is_no_argument(site: Site) -> None:
    site.write(f"optional flashrecovery.so flashrec={site.flashrec} # loud")
    assert not_ok(check_plugin(site.facts())) == []


def test_misspelt_argument_is_told(site: Site) -> None:
    site.write(f"optional flashrecovery.so flashrec={site.flashrec} max_per_jop=2 loud")
    found = by_name(check_plugin(site.facts()))["plugin.arguments"]
    assert found.status is Status.WARN
    assert "max_per_jop=2 loud" in found.what


def test_arguments_known_here_are_those_that_the_plugin_knows() -> None:
    text = (ROOT / "slurm_plugin/spank/args.c").read_text()
    in_plugin = set(re.findall(r'"([a-z_]+)=', text))
    assert in_plugin <= KNOWN_ARGUMENTS


def test_missing_file(site: Site) -> None:
    site.plugin.unlink()
    found = by_name(check_plugin(site.facts()))["plugin.file"]
    assert found.status is Status.FAIL and "install" in found.do


@pytest.mark.parametrize(
    ("version", "status"),
    [(0x180B05, Status.OK), (0x180B00, Status.OK), (0x160508, Status.FAIL), (0x1A0505, Status.FAIL)],
)
def test_plugin_for_another_slurm(site: Site, version: int, status: Status) -> None:
    build_plugin(site.plugin, version)
    found = by_name(check_plugin(site.facts()))["plugin.file"]
    assert found.status is status
    if status is Status.FAIL:
        assert "Incompatible Slurm plugin" in found.what and "build it again" in found.do


def test_plugin_is_compared_with_the_srun_that_loads_it_not_with_the_controller(site: Site) -> None:
    """During an upgrade the controller is ahead of its clients."""
    found = check_plugin(
        facts({"SLURM_VERSION": "26.05.5", "PlugStackConfig": str(site.stack), "PluginDir": str(site.path)})
    )
    assert by_name(found)["plugin.file"].status is Status.OK


def test_our_own_plugin_speaks_our_contract() -> None:
    assert read_plugin(build_ours()).contract == PLUGIN_CONTRACT


@pytest.mark.parametrize("contract", ["2", ""])
def test_plugin_of_another_release_of_ours(site: Site, contract: str) -> None:
    build_plugin(site.plugin, NOW, contract=contract)
    found = by_name(check_plugin(site.facts()))["plugin.file"]
    assert found.status is Status.FAIL and "one release" in found.do


def test_another_plugin_under_our_name(site: Site) -> None:
    build_plugin(site.plugin, NOW, name="pyxis")
    assert "spank/pyxis" in by_name(check_plugin(site.facts()))["plugin.file"].what


def test_srun_says_why_it_has_not_loaded_it(site: Site) -> None:
    said = "srun: error: Incompatible Slurm plugin /x/flashrecovery.so version (22.05.8)"
    found = by_name(check_plugin(site.facts(help_text=("Usage: srun", said))))["plugin.loaded"]
    assert found.status is Status.FAIL and said in found.what


def test_flashrec_that_is_not_there(site: Site) -> None:
    site.flashrec.unlink()
    found = by_name(check_plugin(site.facts()))["plugin.flashrec"]
    assert found.status is Status.FAIL and str(site.flashrec) in found.what


def test_flashrec_with_a_relative_path(site: Site) -> None:
    site.write("optional flashrecovery.so flashrec=bin/flashrec")
    assert by_name(check_plugin(site.facts()))["plugin.flashrec"].status is Status.FAIL


def test_no_flashrec_anywhere(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.write("optional flashrecovery.so")
    monkeypatch.setenv("PATH", str(site.path / "empty"))
    assert by_name(check_plugin(site.facts()))["plugin.flashrec"].status is Status.FAIL


def test_what_could_not_be_asked_is_unknown(site: Site) -> None:
    assert by_name(check_plugin(site.facts(help_text=UNASKED)))["plugin.loaded"].status is Status.UNKNOWN
    assert not_ok(check_plugin(NOTHING)) == ["plugin.line"]


def test_include_that_includes_itself_ends(tmp_path: Path) -> None:
    stack = tmp_path / "plugstack.conf"
    stack.write_text(f"include {stack}\noptional flashrecovery.so\n")
    assert 1 <= len(read_stack(stack)) < 20


def test_symbol_that_is_only_used_does_not_make_a_plugin(tmp_path: Path) -> None:
    source, path = tmp_path / "user.c", tmp_path / "user.so"
    source.write_text("extern const char plugin_name[]; const char *name(void) { return plugin_name; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source], check=True)
    with pytest.raises(NotAPlugin, match="no symbol plugin_name"):
        read_plugin(path)


def test_files_that_are_no_plugins(tmp_path: Path) -> None:
    sound = build_plugin(tmp_path / "sound.so", NOW).read_bytes()
    assert read_plugin(tmp_path / "sound.so").built_for == (24, 11, 5)
    assert "slurm_spank_init" in read_plugin(tmp_path / "sound.so").symbols
    cases = {"text": b"hello", "short": b"\x7fELF\x02\x01", "cut": sound[:200], "32": sound[:4] + b"\x01" + sound[5:]}
    for name, data in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(NotAPlugin, match=name):
            read_plugin(tmp_path / name)
    with pytest.raises(NotAPlugin, match="no symbol plugin_name"):
        read_plugin(Path(sys.executable).resolve())


@pytest.mark.parametrize("cut", range(0, 4096, 64))
def test_damaged_file_is_an_answer_not_a_crash(tmp_path: Path, cut: int) -> None:
    path = build_once(tmp_path)
    data = path.read_bytes()
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(data[:cut] + bytes(255 - byte for byte in data[cut : cut + 64]) + data[cut + 64 :])
    try:
        read_plugin(damaged)
    except NotAPlugin:
        pass


_built: list[bytes] = []


def build_once(folder: Path) -> Path:
    path = folder / "whole.so"
    if not _built:
        _built.append(build_plugin(path, NOW).read_bytes())
    path.write_bytes(_built[0])
    return path
