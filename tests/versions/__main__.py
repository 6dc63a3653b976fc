"""Run our tests on one Slurm release: python -m tests.versions 24.11 [--only contract,recovery]

Exit code 0 if every step passed, 1 if one failed, 2 if the release cannot be had here. Logs are in
build/test-slurm/RELEASE/. The last lines are a table for docs/reference/slurm-versions.md.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.versions.root import SUITES, TREE, Root, RootError

MIRROR = "http://deb.debian.org/debian"
PYTEST = (".venv/bin/python", "-m", "pytest", "-p", "no:cacheprovider")
SHIM = "/src/tests/versions/pyslurm_shim"
PYSLURM = {  # PyPI's pyslurm is for 25.11; the shim lets it be built for 26.05: a test vehicle, no pair for production
    "SLURM_LIB_DIR": "/usr/lib/x86_64-linux-gnu",
    "SLURM_INCLUDE_DIR": SHIM,
    "PYSLURM_BUILD_JOBS": "2",
    "CFLAGS": "-O0 -g0 -w",
}


class Step(NamedTuple):
    """timeout_s is for a busy machine; `paths` that do not exist in this tree are left out."""

    name: str
    argv: tuple[str, ...]
    paths: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    releases: tuple[str, ...] = tuple(SUITES)
    timeout_s: float = 1800.0


STEPS = (
    Step("environment", ("make", "venv", "VENV=.venv"), timeout_s=1200),
    Step("pyslurm", (".venv/bin/python", "-m", "pip", "install", "-q", "pyslurm==25.11.2"), (), PYSLURM, ("26.05",)),
    Step("contract", PYTEST, ("tests/slurm",)),
    Step("contract-pyslurm", PYTEST, ("tests/slurm/contract",), {"FLASHREC_TEST_SCHEDULERS": "pyslurm"}, ("26.05",)),
    Step("plugin", PYTEST, ("tests/plugin",)),
    Step("install", PYTEST, ("tests/doctor", "tests/docs/test_install_page.py", "tests/packaging/test_deb.py",
                             "tests/packaging/test_install.py")),
    Step("pool", PYTEST, ("tests/admin", "tests/hooks", "tests/lua", "tests/e2e/test_pool_admin.py",
                          "tests/e2e/test_pool_job.py", "tests/e2e/test_drain_path.py")),
    Step("health", PYTEST, ("tests/health",)),
    Step("recovery", PYTEST, ("tests/e2e/test_demo.py",)),
    Step("srun", PYTEST, ("tests/e2e/test_srun_flashrecovery.py",)),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-slurm SLURM=")
    parser.add_argument("release", choices=sorted(SUITES))
    parser.add_argument("--only", default="", help=f"steps, with commas, of {', '.join(step.name for step in STEPS)}")
    parser.add_argument("--mirror", default=MIRROR, help="a Debian mirror")
    parser.add_argument("--torch-index", default="", help="as make's TORCH_INDEX")
    asked = parser.parse_args()
    wanted = {"environment", *asked.only.split(",")} if asked.only else {step.name for step in STEPS}
    unknown = wanted - {step.name for step in STEPS}
    if unknown:
        parser.error(f"no step {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so would tests
    logs = TREE / "build/test-slurm" / asked.release
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    try:
        with Root(asked.release, asked.mirror or MIRROR).opened() as root:
            root.copy_tree()
            chosen = [step for step in STEPS if step.name in wanted and asked.release in step.releases]
            return run(root, chosen, logs, asked.torch_index)
    except RootError as err:
        print(f"make test-slurm: {err}", file=sys.stderr)
        return 2


def run(root: Root, steps: list[Step], logs: Path, torch_index: str) -> int:
    rows = []
    for step in steps:
        paths = [path for path in step.paths if (TREE / path).exists()]
        if step.paths and not paths:
            rows.append(f"| {root.release} | {step.name} | not in this tree | |")
            continue
        argv = [*step.argv, *paths, *([f"TORCH_INDEX={torch_index}"] if step.name == "environment" else [])]
        print(f"Slurm {root.release}: {step.name} …", flush=True)
        log, started = logs / f"{step.name}.log", time.monotonic()
        exit_code = root.run(argv, log, env=step.env, timeout_s=step.timeout_s)
        took_s = time.monotonic() - started
        result = summary(log) if exit_code == 0 else f"FAILED (exit code {exit_code})"
        print(f"Slurm {root.release}: {step.name}: {result}, {took_s:.0f} s", flush=True)
        rows.append(f"| {root.installed('slurmctld')} | {step.name} | {result} | {took_s:.0f} |")
        if exit_code != 0:
            print("\n".join(log.read_text(errors="replace").splitlines()[-60:]))
            print(f"whole output: {log}; the root is {root.path}")
            if step.name == "environment":
                break
    print("\n| Slurm | step | result | seconds |\n|---|---|---|---|", *rows, sep="\n")
    return int(any("FAILED" in row for row in rows))


def summary(log: Path) -> str:
    """pytest's count of what passed and what did not run; 'ok' for another command."""
    lines = log.read_text(errors="replace").splitlines()
    last = lines[-1].strip("= ") if lines else ""
    return last.partition(" in ")[0] if "passed" in last else "ok"


if __name__ == "__main__":
    sys.exit(main())
