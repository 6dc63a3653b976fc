"""`make bench-false-positives`: a job on a bad network and a busy machine, where nothing fails and nothing may be said.

At the same time: every core is busy, the packets of every node but the manager's are late by 50 ± 50 ms and 1 % of them
are lost, and now and then an agent is stopped for less than the threshold. Suspicions that are taken back are how it
should be; a verdict or a recovery is a false alarm, and any makes the exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.detection import reading
from benchmarks.detection.__main__ import bench_cluster, machine, say
from benchmarks.detection.job import ROOT, BenchJob, JobTrouble, commit
from flashrec.devcluster.cluster import DevCluster
from flashrec.devcluster.errors import DevClusterError

SAY_INTERVAL_S = 15.0
SLURMD_PORT = 6818
CONNECT = "import socket, sys, time; b = time.monotonic(); socket.create_connection((sys.argv[1], int(sys.argv[2])), 30); print(time.monotonic() - b)"  # noqa: E501
BUSY = "while True: pass"


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """One endless loop a core; they end with us, however we end."""
    argv = ["setpriv", "--pdeathsig", "KILL", "--", sys.executable, "-I", "-S", "-c", BUSY]
    loops = [subprocess.Popen(argv) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


class Machine:
    """How busy the CPUs were since the last look, from /proc/stat."""

    def __init__(self) -> None:
        self._last = self._read()

    def busy_share(self) -> float:
        before, self._last = self._last, self._read()
        idle, total = (now - then for now, then in zip(self._last, before, strict=True))
        return 1.0 - idle / max(1, total)

    @staticmethod
    def _read() -> tuple[int, int]:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return ticks[3] + ticks[4], sum(ticks)


def stop_an_agent(job: BenchJob, nodes: list[str], stop_s: float) -> str:
    """SIGSTOP, `stop_s`, SIGCONT; the node."""
    node = random.choice(nodes)
    pid = job.agent_pid(node)
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(stop_s)
    finally:
        os.kill(pid, signal.SIGCONT)
    return node


def round_trip_s(cluster: DevCluster, here: str, node: str) -> float:
    """How long it takes to connect: what the delay really is."""
    done = cluster.run([sys.executable, "-I", "-S", "-c", CONNECT, node, str(SLURMD_PORT)], node=here, cwd="/")
    return float(done.stdout)


def watch(cluster: DevCluster, job: BenchJob, options: argparse.Namespace) -> dict[str, Any]:
    """The quiet time itself, then what was said in it."""
    here = job.batch_host()
    others = [node for node in cluster.nodes if node != here]
    for node in others:
        cluster.delay(node, options.delay_ms, options.jitter_ms, options.loss)
    began, load, trips, stops = time.monotonic(), Machine(), [], 0
    first_step = job.status()["step"]
    said_at = began
    busiest: list[float] = []
    while time.monotonic() < began + 60 * options.minutes:
        if options.stop_s:
            stop_an_agent(job, list(cluster.nodes), options.stop_s)
            stops += 1
        time.sleep(random.uniform(2.0, 8.0))
        trips.append(round_trip_s(cluster, here, random.choice(others)))
        job.assert_running()
        if time.monotonic() > said_at + SAY_INTERVAL_S:
            said_at = time.monotonic()
            busiest.append(load.busy_share())
            heard = reading.alarms(job.tail.read(), began)
            say(
                f"  {(said_at - began) / 60:5.1f} min: step {job.status()['step']}, CPUs {busiest[-1]:.0%} busy,"
                f" a connection takes {statistics.median(trips):.3f} s (median), agents stopped {stops} times;"
                f" {heard.suspected} suspected, {heard.refuted} refuted, {len(heard.false_verdicts)} verdicts"
            )
    heard = reading.alarms(job.tail.read(), began)
    return {
        "minutes": options.minutes,
        "steps": (job.status()["step"] or first_step) - first_step,  # None while a worker starts, after a false alarm
        "cpus_busy": statistics.mean(busiest or [load.busy_share()]),
        "connect_median_s": statistics.median(trips),
        "agents_stopped": stops,
        "stop_s": options.stop_s,
        "delay_ms": [options.delay_ms, options.jitter_ms],
        "loss_percent": options.loss,
        "suspected": heard.suspected,
        "refuted": heard.refuted,
        "false_verdicts": list(heard.false_verdicts),
    }


def why_nothing_was_measured(found: dict[str, Any]) -> str:
    """'' if the load, the delay and the stops really were there."""
    if found["cpus_busy"] < 0.9:
        return f"the CPUs were only {found['cpus_busy']:.0%} busy"
    if found["connect_median_s"] < found["delay_ms"][0] / 1000:
        return f"a connection took {found['connect_median_s']:.3f} s: the network was not slow"
    if found["stop_s"] and not found["agents_stopped"]:
        return "no agent was stopped"
    return "" if found["steps"] > 0 else "the job did no step"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.detection.quiet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default 30)")
    parser.add_argument("--delay-ms", type=float, default=50.0)
    parser.add_argument("--jitter-ms", type=float, default=50.0)
    parser.add_argument("--loss", type=float, default=1.0, help="percent of the packets (default 1)")
    parser.add_argument("--stop-s", type=float, default=1.0, help="how long an agent is stopped; 0: never (default 1)")
    parser.add_argument("--busy", type=int, default=os.cpu_count() or 1, help="endless loops (default: one a core)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/false-positives.json")
    return parser.parse_args()


def main() -> int:
    options = parse()
    with bench_cluster("quiet") as (cluster, work), BenchJob(cluster, work / "job") as job:
        job.await_settled()
        say(f"the job trains; {options.minutes:g} minutes of a busy machine and a bad network begin")
        with busy_cores(options.busy):
            found = watch(cluster, job, options)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        found |= {"machine": machine(cluster), "measured_at": now, "commit": commit()}
    found["error"] = why_nothing_was_measured(found)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    say(json.dumps(found, indent=1))
    return 1 if found["error"] or found["false_verdicts"] else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except (DevClusterError, JobTrouble, TimeoutError) as error:
        sys.exit(f"quiet: {error}")
