"""Pages that repeat what the code says are compared with the code; links lead somewhere; commands in them exist."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from flashrec.config.schema import Config
from flashrec.core import detection, job_state, phases
from flashrec.core.types import Phase

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RECOVERY = (ROOT / "docs/concepts/recovery.md").read_text()


def test_the_diagram_is_the_table_of_the_code() -> None:
    drawn = set(re.findall(r"^    ([A-Z]+) --> ([A-Z]+)", RECOVERY, re.MULTILINE))
    coded = {(str(a), str(b)) for a, after in job_state.TRANSITIONS.items() for b in after}
    assert drawn == coded


def test_the_phase_table_is_that_of_the_head_comment() -> None:
    head = phases.__doc__ or ""
    for phase in Phase:
        if phase is Phase.STOPPED:
            continue
        row = next(line for line in RECOVERY.splitlines() if line.startswith(f"| {phase} |"))
        left_when, asked = (cell.strip() for cell in row.split("|")[2:4])
        line = next(line for line in head.splitlines() if re.match(rf"    {phase}  ", line))
        assert left_when in line
        assert line.rstrip().endswith(asked)


def _keys(struct: type[msgspec.Struct], prefix: str = "") -> dict[str, object]:
    keys: dict[str, object] = {}
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            keys |= _keys(field.type, f"{prefix}{field.name}.")
        else:
            keys[prefix + field.name] = field.default
    return keys


def test_every_setting_is_on_the_page_with_its_default() -> None:
    page = (ROOT / "docs/reference/config.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z_.]+)` \| ([^|]+) \|", page, re.MULTILINE))
    keys = _keys(Config)
    assert set(rows) == set(keys)
    for key, default in keys.items():
        if isinstance(default, bool):
            assert rows[key].strip() == str(default).lower(), key
        elif isinstance(default, int | float) and default is not None:
            assert float(rows[key]) == float(default), key


def test_every_threshold_of_detection_is_on_its_page_with_its_default() -> None:
    page = (ROOT / "docs/reference/detection.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z_.]+)` \| ([0-9.]+)", page, re.MULTILINE))
    keys = _keys(Config)
    assert {key for key in keys if key.startswith("detection.")} <= set(rows)
    for key, default in rows.items():
        assert float(default) == keys[key], key


def test_the_states_that_are_drawn_are_those_of_the_detector() -> None:
    drawn = set(re.findall(r"^    (\w+) --> (\w+)", (ROOT / "docs/concepts/detection.md").read_text(), re.MULTILINE))
    states = re.findall(r"^    (\w+)  +\w.*  ", detection.__doc__ or "", re.MULTILINE)[1:]
    assert {state for pair in drawn for state in pair} == set(states)
    assert not [pair for pair in drawn if pair[0] in ("dead", "left")], "nothing leads out of them"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_page_is_reachable_from_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        relative = page.relative_to(ROOT / "docs")
        if relative.parts[0] == "decisions" or relative.name == "README.md":
            continue
        assert f"({relative})" in index, f"{relative} is not in docs/README.md"
