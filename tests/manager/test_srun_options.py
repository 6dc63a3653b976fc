"""srun's options as users type them: what goes to the job steps, to salloc, to flashrec itself, and what is refused."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from flashrec.manager.request import RequestError
from flashrec.manager.srun_options import _LONG, _SHORT, NodeCount, SrunOptions, read_srun_options, split


def test_no_options() -> None:
    assert read_srun_options([]) == SrunOptions()


@pytest.mark.parametrize(
    ("typed", "nodes", "ranks", "per_node"),
    [
        ("-N 4", (4, 4), None, None),
        ("-N4", (4, 4), None, None),
        ("-N=4", (4, 4), None, None),
        ("--nodes=4-4", (4, 4), None, None),
        ("--nodes 2-4", (2, 4), None, None),
        ("--no-kill --nodes=4 -n8", (4, 4), 8, None),
        ("-n 8 -n 16", None, 16, None),
        ("--ntasks-per-node=8", None, None, 8),
        ("--ntasks-per-n 8", None, None, 8),
        ("-lN4", (4, 4), None, None),
        ("-luN 4 -n4", (4, 4), 4, None),
    ],
)
def test_counts(typed: str, nodes: tuple[int, int] | None, ranks: int | None, per_node: int | None) -> None:
    read = read_srun_options(typed.split())
    assert read.nodes == (NodeCount(*nodes) if nodes else None)
    assert (read.num_ranks, read.ranks_per_node, read.steps, read.allocation) == (ranks, per_node, (), ())


@pytest.mark.parametrize(
    ("typed", "steps", "allocation"),
    [
        ("-c 12", ["--cpus-per-task=12"], ["--cpus-per-task=12"]),
        ("-c12 --mem 4G", ["--cpus-per-task=12", "--mem=4G"], ["--cpus-per-task=12", "--mem=4G"]),
        ("-p main -A team", [], ["--partition=main", "--account=team"]),
        ("-phigh", [], ["--partition=high"]),
        ("--part=main", [], ["--partition=main"]),
        ("--gpus-per-task=1 --cpu-bind=cores", ["--gpus-per-task=1", "--cpu-bind=cores"], ["--gpus-per-task=1"]),
        ("-Jhello", ["--job-name=hello"], ["--job-name=hello"]),
        ("-J --local", ["--job-name=--local"], ["--job-name=--local"]),
        ("--export=ALL,A=-n", ["--export=ALL,A=-n"], []),
        ("--export NONE", ["--export=NONE"], []),
        ("--exclusive -I60 -H --mail-type=END", [], ["--exclusive", "--immediate=60", "--hold", "--mail-type=END"]),
        ("-vvQ", ["--verbose", "--verbose", "--quiet"], []),
        ("--comment=", [], ["--comment="]),
        ("-k -K0 -W0 -u -l -X -i none", [], []),
        ("--container-image a.sqsh -c 2", ["--container-image", "a.sqsh", "--cpus-per-task=2"], ["--cpus-per-task=2"]),
        ("--container-image=a.sqsh", ["--container-image=a.sqsh"], []),
    ],
)
def test_who_gets_what(typed: str, steps: list[str], allocation: list[str]) -> None:
    read = read_srun_options(typed.split())
    assert (list(read.steps), list(read.allocation)) == (steps, allocation)
    assert read.notices == ()


@pytest.mark.parametrize("typed", ["-t 60", "--time=60", "-C ib", "--signal=USR1@60"])
def test_what_concerns_the_allocation_if_one_is_made_and_else_the_steps(typed: str) -> None:
    inside, outside = (read_srun_options(typed.split(), makes_allocation=makes) for makes in (False, True))
    assert inside.steps == outside.allocation and len(inside.steps) == 1
    assert inside.allocation == outside.steps == ()


@pytest.mark.parametrize("typed", ["-w n1", "-wn1", "--nodelist=n1", "--nodel=n1", "-x n1", "--exclude=n1", "-F f"])
def test_nodes_are_chosen_when_the_allocation_is_made_and_not_inside(typed: str) -> None:
    with pytest.raises(RequestError, match=r"srun option --(nodelist|exclude|nodefile) cannot be used with flashrec"):
        read_srun_options(typed.split())
    assert len(read_srun_options(typed.split(), makes_allocation=True).allocation) == 1


@pytest.mark.parametrize(
    "typed",
    ["-r1", "--relative=1", "-iall", "--input=0", "--jobid=7", "--jobi=3", "--multi-prog", "--pty", "-G8", "--gpus 8",
     "--bcast", "--bcast=/tmp/x", "-M other", "-Z", "--x11", "--het-group=0", "--ntasks-per-gpu=1", "--stepmgr",
     "--distribution=arbitrary", "-m arbitrary", "--uid=0", "--test-only"],
)  # fmt: skip
@pytest.mark.parametrize("makes_allocation", [False, True])
def test_what_cannot_work_is_refused_with_the_reason(typed: str, makes_allocation: bool) -> None:
    with pytest.raises(RequestError, match=r"srun option --\S+ cannot be used with flashrec: \w+"):
        read_srun_options(typed.split(), makes_allocation=makes_allocation)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("-n", "-n needs a value"),
        ("-n two", "not a count"),
        ("--ntasks=0", "not a count"),
        ("-n-1", "not a count"),
        ("--ntasks=", "not a count"),
        ("-N 99999999", "not a count"),
        ("-N 4-2", "not a range"),
        ("-N 4-", "not a count"),
        ("--ntask=4", "--ntask is ambiguous: write --ntasks-per-core or"),
        ("--node=4", "ambiguous"),
        ("--job-name", "--job-name needs a value"),
        ("--unbuffered=1", "takes no value"),
        ("python -c 1", "'python' is not an option: put -- in front of the command"),
        ("-c 1 python", "'python' is not an option"),
        ("--open-mode=w", "neither append nor truncate"),
    ],
)
def test_what_cannot_be_read_is_refused(typed: str, said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)):
        read_srun_options(typed.split())


@pytest.mark.parametrize("typed", ["-K", "-K1", "--kill-on-bad-exit", "-W 30", "--wait=30", "--no-kill=off", "-e err"])
def test_what_is_left_out_is_said(typed: str) -> None:
    read = read_srun_options(typed.split())
    (notice,) = read.notices
    assert "is left out" in notice
    assert read.steps == read.allocation == ()


def test_output() -> None:
    read = read_srun_options(["-o", "out-%j.log", "--open-mode=append", "-l"])
    assert (read.output, read.open_mode, read.is_labelled, read.steps) == ("out-%j.log", "append", True, ())
    assert read_srun_options([]).output is None


def test_the_table_is_well_formed() -> None:
    assert len(_LONG) > 120
    assert all(re.fullmatch(r"[a-z][a-z0-9-]+", name) for name in _LONG)
    assert all(re.fullmatch(r"[A-Za-z]", letter) for letter in _SHORT)


def test_the_table_knows_every_option_of_the_installed_srun(tmp_path: Path) -> None:
    """In its help text, with the letters and with whether they take a value."""
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=h\nNodeName=n0\nPartitionName=p Nodes=ALL\n")
    done = subprocess.run(
        ["srun", "--help"],
        env={"SLURM_CONF": str(conf), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.findall(r"^  (?:-(\w)[, ] *|    )--([a-z0-9-]+)(\[?=?)", done.stdout, re.MULTILINE)
    assert len(found) > 90
    for letter, name, value in found:
        if name in ("help", "usage", "version"):
            continue
        assert name in _LONG, name
        assert _LONG[name].short == letter, name
        if value:
            assert _LONG[name].value, name


def test_the_page_says_of_every_option_whom_it_concerns() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/reference/srun-options.md").read_text()
    rows = [set(re.findall(r"`--([a-z0-9-]+)", row)) for row in page.splitlines() if row.startswith("|")]
    rows = [row for row in rows if row]
    uses = ("allocation", "both", "first", "place", "step", "count", "output", "dropped", "refused")
    assert rows == [{name for name, option in _LONG.items() if option.use == use} for use in uses]


def test_typed_words_are_kept_together() -> None:
    assert [option.words for option in split(["-N", "4", "--foo", "bar", "-l"])] == [
        ("--nodes=4",), ("--foo", "bar"), ("--label",),
    ]  # fmt: skip
