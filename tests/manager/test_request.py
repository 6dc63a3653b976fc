"""What the user asked for: srun's options, the shape of the job, what cannot work and what to do about it."""

from __future__ import annotations

import msgspec
import pytest

from flashrec.config.schema import Config, Pool
from flashrec.manager.request import Request, RequestError, Shape, read_srun_options, shape


@pytest.mark.parametrize(
    ("options", "passed", "counts"),
    [
        ([], (), {}),
        (["--ntasks-per-node=8"], (), {"per_node": 8}),
        (["--ntasks-per-node", "8", "-c", "12"], ("-c", "12"), {"per_node": 8}),
        (["-n8", "-N", "2"], (), {"ntasks": 8, "nodes": 2}),
        (["-n=8"], (), {"ntasks": 8}),
        (["--nodes=4", "--ntasks", "16"], (), {"nodes": 4, "ntasks": 16}),
        (["--no-kill", "-k"], (), {}),
        (["--gpus-per-task=1", "--cpu-bind=cores", "-l"], ("--gpus-per-task=1", "--cpu-bind=cores", "-l"), {}),
        (["--export=ALL,A=-n"], ("--export=ALL,A=-n",), {}),
        (["-n4", "-n", "8"], (), {"ntasks": 8}),
    ],
)
def test_srun_options(options: list[str], passed: tuple[str, ...], counts: dict[str, int]) -> None:
    assert read_srun_options(options) == (passed, counts)


@pytest.mark.parametrize(
    "option",
    ["-wn1", "-w", "--nodelist=n1", "--nodelist", "-xn1", "--exclude=n1", "-r1", "--relative=1", "-oout", "--output=o",
     "-ee", "--error=e", "-K", "-K1", "--kill-on-bad-exit=1", "-W0", "--wait=0", "-iall", "--input=none", "--jobid=7",
     "--multi-prog", "--pty", "--nodel=n1", "--outpu=x", "--kill-on-bad", "--jobi=3"],
)  # fmt: skip
def test_options_that_flashrec_must_decide_itself_are_refused(option: str) -> None:
    with pytest.raises(RequestError, match="cannot be used with flashrec"):
        read_srun_options([option])


@pytest.mark.parametrize(
    "options", [["-n"], ["-n", "two"], ["--ntasks=0"], ["--nodes=2-4"], ["-n-1"], ["--ntasks="], ["-N", "99999999"],
                ["--ntask=4"], ["--node=4"]],
)  # fmt: skip
def test_counts_are_counts(options: list[str]) -> None:
    with pytest.raises(RequestError):
        read_srun_options(options)


def asked(ranks: int | None = None, nodes: int | None = None, per_node: int | None = None, spares: int | None = None):
    return Request(("true",), (), ranks, nodes, per_node, Config(spares=spares))


@pytest.mark.parametrize(
    ("request_", "num_nodes", "environ", "expected"),
    [
        (asked(), 5, {}, Shape(4, 1, 1)),
        (asked(spares=2), 5, {}, Shape(3, 1, 2)),
        (asked(spares=0), 5, {}, Shape(5, 1, 0)),
        (asked(per_node=8), 5, {}, Shape(4, 8, 1)),
        (asked(), 5, {"SLURM_NTASKS_PER_NODE": "2"}, Shape(4, 2, 1)),
        (asked(), 5, {"SLURM_NTASKS_PER_NODE": "2(x5)"}, Shape(4, 2, 1)),
        (asked(per_node=4), 5, {"SLURM_NTASKS_PER_NODE": "2"}, Shape(4, 4, 1)),
        (asked(ranks=8), 5, {}, Shape(4, 2, 1)),
        (asked(ranks=8, per_node=2), 5, {}, Shape(4, 2, 1)),
        (asked(nodes=2), 5, {}, Shape(2, 1, 3)),
        (asked(nodes=2, spares=2), 5, {}, Shape(2, 1, 3)),
        (asked(nodes=5), 5, {}, Shape(5, 1, 0)),
        (asked(ranks=6, nodes=3, spares=1), 5, {}, Shape(3, 2, 2)),
    ],
)
def test_shape(request_: Request, num_nodes: int, environ: dict[str, str], expected: Shape) -> None:
    assert shape(request_, num_nodes, environ) == expected


@pytest.mark.parametrize(
    ("request_", "num_nodes", "environ", "said"),
    [
        (asked(spares=5), 5, {}, "leave 0 for ranks"),
        (asked(), 1, {}, "leave 0 for ranks"),
        (asked(nodes=4, spares=2), 5, {}, "need 6 nodes, but the allocation has 5"),
        (asked(nodes=7), 5, {}, "7 active nodes"),
        (asked(ranks=7), 5, {}, "7 ranks do not fit 4 active nodes evenly"),
        (asked(ranks=8, per_node=3), 5, {}, "with 3 each"),
        (asked(ranks=8), 5, {"SLURM_NTASKS_PER_NODE": "3"}, "with 3 each"),
        (asked(), 5, {"SLURM_NTASKS_PER_NODE": "many"}, "is not a count"),
    ],
)
def test_what_does_not_fit_is_refused(request_: Request, num_nodes: int, environ: dict[str, str], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        shape(request_, num_nodes, environ)
    assert said in str(caught.value)
    assert "spares leave 7" not in str(caught.value)


def test_a_job_with_a_pool_keeps_no_spares_unless_told_to() -> None:
    pool = msgspec.convert({"name": "p"}, Pool)
    for config, spares in [(Config(pool=pool), 0), (Config(pool=pool, spares=1), 1)]:
        made = shape(Request(("true",), (), None, None, None, config), 5, {})
        assert made == Shape(5 - spares, 1, spares)
