"""Host lists as Slurm writes them. The expected names were printed by `scontrol show hostnames` of Slurm 22.05, except
where that release cannot: text after brackets came with 23.11.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.slurm.hostlist import compress, expand

SLURM_22_05 = {
    "n1": ["n1"],
    "n[001-010,012]": [*(f"n{i:03}" for i in range(1, 11)), "n012"],
    "a-1-2": ["a-1-2"],
    "a-1-[2-3]": ["a-1-2", "a-1-3"],
    "x[1-2]y[3-4]": ["x1y3", "x1y4", "x2y3", "x2y4"],
    "n[1-1000]": [f"n{i}" for i in range(1, 1001)],
    "b04-[09-10]": ["b04-09", "b04-10"],
    "n[9-11]": ["n9", "n10", "n11"],
    "host[001,003-004,006]": ["host001", "host003", "host004", "host006"],
}
NEWER = {
    "tux[0-3].dc1": ["tux0.dc1", "tux1.dc1", "tux2.dc1", "tux3.dc1"],
    "n[1-3]-ib": ["n1-ib", "n2-ib", "n3-ib"],
}
ANY_ORDER = {"n[3,1]": {"n3", "n1"}, "n[08-11,1]": {"n08", "n09", "n10", "n11", "n1"}, "n1,m[2-3]": {"n1", "m2", "m3"}}


@pytest.mark.parametrize(("text", "names"), [*SLURM_22_05.items(), *NEWER.items()])
def test_as_slurm_expands_it(text: str, names: list[str]) -> None:
    assert list(expand(text)) == names


@pytest.mark.parametrize(("text", "names"), ANY_ORDER.items())
def test_as_slurm_expands_it_in_sorted_order(text: str, names: set[str]) -> None:
    assert set(expand(text)) == names
    assert len(expand(text)) == len(names)


def test_nothing_is_nothing() -> None:
    assert expand("") == ()
    assert compress([]) == ""


@pytest.mark.parametrize(
    "text", ["n[1-", "n[]", "n[3-1]", "n[a-b]", "n1]", "(null)", "n/a", "n1!n2", "n1&n2", "n1^n2", "@group", "*",
             "n1 n2", "n1\nn2", "n[1-3]!n2", "n1;rm", "ERROR: no"],
)  # fmt: skip
def test_what_is_no_host_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a host list"):
        expand(text)


def test_lists_that_old_releases_cannot_read_are_not_written() -> None:
    assert compress(["tux1.dc1", "tux2.dc1", "n1", "n2"]).split(",").count("tux2.dc1") == 1
    assert compress(["n1", "n2", "n3"]) == "n[1-3]"
    assert compress(["x1y3", "x1y4", "x2y3", "x2y4"]) == "x[1-2]y[3-4]"


@given(st.sets(st.tuples(st.sampled_from("ab"), st.integers(0, 120)).map(lambda x: f"{x[0]}{x[1]:03}"), min_size=1))
def test_compress_and_expand_are_inverse(names: set[str]) -> None:
    assert set(expand(compress(sorted(names)))) == names
