"""The administrators' page says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from flashrec.health import Settings
from flashrec.health.checkfile import SETTLE_S, LineOptions
from tests.health.support import CHECKS, run_raw

PAGE = (Path(__file__).resolve().parents[2] / "docs/admin/node-health.md").read_text()


def test_every_setting_is_on_the_page_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `([a-z_]+)` \|([^|]*)\|", PAGE, re.MULTILINE))
    for field in msgspec.structs.fields(Settings):
        shown = rows.pop(field.name).strip()
        if isinstance(field.default, int | float):
            assert float(shown) == field.default, field.name
        else:
            assert shown == field.default, field.name
    assert {key for key in rows if "_" in key} == set()
    assert f"`spread_s` + {SETTLE_S:g}" in PAGE
    for field in msgspec.structs.fields(LineOptions):
        assert f"`{field.name}`" in PAGE


@pytest.mark.parametrize("check", sorted(path.stem for path in CHECKS.glob("[a-z]*.py")))
def test_every_argument_of_a_check_is_on_the_page(check: str) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{check}` |")]
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", run_raw(check, "--help").stdout.partition("options:")[2]))
    for_tests = {"--help", "--proc", "--sys", "--root", "--kmsg", "--node"}
    commands = {
        "--nvidia-smi", "--chronyc", "--timedatectl", "--scontrol", "--squeue", "--munge-command", "--unmunge-command"
    }  # fmt: skip
    assert set(re.findall(r"`(--[a-z-]+)", row)) - {"--help"} == options - for_tests - commands
