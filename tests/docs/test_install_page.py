"""docs/admin/install.md is followed to the letter: what it says to run is run, what it says to write is written into
the configuration of a real cluster, and `flashrec doctor` must find nothing that fails.

Blocks are marked by what stands behind their language: `sh run` in this repository with DESTDIR set, `sh cluster` on
the cluster as root, `sh last` after everything; `conf FILE` is written to that file (a word behind it: for whom). Plain
`sh` needs what no test has (systemd, a network): those are only read.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from flashrec.devcluster.cluster import DevCluster
from tests.support.cluster import dev_cluster, shared_folder, wait_for

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/admin/install.md").read_text()
FLASHREC = Path(sys.executable).with_name("flashrec")
NAME = f"test-{os.getpid()}-install"
# A dev cluster has no cgroups, and its folders are one machine's; pyslurm may be there for the contract suite.
TOLD_OF_A_DEV_CLUSTER = {"pyslurm.version", "slurm.ProctrackType", "machine.job-dir"}


class Block(msgspec.Struct, frozen=True):
    language: str
    use: str
    text: str


def blocks() -> list[Block]:
    found = re.findall(r"^```(\w+)(?: ([^\n]*))?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [Block(language, use, text) for language, use, text in found]


def of(language: str, use: str) -> list[str]:
    return [block.text for block in blocks() if block.language == language and block.use.split(" ")[0] == use]


def lines(name: str) -> list[str]:
    return [line for text in of("conf", name) for line in text.splitlines()]


def test_every_block_has_a_known_mark() -> None:
    marks = {(block.language, block.use) for block in blocks()}
    assert marks == {
        ("sh", ""), ("sh", "run"), ("sh", "cluster"), ("sh", "last"), ("conf", "plugstack.conf"),
        ("conf", "flashrecovery.conf"), ("conf", "slurm.conf"), ("conf", "slurm.conf pool"),
    }  # fmt: skip


def test_commands_that_are_only_read_name_things_that_exist() -> None:
    text = "".join(block.text for block in blocks() if (block.language, block.use) == ("sh", ""))
    for unit in re.findall(r"[a-z-]+\.timer", text):
        assert (ROOT / "slurm_plugin/systemd" / unit).exists()
    for template in re.findall(r"\S+\.sbatch|\S+\.py", text):
        assert (ROOT / template).exists()


def test_every_argument_of_our_line_is_in_the_contract() -> None:
    contract = (ROOT / "docs/reference/plugin-contract.md").read_text()
    (line,) = lines("flashrecovery.conf")
    for word in line.split()[2:]:
        assert f"`{word.partition('=')[0]}=" in contract, word


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """DESTDIR, with everything that the page says to install."""
    with shared_folder() as folder:
        run("run", folder)
        yield folder
        run("last", folder)
        left = [path for path in folder.rglob("*") if path.is_file() and "build" not in path.parts]
        assert sorted(path.name for path in left) == ["cli_filter.lua", "job_submit.lua"], (
            "ours are gone, the site's are not"
        )


def run(use: str, folder: Path) -> None:
    env = os.environ | {"DESTDIR": str(folder), "BUILD": str(folder / "build")}
    for text in of("sh", use):
        done = subprocess.run(
            ["bash", "-euc", text], cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"


@pytest.fixture(scope="module")
def cluster(root: Path) -> Iterator[DevCluster]:
    """The page's lines, with /etc/slurm and /usr where this cluster has them, and one spare."""
    conf = f"/var/lib/flashrec-devcluster/{NAME}/etc"

    def here(text: str) -> str:
        text = text.replace("/opt/flashrec/bin/flashrec", str(FLASHREC)).replace("/usr/", f"{root}/usr/")
        text = text.replace("/etc/slurm/plugstack.conf.d/", f"{root}/etc/slurm/plugstack.conf.d/")
        return text.replace("/etc/slurm/flashrec_", f"{root}/etc/slurm/flashrec_").replace('"/etc/slurm/', f'"{conf}/')

    ours = root / "etc/slurm/plugstack.conf.d/flashrecovery.conf"
    assert "optional flashrecovery.so" in ours.read_text(), "it was installed with a line that only lacks arguments"
    ours.write_text("".join(f"{here(line)}\n" for line in lines("flashrecovery.conf")))
    plugins = next(root.rglob("flashrecovery.so")).parent
    system = next(
        path.parent for pattern in ("*/slurm*", "slurm") for path in Path("/usr/lib").glob(f"{pattern}/auth_munge.so")
    )
    filters = {name: here((root / "etc/slurm" / name).read_text()) for name in ("cli_filter.lua", "job_submit.lua")}
    with dev_cluster(
        name=NAME,
        num_nodes=3,
        features={"n2": "flashspare"},
        plugstack=tuple(here(line) for line in lines("plugstack.conf")),
        extra_conf=(f"PluginDir={system}:{plugins}", *(here(line) for line in lines("slurm.conf"))),
        conf_files=filters,
    ) as cluster:
        yield cluster
    shutil.rmtree(f"/var/spool/flashrec/{NAME}", ignore_errors=True)


def on_cluster(cluster: DevCluster, text: str) -> subprocess.CompletedProcess[str]:
    path = f"{FLASHREC.parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
    # plugstack.conf of a dev cluster is not in /etc/slurm, where `flashrec pool` looks by itself.
    text = text.replace("flashrec pool", f"flashrec pool --plugstack {cluster.layout.conf_dir}/plugstack.conf")
    return cluster.run(["bash", "-euc", text], env={"PATH": path}, check=False, timeout_s=200)


@pytest.mark.devcluster
def test_the_page_followed_gives_a_sound_installation(cluster: DevCluster) -> None:
    for text in of("sh", "cluster"):
        done = on_cluster(cluster, text)
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    done = on_cluster(cluster, "flashrec doctor --json")
    found = {one["check"]: one for one in msgspec.json.decode(done.stdout)["findings"]}
    wrong = {name: one for name, one in found.items() if one["status"] != "ok" and name not in TOLD_OF_A_DEV_CLUSTER}
    wrong.pop("slurm.PrologFlags", None)
    assert wrong == {}
    for check in (
        "plugin.loaded",
        "lua.cli_filter",
        "lua.job_submit",
        "hooks.epilog",
        "hooks.prolog",
        "health.program",
    ):
        assert found[check]["status"] == "ok"
    assert found["pool.reservation"]["what"].startswith("flashspare")


@pytest.mark.devcluster
def test_jobs_that_do_not_ask_for_it_run_as_before(cluster: DevCluster) -> None:
    """Hooks and health program have run as well by then: no node is drained."""
    done = cluster.run(["srun", "-N2", "hostname"])
    assert (sorted(done.stdout.split()), done.stderr) == (["n0", "n1"], "")
    wait_for(lambda: not cluster.run(["squeue", "-h"]).stdout.strip(), "the end of the job", 60)
    states = cluster.run(["sinfo", "-h", "-N", "-o", "%N %T"]).stdout
    assert "drain" not in states and "down" not in states


@pytest.mark.devcluster
def test_the_option_is_there_and_the_pool_is_closed(cluster: DevCluster) -> None:
    assert "--flashrecovery" in cluster.run(["srun", "--help"]).stdout
    asked = cluster.run(["salloc", "-N1", "--reservation=flashspare", "true"], user="nobody", cwd="/tmp", check=False)
    assert asked.returncode != 0 and "pool of spare nodes" in asked.stderr
    wrong = cluster.run(["srun", "--flashrecovery=spares=many", "true"], check=False)
    assert wrong.returncode != 0 and "spares=COUNT" in wrong.stderr
