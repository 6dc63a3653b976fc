"""`make bench-peers`: every peer, every fault, one run after the other; results after each."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from benchmarks.detection.job import commit
from benchmarks.peers import results, trial
from benchmarks.peers.adapters import REFERENCE, all_peers
from benchmarks.peers.job import ROOT, VENV, JobTrouble, Peer
from benchmarks.peers.results import RESULTS, Calm, Cell, Row, Run
from flashrec.devcluster.errors import DevClusterError
from flashrec.devcluster.requirements import SEARCH_PATH

T = TypeVar("T")
NOT_INSTALLED = "not installed"
BLOCK = 10  # steps; has one checkpoint of those who write them
FAILURES = (JobTrouble, DevClusterError, TimeoutError, subprocess.SubprocessError)  # a fault that did not fire ends all


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options.out.mkdir(parents=True, exist_ok=True)
    page = results.PAGE if options.out == RESULTS else None
    order = [peer.name for peer in all_peers()]
    references: dict[int, str] = {}
    for peer in chosen(options.rows):
        for what in options.faults:
            if what != "none" and what not in peer.faults:
                continue
            missing = missing_of(peer)
            say(f"{peer.name}, {what}: {missing or 'runs'}")
            # Read anew each time: another row may have been measured meanwhile.
            found = results.load(options.out / "peers.json", machine())
            row = found.row(peer.name) or Row(peer.name, "", "", "")
            row = msgspec.structs.replace(row, version=version_of(peer), keeps=peer.keeps, settings=peer.settings)
            if what == "none":
                if options.blocks:
                    row = msgspec.structs.replace(row, calm=measure_calm(peer, options.blocks, options.keep, missing))
            else:
                row = row.with_cell(measure(peer, what, options, references, missing))
            results.save(found.with_row(row, order), options.out, page)
    say("\n" + results.table(results.load(options.out / "peers.json", machine())))
    return 0


def measure(peer: Peer, fault: Any, options: argparse.Namespace, references: dict[int, str], missing: str) -> Cell:
    """All runs of one peer with one fault. A run that fails is a run, with its reason."""
    load = os.getloadavg()[0]
    runs = []
    for _ in range(options.repetitions):
        error, outcome = (missing, None) if missing else attempt(lambda: trial.run(peer, fault, options.keep))
        equal = False
        if outcome is not None:
            if peer.steps not in references:
                (references[peer.steps],) = set(undisturbed(peer.steps, options.keep))
            equal = set(outcome.digests) == {references[peer.steps]}
        runs.append(Run(None if outcome is None else outcome.recovery, equal, error))
        say(f"  {describe(runs[-1])}")
        if missing:
            break
    return Cell(fault, tuple(runs), now(), commit(), round(load, 1))


def undisturbed(steps: int, kept: Path | None) -> tuple[str, ...]:
    """The digests of plain torch; raises if it fails."""
    say(f"  plain torch, {steps} steps, to compare with")
    return trial.run(dataclasses.replace(REFERENCE, steps=steps), None, kept).digests


def measure_calm(peer: Peer, blocks: int, kept: Path | None, missing: str) -> Calm:
    load = round(os.getloadavg()[0], 1)
    error, pairs = (missing, None) if missing else attempt(lambda: trial.pair_up(peer, REFERENCE, blocks, BLOCK, kept))
    ratios, equal = pairs or ([], False)
    calm = Calm(tuple(round(ratio, 4) for ratio in ratios), equal, error, now(), load)
    say(f"  added {calm.percent} %, {'equal' if equal else 'not equal'} {error}")
    return calm


def attempt(action: Callable[[], T]) -> tuple[str, T | None]:
    """What failed, in one line, or what came out."""
    try:
        return "", action()
    except FAILURES as error:
        say(f"  {type(error).__name__}: {error}")
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return " … ".join(dict.fromkeys([lines[0], lines[-1]]))[:300] if lines else type(error).__name__, None


def describe(run: Run) -> str:
    if run.recovery is None:
        return f"FAILED: {run.error}"
    times = ", ".join(
        f"{name} {'-' if value is None else f'{value:.2f} s'}"
        for name, value in (
            ("first new step", run.recovery.new_s),
            ("goes on", run.recovery.resume_s),
            ("whole", run.recovery.whole_s),
        )
    )
    return f"{times}, {run.recovery.redone} steps redone, {'equal' if run.equal else 'NOT EQUAL'}"


def missing_of(peer: Peer) -> str:
    """Why a peer cannot run here; empty if it can."""
    if peer.package in ("flashrec", "slurm"):
        return ""
    if version_of(peer) != NOT_INSTALLED:
        return ""
    said = VENV / f"{peer.package}.said"
    lines = said.read_text().strip().splitlines() if said.exists() else []
    return (
        f"{peer.package} is {NOT_INSTALLED} in {VENV.relative_to(ROOT)}: {lines[-1] if lines else 'make bench-peers'}"
    )


def version_of(peer: Peer) -> str:
    if peer.package == "flashrec":
        return commit()
    if peer.package == "slurm":
        return str(machine()["slurm"])
    return package_version(peer.package)


def package_version(name: str) -> str:
    text = f"from importlib.metadata import version; print(version({name!r}))"
    done = subprocess.run([str(VENV / "bin/python"), "-c", text], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else NOT_INSTALLED


def machine() -> dict[str, Any]:
    # Of all its commands slurmd alone says its release where no cluster is configured.
    slurmd = shutil.which("slurmd", path=SEARCH_PATH) or "slurmd"
    slurm = subprocess.run([slurmd, "-V"], capture_output=True, text=True, check=True).stdout.split()
    return {
        "cpus": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version(),
        "torch": package_version("torch"), "slurm": slurm[-1],
    }  # fmt: skip


def chosen(words: list[str]) -> list[Peer]:
    return [peer for peer in all_peers() if not words or any(peer.name.lower().startswith(word) for word in words)]


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def say(text: str) -> None:
    print(text, flush=True)


def parse() -> argparse.Namespace:
    listed = "\n".join(f"  {peer.name}: {peer.settings}" for peer in all_peers())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description="The same training and the same faults under flashrec and under what else brings a job back.",
        epilog=f"peers:\n{listed}\n\nNeeds root (a dev cluster a run). What was measured before is kept, row by row.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", default="", help="semicolon-separated beginnings of peers' names (default: all)")
    parser.add_argument("--faults", default="process,node,none", help="none: steady overhead (default: all three)")
    parser.add_argument("--repetitions", type=int, default=1, help="runs of each peer with each fault (default 1)")
    parser.add_argument("--blocks", type=int, default=4, help=f"pairs of blocks of {BLOCK} steps without a fault")
    parser.add_argument("--out", type=Path, default=ROOT / "build/bench-peers", help="folder of peers.json, .md, .svg")
    parser.add_argument("--keep", type=Path, help="folder to leave the jobs' logs in")
    options = parser.parse_args()
    options.out = options.out.absolute()
    options.faults = [word for word in options.faults.split(",") if word]
    options.rows = [word.strip().lower() for word in options.rows.split(";") if word.strip()]
    if unknown := set(options.faults) - {"process", "node", "none"}:
        parser.error(f"--faults knows process, node and none, not {', '.join(sorted(unknown))}")
    for word in options.rows:
        if not chosen([word]):
            parser.error(f"no peer begins with {word!r}; they are: {', '.join(peer.name for peer in all_peers())}")
    if options.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; what was finished is in the results")
    except (DevClusterError, trial.DidNotFire) as error:
        sys.exit(f"bench: {error}")
