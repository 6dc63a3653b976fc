"""The Python package: a wheel that is complete, and says about itself what an index wants to know."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message

import pytest

from tests.packaging.support import ROOT, VERSION


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy of the sources, with the setuptools that is installed: no network is needed."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    shutil.copytree(ROOT / "flashrec", source / "flashrec", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source],
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = folder.glob("*.whl")
    return zipfile.ZipFile(found)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return email.message_from_bytes(wheel.read(f"flashrec-{VERSION}.dist-info/METADATA"))


def test_metadata_are_complete(metadata: Message) -> None:
    assert metadata["Name"] == "flashrec"
    assert metadata["Version"] == VERSION
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["Summary"] and metadata["Keywords"]
    assert "# FlashRecovery for Slurm" in metadata.get_payload()


def test_no_address_is_a_placeholder(metadata: Message) -> None:
    for key, value in metadata.items():
        if key in ("Home-page", "Project-URL", "Author-email", "Maintainer-email"):
            assert "example" not in value and "localhost" not in value, f"{key}: {value}"


def test_version_is_said_once() -> None:
    import flashrec

    assert flashrec.__version__ == VERSION


def test_every_module_is_in_it_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    inside = {name for name in wheel.namelist() if name.endswith(".py")}
    assert inside == {str(path.relative_to(ROOT)) for path in (ROOT / "flashrec").rglob("*.py")}
    assert {name.split("/")[0] for name in wheel.namelist()} == {"flashrec", f"flashrec-{VERSION}.dist-info"}


def test_command_is_installed(wheel: zipfile.ZipFile) -> None:
    points = wheel.read(f"flashrec-{VERSION}.dist-info/entry_points.txt").decode()
    assert "flashrec = flashrec.cli.main:main" in points
    assert f"flashrec-{VERSION}.dist-info/licenses/LICENSE" in wheel.namelist()


def test_what_it_needs_is_bounded(metadata: Message) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = metadata.get_all("Requires-Dist")
    assert len(needed) == len(project["dependencies"]) + sum(map(len, project["optional-dependencies"].values()))
    for line in needed:
        if 'extra == "dev"' not in line:
            assert ">=" in line and "<" in line, line
