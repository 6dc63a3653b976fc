"""`make -C slurm_plugin install`: everything that runs in a cluster is installed, with its mode, and goes again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.packaging.support import ROOT, files_below, installed
from tests.support.plugin import make

SUITE = ROOT / "slurm_plugin"
PARTS = ("lua", "hooks", "health", "systemd")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, bytes]]:
    return installed(tmp_path_factory.mktemp("install"))


def test_every_file_of_every_part_is_installed(found: dict[str, tuple[int, bytes]]) -> None:
    contents = {content for _, content in found.values()}
    for part in PARTS:
        sources = [path for path in (SUITE / part).rglob("*") if path.is_file() and path.suffix not in (".pyc", ".md")]
        assert sources, f"there is nothing in {part}"
        for path in sources:
            assert path.read_bytes() in contents, f"{path.relative_to(SUITE)} is not installed"


def test_programs_can_be_run_and_nothing_can_be_written_by_others(found: dict[str, tuple[int, bytes]]) -> None:
    for path, (mode, content) in found.items():
        assert mode in (0o644, 0o755), path
        is_program = content.startswith(b"#!")
        assert (mode == 0o755) >= is_program, f"{path} begins with #! and cannot be run"


def test_where_things_are_is_what_they_say_of_each_other(found: dict[str, tuple[int, bytes]]) -> None:
    """Examples, hooks and units name paths of other parts: those are where they are installed."""
    named = set()
    for path, (_, content) in found.items():
        if not path.endswith(".so"):
            text = content.decode()
            named |= set(
                re.findall(
                    r"/(?:usr/libexec/flashrec|usr/sbin|etc/slurm|etc/flashrec)/[A-Za-z0-9_.-]*flash[a-z_.-]*", text
                )
            )
    assert {"/usr/libexec/flashrec/flashrec-epilog", "/etc/slurm/flashrec_job_submit.lua"} <= named
    assert {path for path in named if path not in found and "plugstack.conf.d" not in path} == set()


def test_uninstall_leaves_nothing(tmp_path: Path) -> None:
    settings = (f"BUILD={tmp_path / 'build'}", f"DESTDIR={tmp_path / 'root'}")
    make("install", *settings)
    make("uninstall", *settings)
    assert files_below(tmp_path / "root") == {}


def test_every_place_can_be_chosen(tmp_path: Path) -> None:
    found = installed(
        tmp_path,
        "PREFIX=/opt/fr",
        "SYSCONFDIR=/opt/slurm/etc",
        "PLUGINDIR=/opt/slurm/lib",
        "FLASHRECCONFDIR=/opt/fr/etc",
    )
    assert {path.split("/")[1] for path in found} == {"opt"}
