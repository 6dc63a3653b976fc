"""Outside an allocation: the salloc that is made of an srun line, and what goes on inside it."""

from __future__ import annotations

import sys

import pytest

from flashrec.config.schema import Config, Pool
from flashrec.manager.allocate import environment, is_needed, salloc_argv
from flashrec.manager.request import RequestError
from flashrec.manager.srun_options import read_srun_options

INNER = [sys.executable, "-m", "flashrec.cli.main", "run"]
COMMAND = ("/opt/python", "train.py", "--nodes=9")


def made(typed: str, config: Config, ours: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
    """salloc's own words, and those of flashrec run inside it."""
    argv = salloc_argv(read_srun_options(typed.split(), makes_allocation=True), config, ours, COMMAND)
    at = argv.index(sys.executable)
    assert argv[at : at + 4] == INNER
    assert tuple(argv[-4:]) == ("--", *COMMAND)
    return argv[:at], argv[at + 4 : -4]


@pytest.mark.parametrize(
    ("typed", "config", "allocated", "active", "per_node", "spares"),
    [
        ("-N4", Config(), "5", "4", 1, 1),
        ("-N4", Config(spares=2), "6", "4", 1, 2),
        ("-N 4 -n 8", Config(spares=0), "4", "4", 2, 0),
        ("-N1", Config(), "2", "1", 1, 1),
        ("-N4", Config(pool=Pool(name="flashspare")), "4", "4", 1, 0),
        ("-N4-4 --ntasks-per-node=8", Config(), "5", "4", 8, 1),
        ("-N2-4", Config(), "3-5", "2-4", 1, 1),
        ("-n8 --ntasks-per-node=2", Config(), "5", "4", 2, 1),
    ],
)
def test_the_shape(typed: str, config: Config, allocated: str, active: str, per_node: int, spares: int) -> None:
    outer, inner = made(typed, config)
    assert outer == [
        "salloc",
        "--no-kill",
        "--kill-command=TERM",
        f"--nodes={allocated}",
        f"--ntasks-per-node={per_node}",
        "--job-name=python",
    ]
    assert inner == [f"--spares={spares}", f"--nodes={active}", f"--ntasks-per-node={per_node}"]


def test_each_option_goes_where_it_belongs() -> None:
    typed = "-N2 -J mine -p gpu -t 60 -A team --gres=gpu:8 -c 12 --export=NONE -o out -l --site-thing=1 -w n[1-9] -K"
    outer, inner = made(typed, Config(spares=1), ("--set", "output.follow=none", "--job-dir=x"))
    assert outer[5:] == [
        "--job-name=mine", "--partition=gpu", "--time=60", "--account=team", "--gres=gpu:8", "--cpus-per-task=12",
        "--nodelist=n[1-9]",
    ]  # fmt: skip
    assert inner == [
        "--set", "output.follow=none", "--job-dir=x", "--spares=1", "--nodes=2", "--ntasks-per-node=1",
        "--job-name=mine", "--gres=gpu:8", "--cpus-per-task=12", "--export=NONE", "--site-thing=1", "--output=out",
        "--label",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("-n8", "say how many nodes have ranks: -N"),
        ("--ntasks-per-node=8", "say how many nodes have ranks: -N"),
        ("-n7 --ntasks-per-node=2", "do not fill the last one"),
        ("-N4 -n7", "7 ranks do not fit 4 nodes evenly"),
        ("-N4 -n8 --ntasks-per-node=4", "8 ranks do not fit 4 nodes with 4 each"),
        ("-N2-4 -n8", "say -N NODES, not a range"),
    ],
)
def test_a_shape_that_cannot_be_told_is_refused(typed: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        made(typed, Config())


def test_the_environment_of_salloc() -> None:
    environ = environment({"SLURM_PARTITION": "gpu", "SLURM_QOS": "high", "SALLOC_QOS": "low", "HOME": "/root"})
    assert environ == {
        "SLURM_PARTITION": "gpu", "SALLOC_PARTITION": "gpu", "SLURM_QOS": "high", "SALLOC_QOS": "low", "HOME": "/root",
        "FLASHREC_HANDED_OVER": "1", "FLASHREC_NO_KILL": "1",
    }  # fmt: skip


def test_it_is_needed_outside_of_any_allocation_only() -> None:
    assert is_needed({}) and is_needed({"SLURM_JOB_ID": ""})
    assert not is_needed({"SLURM_JOB_ID": "1"})
