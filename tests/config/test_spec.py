"""SPEC of --flashrecovery: the cases that the plugin's C parser reads as well, what they mean for the configuration."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.config.load import ConfigError, load_config
from flashrec.config.schema import Pool
from flashrec.config.spec import GRAMMAR, Spec, SpecError, parse_spec

CASES = Path(__file__).resolve().parents[1] / "plugin" / "specs.txt"


def unescape(text: str) -> str:
    """\\xHH is one byte, {C*N} the character C N times."""
    text = re.sub(r"\{(.)\*(\d+)\}", lambda found: found[1] * int(found[2]), text)
    data = re.sub(rb"\\x([0-9a-f]{2})", lambda found: bytes([int(found[1], 16)]), text.encode())
    return os.fsdecode(data)


def cases(kind: str) -> list[list[str]]:
    lines = [line.split("\t") for line in CASES.read_text().splitlines() if line and not line.startswith("#")]
    return [[unescape(field) for field in fields[1:]] for fields in lines if fields[0] == kind]


def test_the_shared_cases_are_there() -> None:
    assert len(cases("ok")) > 20 and len(cases("bad")) > 40
    assert all(len(case) == 2 for case in cases("ok")) and all(len(case) == 1 for case in cases("bad"))


@pytest.mark.parametrize(("spec", "canonical"), cases("ok"), ids=lambda text: text[:40])
def test_what_the_plugin_accepts(spec: str, canonical: str) -> None:
    assert str(parse_spec(spec)) == canonical
    assert parse_spec(canonical) == parse_spec(spec)


@pytest.mark.parametrize("spec", [case[0] for case in cases("bad")], ids=lambda text: text[:40])
def test_what_the_plugin_refuses_is_refused_with_the_grammar(spec: str) -> None:
    with pytest.raises(SpecError, match=re.escape(GRAMMAR)) as caught:
        parse_spec(spec)
    first, *_ = str(caught.value).split("\n")
    assert first.isprintable() or any(ord(letter) > 127 for letter in first)


@given(st.text(alphabet="spares=tierwampoolx-cnfig,01 9\n\x7fä", max_size=40))
def test_whatever_is_typed_is_taken_or_refused_in_words(text: str) -> None:
    try:
        spec = parse_spec(text)
    except SpecError:
        return
    assert parse_spec(str(spec)) == spec


@pytest.mark.parametrize(
    ("spec", "pool"),
    [
        ("", Pool()),
        ("spares=2", Pool()),
        ("tier=pool", Pool(tier="pool")),
        ("pool=night", Pool(name="night", tier="pool")),
        ("pool=null,max-swaps=0", Pool(name="null", tier="pool", max_swaps=0)),
        ("tier=warm,pool=night", Pool(name="night", tier="warm")),
        ("tier=hot,pool=night", Pool(name="night", tier="warm")),
    ],
)
def test_what_it_means_for_the_pool(spec: str, pool: Pool) -> None:
    assert load_config(overrides=parse_spec(spec).settings()).pool == pool


@pytest.mark.parametrize(
    ("spec", "park"), [("", "script"), ("tier=hot", "imports"), ("tier=warm", "none"), ("tier=pool", "script")]
)
def test_what_it_means_for_parked_processes(spec: str, park: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("hot: {park: script}\n")
    assert load_config(path, (), parse_spec(spec).settings()).hot.park == park


def test_it_wins_over_the_file_and_loses_to_settings(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("spares: 3\npool: {tier: warm, name: day, max_swaps: 7}\n")
    overrides = parse_spec("spares=2,pool=night").settings()
    config = load_config(path, ["pool.name=dusk"], overrides)
    assert (config.spares, config.pool) == (2, Pool(name="dusk", tier="pool", max_swaps=7))


def test_it_does_not_fit_a_file_whose_section_is_a_value(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("pool: night\n")
    with pytest.raises(ConfigError, match="pool is a value, not a section"):
        load_config(path, overrides=Spec(pool="night").settings())
