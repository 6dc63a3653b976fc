"""The check file: what it may say, and what each error says."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.health.checkfile import BUILT_IN, CheckFileError, load_plan, parse
from flashrec.health.nodesets import is_member
from tests.health.support import CHECKS

EXAMPLE = CHECKS.parent / "node-health.conf"


def test_a_file_with_everything() -> None:
    plan = parse(
        """
# a comment
check_timeout_s = 4.5
max_drained = 3
drain_busy = yes

  *  || memory --total-mib 1000
n[1-3,7] gpu*   || timeout_s=2 when_hung=fail when_unknown=fail disk "/with blank" '#'
""",
        "f",
    )
    assert (plan.settings.check_timeout_s, plan.settings.max_drained, plan.settings.drain_busy) == (4.5, 3, "yes")
    first, second = plan.lines
    assert (first.line, first.terms, first.check, first.args) == (7, ("*",), "memory", ("--total-mib", "1000"))
    assert (first.timeout_s, first.when_hung, first.when_unknown) == (4.5, "unknown", "unknown")
    assert second.terms == ("n[1-3,7]", "gpu*")
    assert second.args == ("/with blank", "#")
    assert (second.timeout_s, second.when_hung, second.when_unknown) == (2, "fail", "fail")
    assert second.label == "disk '/with blank' '#'"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("* || memory\nnonsense", "f:2: 'nonsense' is neither"),
        ("colour = red\n* || memory", "f:1: there is no colour; known: check_timeout_s, run_timeout_s"),
        ("ok_runs = 0\n* || memory", "f:1: ok_runs = 0: Expected `int` >= 1"),
        ("ok_runs = many\n* || memory", "f:1: ok_runs = many: Expected `int`"),
        ("drain_busy = perhaps\n* || memory", "f:1: drain_busy = perhaps"),
        ("prefix = with blank\n* || memory", "f:1: prefix = with blank"),
        ("ok_runs = 1\nok_runs = 2\n* || memory", "f:2: ok_runs is set twice"),
        ("|| memory", "f:1: no nodes before ||"),
        ("* || ", "f:1: no check after ||"),
        ("* || ../memory", "f:1: '../memory' is not the name of a check"),
        ("* || colour=red memory", "f:1: there is no colour; known: timeout_s, when_hung, when_unknown"),
        ("* || when_hung=ok memory", "f:1: when_hung = ok"),
        ("* || timeout_s=-1 memory", "f:1: timeout_s = -1"),
        ('* || memory "open', "f:1: No closing quotation"),
        ("n[1-3 || memory", "f:1: 'n[1-3' is not a host list"),
        ("n[1-3]* || memory", "f:1: 'n[1-3]*': * and ? go with"),
        ("@ || memory", "f:1: '@' is not a feature"),
        ("n1;n2 || memory", "f:1: 'n1;n2' is not a host list"),
        ("# nothing", "f: no checks"),
        ("run_timeout_s = 45\n* || memory", "f: run_timeout_s + 3 x slurm_timeout_s"),
        ("check_timeout_s = 1000\n* || memory", "f:1: check_timeout_s = 1000"),
    ],
)
def test_each_error_names_its_line(text: str, says: str) -> None:
    with pytest.raises(CheckFileError) as caught:
        parse(text, "f")
    assert says in str(caught.value)


@given(st.text())
def test_no_text_brings_another_error(text: str) -> None:
    try:
        parse(text, "f")
    except CheckFileError as err:
        assert str(err).startswith("f:")


@pytest.mark.parametrize(
    ("node", "term", "belongs"),
    [
        ("n7", "*", True),
        ("n7", "n[1-8]", True),
        ("n9", "n[1-8]", False),
        ("n010", "n[001-010,012]", True),
        ("n11", "n[001-010,012]", False),
        ("a-1-2", "a-1-2", True),
        ("tux3.dc1", "tux[0-3].dc1", True),
        ("x2y3", "x[1-2]y[3-4]", True),
        ("x2y5", "x[1-2]y[3-4]", False),
        ("n1", "n1,n2", True),
        ("gpu12", "gpu*", True),
        ("cpu12", "gpu*", False),
        ("gpu1", "gpu?", True),
        ("gpu12", "gpu?", False),
        ("n1", "@a100", True),
        ("n1", "@h100", False),
    ],
)
def test_who_a_line_is_for(node: str, term: str, belongs: bool) -> None:
    parse(f"{term} || memory", "f")
    assert is_member(node, (term,), {"a100"}) is belongs


def test_unknown_features_are_not_no_features() -> None:
    assert is_member("n1", ("@a100",), None) is None
    assert is_member("n1", ("@a100", "n1"), None) is True
    assert is_member("n1", ("n2",), None) is False


def test_only_features_make_slurm_necessary() -> None:
    assert parse("@a100 || gpu", "f").needs_features
    assert not parse("* || gpu", "f").needs_features


def test_errors_of_reading(tmp_path: Path) -> None:
    with pytest.raises(CheckFileError, match=r"cannot read .*No such file"):
        load_plan(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckFileError, match="is not text"):
        load_plan(tmp_path / "binary")


def test_the_example_and_the_built_in_file_can_be_used() -> None:
    for plan in (load_plan(EXAMPLE), parse(BUILT_IN, "built-in")):
        for line in plan.lines:
            assert (CHECKS / f"{line.check}.py").is_file(), line
