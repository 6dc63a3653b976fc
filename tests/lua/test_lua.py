"""The Lua modules for cli_filter and job_submit, with real interpreters and a fake `slurm`; the cases are in Lua.

Slurm loads them with the Lua it was built with (5.1 in Debian's), so 5.1 must be there; later ones are tried if
installed. `test_lua_in_slurm.py` has them run by Slurm itself.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INTERPRETERS = ["lua5.1", *(name for name in ("lua5.3", "lua5.4") if shutil.which(name))]


@pytest.mark.parametrize("interpreter", INTERPRETERS)
@pytest.mark.parametrize("cases", sorted(path.name for path in HERE.glob("*_cases.lua")))
def test_cases(cases: str, interpreter: str) -> None:
    assert shutil.which(interpreter), f"{interpreter} is missing: make install-system"
    done = subprocess.run(
        [interpreter, str(HERE / cases)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    failed = [line for line in done.stdout.splitlines() if not line.startswith("ok ")]
    assert done.returncode == 0, "\n".join(failed) + done.stderr


def test_both_modules_have_cases() -> None:
    modules = {path.stem.removeprefix("flashrec_") for path in (HERE / "../../slurm_plugin/lua").glob("flashrec_*.lua")}
    assert (
        modules
        == {path.stem.removesuffix("_cases") for path in HERE.glob("*_cases.lua")}
        == {"cli_filter", "job_submit"}
    )
