"""`make bench-detection`: rows of faults, one job a row, results after each row."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.detection import reading, results
from benchmarks.detection.job import NUM_NODES, ROOT, BenchJob, JobTrouble, commit
from benchmarks.detection.results import Injection, RowResult
from benchmarks.detection.rows import DidNotFire, Row, Struck, all_rows
from flashrec.devcluster.cluster import DevCluster
from flashrec.devcluster.errors import DevClusterError
from flashrec.devcluster.spec import ClusterSpec

KEPT, PAGE = ROOT / "benchmarks/results/detection.json", ROOT / "docs/reference/detection-measured.md"
RESUME_LIMIT_S = 120.0
AFTER_S = 1.0  # a verdict on what was mended may come late
MAX_RESTARTS = 2  # jobs that a row may wear out by itself before it is given up


def measure(job: BenchJob, row: Row, number: int) -> tuple[Injection, reading.Alarms]:
    """One injection, from a settled job to a mended one. Raises DidNotFire and JobTrouble."""
    job.await_settled()
    time.sleep(random.uniform(0.0, 1.0))  # at any moment of whatever beats
    struck = row.inject(job, number)
    try:
        if row.expects == "verdict":
            return await_sighting(job, row, struck), reading.Alarms()
        time.sleep(row.hold_s)
        job.assert_running()
        struck.check_fired()
    finally:
        struck.mend()
    time.sleep(AFTER_S)
    return Injection(struck.target, None, None), reading.alarms(job.tail.read(), struck.at)


def await_sighting(job: BenchJob, row: Row, struck: Struck) -> Injection:
    """Until training goes on, or it is clear that nobody saw anything."""
    seen = reading.Sighting(None, None, "")
    while seen.resume_s is None:
        waited_s = time.monotonic() - struck.at
        if waited_s > (row.limit_s if seen.verdict_s is None else row.limit_s + RESUME_LIMIT_S):
            break
        time.sleep(0.02)
        seen = reading.sight(job.tail.read(), struck.at, struck.is_verdict)
        if waited_s > 10:
            job.assert_running()
    struck.check_fired()
    return Injection(struck.target, seen.verdict_s, seen.resume_s, seen.reason)


def measure_row(row: Row, wanted: int, start_job: Callable[[], AbstractContextManager[BenchJob]]) -> RowResult:
    """All injections of one row. A job that breaks is replaced, and said so; a fault that does not fire ends it."""
    done: list[Injection] = []
    heard = reading.Alarms()
    errors: list[str] = []
    step_s = 0.0
    is_over = False
    while len(done) < wanted and not is_over:
        try:
            with start_job() as job:
                while len(done) < wanted:
                    one, said = measure(job, row, len(done))
                    done.append(one)
                    heard, step_s = heard.plus(said), max(step_s, job.step_s)
                    say(f"  {len(done):3}/{wanted} {one.target}: {describe(row, one, said)}")
        except (DidNotFire, JobTrouble, DevClusterError, TimeoutError) as error:
            say(f"  {type(error).__name__}: {error}")
            errors.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
            is_over = isinstance(error, DidNotFire) or len(errors) > MAX_RESTARTS
    return RowResult(
        name=row.name, expects=row.expects, aim_s=row.aim_s(step_s), injections=tuple(done), note=row.note,
        suspected=heard.suspected, refuted=heard.refuted, false_verdicts=heard.false_verdicts, error="; ".join(errors),
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), commit=commit(),
    )  # fmt: skip


def describe(row: Row, one: Injection, said: reading.Alarms) -> str:
    if row.expects == "nothing":
        wrong = f", WRONG: {'; '.join(said.false_verdicts)}" if said.false_verdicts else ""
        return f"no verdict expected; {said.suspected} suspected, {said.refuted} refuted{wrong}"
    if one.verdict_s is None:
        return "NOT SEEN"
    resumed = "training did not go on" if one.resume_s is None else f"training goes on after {one.resume_s:.2f} s"
    return f"verdict after {one.verdict_s:.3f} s, {resumed} ({one.reason})"


def heal_all(cluster: DevCluster) -> None:
    for node in cluster.status().nodes:
        if not node.is_whole:
            cluster.heal(node.name)
        if node.slurmd_pid is None and node.has_power:
            cluster.start_daemon(node.name)


def machine(cluster: DevCluster) -> dict[str, Any]:
    slurm = cluster.run(["scontrol", "--version"]).stdout.strip()
    return {"cpus": os.cpu_count(), "kernel": platform.release(), "slurm": slurm, "nodes": NUM_NODES}


def say(text: str) -> None:
    print(text, flush=True)


@contextlib.contextmanager
def bench_cluster(name: str, kept: Path | None = None) -> Iterator[tuple[DevCluster, Path]]:
    """A cluster with a fabric and a work folder; both are gone afterwards, also after Ctrl-C or SIGTERM. `kept`: where
    the work folder is made instead, and stays."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="flashrec-bench-", dir=kept))
    try:
        (work / "nvml").mkdir()
        spec = ClusterSpec(name=f"{name}-{os.getpid()}", num_nodes=NUM_NODES, slurmd_timeout_s=3600, fabric=True)
        with DevCluster.up(spec, progress=say) as cluster:
            yield cluster, work
    finally:
        if kept is None:
            shutil.rmtree(work, ignore_errors=True)


