"""`make bench-recovery`: one job a tier, hit again and again; the phases are those of `flashrec report`."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.detection.__main__ import bench_cluster, heal_all, machine, say
from benchmarks.detection.job import BenchJob, JobTrouble, commit
from benchmarks.detection.rows import DidNotFire, Struck, cut_power, drain, ordered
from benchmarks.recovery import results
from benchmarks.recovery.results import Measured, Results, Row
from flashrec.devcluster.cluster import DevCluster
from flashrec.devcluster.errors import DevClusterError
from flashrec.report.records import FaultLine, read_journal
from flashrec.report.timeline import Recovery, build_timeline

TIERS = {
    "warm": ("hot.park=none",),
    "hot": ("hot.park=imports", "hot.after_s=0.1"),
    "hot, script": ("hot.park=script", "hot.after_s=0.1"),
}
PLANNED = "planned swap"  # training goes on until it pauses: the time counts from there
FAULTS = {
    "exception": ordered("raise"),
    "SIGKILL": ordered("SIGKILL"),
    "SIGSTOP": ordered("SIGSTOP"),
    "power cut": cut_power,
    PLANNED: drain,
}
LIMIT_S = 120.0
PARKED_LIMIT_S = 120.0


class Parked:
    """Whether every node of a job has parked what it is to have, by the job's status."""

    def __init__(self, job: BenchJob, is_wanted: bool) -> None:
        self._job, self._is_wanted = job, is_wanted

    def wait(self) -> None:
        if self._is_wanted:
            self._job.wait_for(self._is_complete, "every node to have its parked process", PARKED_LIMIT_S)

    def _is_complete(self) -> bool:
        time.sleep(0.1)
        nodes = self._job.status()["nodes"]
        return all(node.get("parked", 0) >= 1 for node in nodes if node["state"] == "alive")


def measure(job: BenchJob, parked: Parked, fault: str, number: int) -> Measured:
    """One fault, from a settled job to a mended one. Raises DidNotFire, JobTrouble."""
    job.await_settled()
    parked.wait()
    time.sleep(random.uniform(0.0, 0.5))  # at any moment of whatever beats
    struck = FAULTS[fault](job, number)
    try:
        found = await_recovery(job, struck, is_planned=fault == PLANNED)
        struck.check_fired()
    finally:
        struck.mend()
    return found


def await_recovery(job: BenchJob, struck: Struck, *, is_planned: bool) -> Measured:
    """Until the last rank has done its first new step. Raises JobTrouble if there is none."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        time.sleep(0.05)
        job.assert_running()
        recovery = recovery_since(job, struck)
        if recovery is not None and recovery.rto_s is not None:
            if is_planned:
                recovery = without_detection(recovery)
            return Measured(
                struck.target, recovery.rto_s, dict(recovery.durations), results.parts(job.tail.read(), struck.at)
            )
    raise JobTrouble(f"no new step within {LIMIT_S:g} s of the fault on {struck.target}\n{job.output()}")


def without_detection(recovery: Recovery) -> Recovery:
    assert recovery.rto_s is not None
    phases = recovery.durations | {"detect": None}
    pause_s = recovery.rto_s - (recovery.durations["detect"] or 0.0)
    return msgspec.structs.replace(recovery, rto_s=pause_s, durations=phases)


def recovery_since(job: BenchJob, struck: Struck) -> Recovery | None:
    """The report's view of what follows the fault."""
    content = job.journal_path.read_bytes()
    journal = read_journal(content)
    wall = datetime.datetime.now(datetime.UTC).isoformat()
    fault = FaultLine("struck", "", "", 0, struck.target, struck.at, wall)
    for recovery in build_timeline(journal, (fault,)).recoveries:
        if recovery.faults:
            return recovery
    return None


@contextlib.contextmanager
def tier_job(cluster: DevCluster, work: Path, tier: str) -> Iterator[BenchJob]:
    heal_all(cluster)
    folder = Path(tempfile.mkdtemp(prefix="job-", dir=work)) / "job"
    with BenchJob(cluster, folder, settings=TIERS[tier]) as job:
        yield job


def measure_tier(cluster: DevCluster, work: Path, tier: str, faults: list[str], runs: int) -> Iterator[Row]:
    """One row after each recovery, with that run or the error. Faults take turns, so that a busy moment of the machine
    does not hit one of them only."""
    broken = set()
    with tier_job(cluster, work, tier) as job:
        parked = Parked(job, tier != "warm")
        for number in range(runs):
            for fault in faults:
                if fault in broken:
                    continue
                row = Row(fault, tier, [], "", f"{datetime.date.today():%Y-%m-%d}", commit())
                try:
                    row.runs = [measure(job, parked, fault, number)]
                    say(f"  {tier}: {fault}: {results.describe(row.runs[0])}")
                except (DidNotFire, TimeoutError) as error:
                    row.error = str(error).splitlines()[0]
                    broken.add(fault)
                    say(f"  {tier}: {fault}: {error}")
                yield row


def gather(measured: Iterator[Row], rows: list[Row]) -> None:
    """Put runs of the same fault and tier together in `rows`, as they come."""
    for row in measured:
        same = next((known for known in rows if (known.fault, known.tier) == (row.fault, row.tier)), None)
        if same is None:
            rows.append(row)
        else:
            same.runs, same.error = [*same.runs, *row.runs], row.error


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery",
        description=__doc__,
        epilog=f"tiers: {'; '.join(TIERS)}\nfaults: {'; '.join(FAULTS)}\n\nNeeds root (a dev cluster).",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=3, help="of each fault in each tier (default 3: 8 to 10 minutes)")
    parser.add_argument("--full", action="store_true", help="10 runs")
    parser.add_argument("--add", action="store_true", help="add the runs to those in the results")
    parser.add_argument("--tiers", default="", help="some of them, with ; between")
    parser.add_argument("--faults", default="", help="some of them, with ; between")
    parser.add_argument("--no-write", dest="write", action="store_false", help="leave results and page as they are")
    parser.add_argument("--keep", type=Path, help="folder to leave the jobs' journals and output in")
    options = parser.parse_args()
    for name, known in (("tiers", TIERS), ("faults", FAULTS)):
        chosen = [word.strip() for word in getattr(options, name).split(";") if word.strip()] or list(known)
        if unknown := set(chosen) - set(known):
            parser.error(f"--{name}: {', '.join(sorted(unknown))} is none of {'; '.join(known)}")
        setattr(options, name, chosen)
    return options


def main() -> int:
    options = parse()
    runs = 10 if options.full else options.runs
    rows: list[Row] = []
    began = time.monotonic()
    with bench_cluster("recovery", options.keep) as (cluster, work):
        versions = {"python": sys.version.split()[0], "torch": importlib.metadata.version("torch")}
        here = machine(cluster) | versions
        try:
            for tier in options.tiers:
                try:
                    gather(measure_tier(cluster, work, tier, options.faults, runs), rows)
                except (JobTrouble, DevClusterError) as error:
                    say(f"{tier}: {error}")
                    rows += [Row(fault, tier, [], str(error).splitlines()[0]) for fault in options.faults]
        finally:  # also after Ctrl-C: what was measured was measured
            if options.write and rows:
                known = results.load(here)
                new = results.added(rows, known.rows) if options.add else rows
                results.save(known.with_rows(new, list(itertools.product(FAULTS, TIERS))))
    say(f"\n{time.monotonic() - began:.0f} s\n{results.table(Results(here, rows))}")
    return 1 if any(row.error for row in rows) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; what was measured is in the results")
    except DevClusterError as error:
        sys.exit(f"bench: {error}")
