"""What administrators write into plugstack.conf, right and wrong: srun always works; at worst the option is missing."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.plugin.conftest import Became, Site, complaints
from tests.support.plugin import SOURCES, build_plugin, make

pytestmark = pytest.mark.devcluster


def _run(site: Site, *argv: str) -> subprocess.CompletedProcess[str]:
    return site.cluster.run(argv, check=False, cwd=site.folder)


def _srun(site: Site) -> subprocess.CompletedProcess[str]:
    return _run(site, "srun", "-N2", "-l", "hostname")


def _assert_works(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0: n0", "1: n1"]


def _other_release(site: Site) -> Path:
    """A plugin for the release after this one."""
    found = re.search(r"(\d+)\.(\d+)", site.cluster.run(["srun", "--version"]).stdout)
    assert found
    major, minor = int(found.group(1)), int(found.group(2))
    return build_plugin(hex((major + 1) << 16 | minor << 8))


@pytest.mark.parametrize("kind", ["optional", "required"])
def test_with_the_plugin(site: Site, kind: str) -> None:
    with site.plugstack(f"{kind} {site.plugin} flashrec={site.executable}"):
        done = _srun(site)
        _assert_works(done)
        assert complaints(done.stderr) == ""
        assert Became.parse(_run(site, "srun", "--flashrecovery", "a").stdout).words[0] == "run"
        assert _run(site, "srun", "--flashrecovery=x", "a").returncode != 0


def test_plugin_for_another_slurm_is_refused_by_slurm(site: Site) -> None:
    with site.plugstack(f"optional {_other_release(site)}"):
        done = _srun(site)
        _assert_works(done)
        assert "Incompatible" in done.stderr
        done = _run(site, "srun", "--flashrecovery", "a")
        assert done.returncode != 0
        assert "unrecognized option" in done.stderr


def test_required_plugin_for_another_slurm_stops_srun(site: Site) -> None:
    """Slurm's doing, and why the example says `optional`."""
    with site.plugstack(f"required {_other_release(site)}"):
        done = _srun(site)
        assert done.returncode != 0
        assert "Incompatible" in done.stderr


def test_plugin_that_is_not_there(site: Site) -> None:
    with site.plugstack("optional /nowhere/flashrecovery.so"):
        _assert_works(_srun(site))


@pytest.mark.parametrize("copy", [False, True], ids=["the same file twice", "two copies of it"])
def test_listed_twice(site: Site, copy: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Slurm takes the option from the first and says so; nobody is handed over twice."""
    second = site.folder / "copy.so" if copy else site.plugin
    if copy:
        shutil.copy(site.plugin, second)
    with site.plugstack(site.usual, f"optional {second} flashrec={site.executable}"):
        _assert_works(_srun(site))
        assert Became.parse(_run(site, "srun", "--flashrecovery=spares=1", "a").stdout).words == (
            "run", "--flashrecovery=spares=1", "--", "a",
        )  # fmt: skip
        assert _run(site, "srun", "--flashrecovery=x", "a").returncode != 0


def test_unknown_argument_is_told_to_who_can_see_it(site: Site) -> None:
    with site.plugstack(f"{site.usual} pool=night max_per_user=4 colour=red"):
        done = _srun(site)
        _assert_works(done)
        assert complaints(done.stderr) == ""
        done = _run(site, "srun", "--flashrecovery", "a")
        Became.parse(done.stdout)
        assert "unknown argument in plugstack.conf, ignored: colour=red" in done.stderr
        before = site.cluster.layout.slurmd_log("n1").stat().st_size
        site.cluster.stop_daemon("n1")
        site.cluster.start_daemon("n1")
        with site.cluster.layout.slurmd_log("n1").open() as log:
            log.seek(before)
            assert "ignored: colour=red" in log.read()


def test_arguments_of_the_pool_are_none_of_its_business(site: Site) -> None:
    with site.plugstack(f"{site.usual} pool=night max_per_job=1 max_per_user=4 drain=admin"):
        done = _run(site, "srun", "--flashrecovery", "a")
        assert Became.parse(done.stdout).words[0] == "run"
        assert complaints(done.stderr) == ""


def test_installed_as_the_makefile_does(site: Site, tmp_path: Path) -> None:
    """The example line, with the plugin in the folder where Slurm looks for it by name."""
    make("install", f"BUILD={tmp_path}", f"DESTDIR={site.folder}", "PLUGINDIR=/plugins", "SYSCONFDIR=/slurm")
    conf = site.folder / "slurm/plugstack.conf.d/flashrecovery.conf"
    line = conf.read_text().splitlines()[-1]
    assert line == "optional flashrecovery.so"
    conf.write_text(line.replace("flashrecovery.so", f"{site.folder}/plugins/flashrecovery.so"))
    with site.plugstack(f"include {conf.parent}/*.conf"):
        assert "--flashrecovery" in _run(site, "srun", "--help").stdout
        _assert_works(_srun(site))


def test_uninstalled_while_a_job_runs(site: Site) -> None:
    """Jobs that were submitted with the plugin go on without it; their sruns are ordinary again."""
    script = f"""#!/bin/bash
echo '# none' > {site.plugstack_conf}
srun -N2 -l hostname
"""
    output = site.folder / "uninstalled"
    try:
        site.cluster.run(["sbatch", "-W", "-N2", f"-o{output}", "--flashrecovery"], stdin=script)
    finally:
        site.write(site.usual)
    assert sorted(output.read_text().splitlines()) == ["0: n0", "1: n1"]


def test_the_example_is_optional() -> None:
    lines = (SOURCES / "flashrecovery.conf").read_text().splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == ["optional flashrecovery.so"]
