"""The main job, for real: a Slurm job loses a node and goes on.

Starts a Slurm cluster on this machine (4 active nodes and 1 spare, 2 ranks a node), submits the template twice: once
undisturbed, once with the power of a node cut while a rank on it is blocked in a collective. Shows the job's output
live, prints the report of the recovery, and compares both runs bit by bit. Exit code 0 only if the job recovered, in
the same allocation, with the loss of every step and the final parameters identical.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from flashrec.devcluster.cluster import DevCluster
from flashrec.devcluster.errors import DevClusterError
from flashrec.devcluster.spec import ClusterSpec
from flashrec.testing import Fault, FaultDirectory, FaultPlan
from flashrec.testing.jobs import FINAL_STATES, SubmittedJob, path_with

ROOT = Path(__file__).resolve().parents[2]
TRAIN, COMPARE = ROOT / "examples/gpt/train.py", ROOT / "examples/gpt/compare.py"
TEMPLATE = ROOT / "sbatch_templates/ddp.sbatch"
NUM_NODES, RANKS_PER_NODE = 5, 2


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


def submit(cluster: DevCluster, folder: Path, python_args: list[str]) -> SubmittedJob:
    """Submit the template, with `python` being the one that runs this demo."""
    path = path_with(Path(sys.executable).parent)
    return SubmittedJob(cluster.run, folder, [str(TEMPLATE), *python_args], {"PATH": path})


def show(line: str) -> None:
    """One line of the job's output."""
    print(f"  | {line}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--node", type=int, default=1, help="k-th node of the allocation loses power (default 1: rank 0)"
    )
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default 60)")
    parser.add_argument("--at-step", type=int, default=25, help="the power goes in this step (default 25)")
    parser.add_argument("--name", default="demo", help="name of the dev cluster and of the work folder (default demo)")
    parser.add_argument("--keep", action="store_true", help="leave the cluster up afterwards")
    options = parser.parse_args()
    if not 1 <= options.node < NUM_NODES:
        parser.error(
            f"NODE={options.node}: choose an active node, 1 to {NUM_NODES - 1}. Node 0 is the batch host: the manager "
            "runs there, and in this version the job does not outlive it"
        )
    work = ROOT / ".demo" / options.name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        cluster = DevCluster.up(ClusterSpec(name=options.name, num_nodes=NUM_NODES), progress=_step)
    except DevClusterError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    try:
        figures, is_good = demo(cluster, work, options.node, options.steps, options.at_step)
    except (DemoError, DevClusterError, TimeoutError, RuntimeError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    finally:
        if not options.keep:
            cluster.down()
            _step("cluster is down, nothing is left behind")
    _step(figures)
    return 0 if is_good else 1


def demo(cluster: DevCluster, work: Path, node: int, steps: int, at_step: int) -> tuple[str, bool]:
    """Both jobs, the power cut, the report and the comparison. Returns what `conclude` does."""
    _step(f"job 1 of 2: {steps} steps undisturbed, for comparison")
    calm_out, hit_out = work / "undisturbed", work / "hit"
    calm = submit(cluster, work / "job-undisturbed", [str(TRAIN), "--steps", str(steps), "--out", str(calm_out)])
    calm.wait(600, show)
    if calm.exit_code() != 0:
        raise DemoError(f"the undisturbed job ended with exit code {calm.exit_code()}")

    victim = f"n{node}"
    rank = (node - 1) * RANKS_PER_NODE
    holder = (rank + RANKS_PER_NODE) % ((NUM_NODES - 1) * RANKS_PER_NODE)
    faults = FaultDirectory(work / "faults")
    fault = Fault("power-cut", rank, "in-collective", "request", step=at_step, holder=holder)
    plan = faults.write_plan(FaultPlan(str(faults.path), (fault,)))
    _step(f"job 2 of 2: the same, and node {victim} (rank {rank}) loses power in step {at_step}")
    inject = ["-m", "flashrec.testing.inject", str(plan), "--"]
    hit = submit(cluster, work / "job-hit", [*inject, str(TRAIN), "--steps", str(steps), "--out", str(hit_out)])
    while not (faults.path / "power-cut.armed").exists():
        for line in hit.new_output():
            show(line)
        if hit.state() in FINAL_STATES:
            raise DemoError(f"job {hit.id} ended before the fault; see {hit.folder}")
        time.sleep(0.1)
    armed = faults.await_armed("power-cut", 1)
    if armed.node != victim:
        raise DemoError(f"rank {rank} is on {armed.node}, not on {victim}")
    cut_at = cluster.cut_power(victim)
    faults.mark_fired("power-cut", cut_at)
    _step(f"power of {victim} is cut: rank {rank} was blocked in an all-reduce of step {at_step}")
    hit.wait(600, show)
    _step(f"job {hit.id} ended with exit code {hit.exit_code()}")
    shutil.copy(faults.path / "faults.jsonl", hit.job_dir / "faults.jsonl")
    return conclude(hit, calm_out, hit_out)


def conclude(hit: SubmittedJob, calm_out: Path, hit_out: Path) -> tuple[str, bool]:
    """Report and comparison. Returns the line that says it all, and whether all is as promised."""
    flashrec = [sys.executable, "-m", "flashrec.cli.main"]
    subprocess.run([*flashrec, "report", str(hit.job_dir), "--html", str(hit.job_dir / "report.html")], check=False)
    print(flush=True)
    subprocess.run([*flashrec, "report", str(hit.job_dir)], check=False)
    done = subprocess.run(
        [*flashrec, "report", str(hit.job_dir), "--json"], capture_output=True, text=True, check=False
    )
    identical = subprocess.run([sys.executable, str(COMPARE), str(calm_out), str(hit_out)], check=False).returncode == 0
    recoveries = json.loads(done.stdout)["recoveries"] if done.returncode == 0 else []
    one = recoveries[0] if len(recoveries) == 1 else {}
    phases = one.get("durations", {})
    recovered = hit.exit_code() == 0 and bool(one)
    finals = [json.loads(path.read_text()) for path in hit_out.glob("final-*.json")]
    same_job = bool(finals) and {final["job_id"] for final in finals} == {str(hit.id)}
    redone = one.get("steps_redone")
    figures = " ".join(
        f"{name}_s={_figure(phases.get(name))}" for name in ("detect", "fence", "launch", "form", "restore")
    )
    line = (
        f"recovered={_yes(recovered)} identical={_yes(identical)} same_job={_yes(same_job)} "
        f"steps_redone={redone if redone is not None else 'unknown'} rto_s={_figure(one.get('rto_s'))} {figures}"
    )
    return line, recovered and identical and same_job and redone in (0, 1)


def _step(text: str) -> None:
    print(f"demo: {text}", flush=True)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    sys.exit(main())
