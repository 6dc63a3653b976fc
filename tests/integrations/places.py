"""Every place of a step in which a rank of an example can be lost, on forked workers: cheap, and no node is lost.

    python -m tests.integrations.places lightning [--steps 3,7 --ranks 0,1]

The jobs of test_node_loss are whole ones; this is for who changes an integration. Frameworks are loaded once, in the
fork server. Prints one line for each cell and exits with 1 if the numbers of one are not those of the undisturbed run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.runtime import support
from tests.runtime.support import Cluster

ROOT = Path(__file__).resolve().parents[2]
COMPARE = ROOT / "examples/gpt/compare.py"
PLACES = ("forward", "backward", "before-vote", "in-optimizer", "after-optimizer")
NEEDS = {"ddp": (), "hsdp": (), "accelerate": ("accelerate", "transformers.models.gpt2"), "lightning": ("lightning",)}
ARGUMENTS = {"lightning": ["--samples", "128", "--epochs", "3", "--nodes", "1", "--devices", "2"]}

if name := os.environ.get("PRELOADED_EXAMPLE"):  # in the fork server
    import flashrec.runtime.api
    import flashrec.testing.places  # noqa: F401

    for needed in NEEDS[name]:
        importlib.import_module(needed)


def train(out: str, name: str, folder: str, plan: str) -> None:
    """The program of one worker."""
    from flashrec.testing import places
    from flashrec.testing.injector import Injector
    from flashrec.testing.plan import load_plan
    from tests.integrations import observe

    if plan:
        places.install(Injector(load_plan(plan), rank=int(os.environ["RANK"])))
    sys.argv = ["observe", folder, str(ROOT / f"examples/{name}/train.py"), *ARGUMENTS.get(name, ["--steps", "9"])]
    observe.main()


def run(name: str, path: Path, fault: dict[str, object] | None) -> Path:
    """Folder of what the ranks have left."""
    from flashrec.testing import Fault, FaultDirectory, FaultPlan

    cluster = Cluster(path, 4 if name == "hsdp" else 2)
    plan = ""
    if fault:
        directory = FaultDirectory(path / "faults")
        plan = str(directory.write_plan(FaultPlan(str(directory.path), (Fault(id="a", kind="SIGKILL", **fault),))))  # type: ignore[arg-type]
    config = {"name": name, "folder": str(path / "out"), "plan": plan}
    try:
        cluster.start_all(train, **config)
        if fault:
            victim = int(str(fault["rank"]))
            assert cluster.await_exit(victim) == -9, cluster.logs()
            cluster.replace(victim, program=train, **config)
        cluster.await_end()
    finally:
        cluster.close()
    return path / "out"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=NEEDS)
    parser.add_argument("--places", default=",".join(PLACES))
    parser.add_argument("--steps", default="3,7")
    parser.add_argument("--ranks", default="0,1")
    options = parser.parse_args()
    os.environ["PRELOADED_EXAMPLE"] = options.name
    support.PRELOAD.append("tests.integrations.places")
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        wanted = run(options.name, Path(folder) / "undisturbed", None)
        for place in options.places.split(","):
            for step in map(int, options.steps.split(",")):
                for rank in map(int, options.ranks.split(",")):
                    path = Path(folder) / f"{place}-{step}-{rank}"
                    try:
                        out = run(options.name, path, {"place": place, "step": step, "rank": rank})
                        command = [sys.executable, str(COMPARE), str(wanted), str(out)]
                        done = subprocess.run(command, capture_output=True, text=True, check=False)
                        said = (done.stdout + done.stderr).strip()
                    except AssertionError as err:
                        said = str(err)
                    wrong += said != "identical: yes"
                    print(f"{options.name} {place} of step {step}, rank {rank}: {said}", flush=True)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
