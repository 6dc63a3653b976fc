"""`make bench-mpi`: so many agents on the loopback interface of this machine, at rest; results after each count.

The processes are those of a job, with the same code, less the workers. One agent has a process of its own, which is
what "agent" means in the table; the others share one. The manager is measured with and without the fabric.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import secrets
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "benchmarks/results/mpi_heartbeats.json"
START_S = 600.0
SETTLE_S = 3.0
TICKS = os.sysconf("SC_CLK_TCK")


class Process:
    """One of ours; it ends when its stdin is closed."""

    def __init__(self, module: str, *words: str, secret: str) -> None:
        argv = [sys.executable, "-m", f"benchmarks.mpi_heartbeats.{module}", *words]
        self.popen = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        self.pid = self.popen.pid
        self._rest = b""
        assert self.popen.stdin is not None
        self.popen.stdin.write(secret.encode() + b"\n")
        self.popen.stdin.flush()

    def said(self, timeout_s: float) -> list[dict[str, Any]]:
        """Lines that have come, after at most `timeout_s`."""
        assert self.popen.stdout is not None
        if not select.select([self.popen.stdout], [], [], timeout_s)[0]:
            return []
        data = os.read(self.popen.stdout.fileno(), 1 << 20)
        if not data:
            raise SystemExit(f"{self.popen.args} ended")
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        assert self.popen.stdin is not None
        with contextlib.suppress(OSError):
            self.popen.stdin.close()
        try:
            self.popen.wait(30)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


class Job:
    """A manager and `count` agents, all up."""

    def __init__(self, count: int, mode: str) -> None:
        secret = secrets.token_hex(32)
        began_at = time.monotonic()
        self.verdicts: list[str] = []
        self.ended: list[str] = []  # attempts to meet that failed
        self.processes = [Process("manager", str(count), mode, secret=secret)]
        try:
            self._start(count, mode, secret, began_at)
        except BaseException:
            self.close()
            raise

    def _start(self, count: int, mode: str, secret: str, began_at: float) -> None:
        self.hub, port, up = 0, 0, 0
        manager = self.processes[0]
        while up < count:
            if time.monotonic() - began_at > START_S:
                raise SystemExit(f"{up} of {count} agents are up after {START_S:g} s")
            for line in manager.said(1.0):
                self.ended += [line["ended"]] if "ended" in line else []
                self.hub, port, up = line.get("hub", self.hub), line.get("port", port), line.get("up", up)
            if port and len(self.processes) == 1:
                for first, many in ((0, 1), (1, count - 1)):
                    words = (str(port), str(first), str(many), mode)
                    self.processes.append(Process("agents", *words, secret=secret))
        self.start_s = time.monotonic() - began_at
        time.sleep(SETTLE_S)
        manager.said(0.0)

    def roles(self) -> dict[str, list[int]]:
        """Role -> pids."""
        manager, one, others = (process.pid for process in self.processes)
        found = {"manager": [manager], "agent": [one]}
        beaters = [*_children(one), *_children(others)]
        return found | ({"hub": [self.hub], "beater": beaters} if self.hub else {})

    def look(self, duration_s: float) -> dict[str, dict[str, float]]:
        """Role -> CPU (% of one core, mean of its processes) and memory (PSS, MiB) over so many seconds."""
        roles = self.roles()
        before = {pid: _cpu_s(pid) for pids in roles.values() for pid in pids}
        began_at = time.monotonic()
        time.sleep(duration_s)
        lasted_s = time.monotonic() - began_at
        found = {}
        for role, pids in roles.items():
            cpu = [100 * (_cpu_s(pid) - before[pid]) / lasted_s for pid in pids]
            found[role] = {
                "cpu_percent": statistics.mean(cpu),
                "pss_mib": statistics.mean(_pss_mib(p) for p in pids[:20]),
            }
        for line in self.processes[0].said(0.0):
            self.verdicts += line.get("verdicts", [])
        return found

    def close(self) -> None:
        for process in reversed(self.processes):
            process.close()


@contextlib.contextmanager
def job(count: int, mode: str) -> Iterator[Job]:
    made = Job(count, mode)
    try:
        yield made
    finally:
        made.close()


def measure(count: int, runs: int, duration_s: float) -> dict[str, Any]:
    """Medians over `runs` looks at one job with the fabric, and the manager's without."""
    with job(count, "off") as bare:
        plain = [bare.look(duration_s) for _ in range(runs)]
    with job(count, "auto") as made:
        looks = [made.look(duration_s) for _ in range(runs)]
        start_s, verdicts, failed = made.start_s, made.verdicts, made.ended
    row: dict[str, Any] = {"agents": count, "start_s": round(start_s, 1), "failed": failed}
    row["suspected"] = sum(" suspect: " in verdict for verdict in verdicts)
    row["dead"] = [verdict for verdict in verdicts if " dead: " in verdict]
    for role in ("hub", "beater", "manager", "agent"):
        row[role] = _medians([look[role] for look in looks])
    for role in ("manager", "agent"):
        row[f"{role}_without"] = _medians([look[role] for look in plain])
    return row


def _medians(looks: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(look[key] for look in looks), 3) for key in looks[0]}


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _cpu_s(pid: int) -> float:
    """User and system time, from the scheduler where it counts in nanoseconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except OSError:
        return (int(fields[11]) + int(fields[12])) / TICKS


def _pss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """CPU against the number of agents. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    counts = [row["agents"] for row in rows]
    for role in ("hub", "manager", "manager_without", "beater", "agent"):
        axes.plot(counts, [row[role]["cpu_percent"] for row in rows], marker="o", label=role.replace("_", " "))
    axes.set(xlabel="agents", ylabel="CPU, % of one core", xscale="log", yscale="log")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-mpi", description=__doc__)
    parser.add_argument("--agents", type=int, nargs="+", default=[8, 100, 300], help="counts (30 MiB each)")
    parser.add_argument("--runs", type=int, default=5, help="looks per count, of which the median is taken")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of one look")
    parser.add_argument("--out", type=Path, default=KEPT)
    args = parser.parse_args()
    known = {row["agents"]: row for row in json.loads(args.out.read_text())["rows"]} if args.out.exists() else {}
    for count in args.agents:
        row = measure(count, args.runs, args.seconds)
        print(json.dumps(row), flush=True)
        known[count] = row | {
            "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "runs": args.runs,
            "seconds": args.seconds, "load": round(os.getloadavg()[0], 1), "cpus": os.cpu_count(),
            "python": platform.python_version(),
        }  # fmt: skip
        args.out.parent.mkdir(exist_ok=True)
        args.out.write_text(json.dumps({"rows": [known[key] for key in sorted(known)]}, indent=1) + "\n")
        try:
            plot([known[key] for key in sorted(known)], args.out.with_suffix(".svg"))
        except ImportError:
            print("no plot: pip install 'flashrec[bench]' (matplotlib)", file=sys.stderr)


if __name__ == "__main__":
    main()