def parse() -> tuple[argparse.Namespace, list[str]]:
    names = [row.name for row in all_rows(Path("/"))]
    listed = "\n".join(f"  {name}" for name in names)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.detection",
        description="Inject faults into a training job and measure when each is seen and when training goes on.",
        epilog=f"rows:\n{listed}\n\nNeeds root (a dev cluster). 20 injections of every row take about an hour.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--injections", type=int, default=20, help="faults a row (default 20)")
    parser.add_argument("--rows", default="", help="comma-separated beginnings of row names (default: all)")
    parser.add_argument("--out", type=Path, default=KEPT, help=f"results (default {KEPT}); .md and .svg beside it")
    parser.add_argument(
        "--keep", type=Path, help="folder to leave the jobs' journals and output in, to look into misses"
    )
    options = parser.parse_args()
    wanted = [word.strip().lower() for word in options.rows.split(",") if word.strip()]
    for word in wanted:
        if not any(name.lower().startswith(word) for name in names):
            parser.error(f"no row begins with {word!r}; the rows are: {', '.join(names)}")
    if options.injections < 1:
        parser.error("--injections must be at least 1")
    return options, wanted


def main() -> int:
    options, wanted = parse()
    with bench_cluster("bench", options.keep) as (cluster, work):
        chosen = [
            row for row in all_rows(work) if not wanted or any(row.name.lower().startswith(word) for word in wanted)
        ]
        found = results.load(options.out, machine(cluster))
        for index, row in enumerate(chosen, start=1):
            say(f"row {index} of {len(chosen)}: {row.name}")
            measured = measure_row(row, options.injections, functools.partial(start_job, cluster, work, row))
            found = results.load(options.out, found.machine)  # another row may have been measured meanwhile
            found = found.with_row(measured, [known.name for known in all_rows(work)])
            publish(options.out, found)
    names = [row.name for row in chosen]
    rows = [row for row in found.rows if row.name in names]
    say("\n" + results.table(rows))
    return 0 if all(row.is_good for row in rows) else 1


def start_job(cluster: DevCluster, work: Path, row: Row) -> BenchJob:
    """A new one, on a whole cluster."""
    heal_all(cluster)
    folder = Path(tempfile.mkdtemp(prefix="job-", dir=work)) / "job"
    return BenchJob(cluster, folder, settings=row.settings, env=row.env)


def publish(path: Path, found: results.Results) -> None:
    """After each row: all three files, and the page of the documentation that shows those that are kept."""
    results.save(path, found)
    path.with_suffix(".md").write_text(results.table(found.rows))
    if path == KEPT:
        results.put_into(PAGE, results.table(found.rows))
    try:
        results.plot(found.rows, path.with_suffix(".svg"))
    except ImportError:
        say("no plot: pip install 'flashrec[bench]' (matplotlib)")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; rows that were finished are in the results")
    except DevClusterError as error:
        sys.exit(f"bench: {error}")
