"""`python -m flashrec.testing.inject PLAN.json -- train.py args...`: run a script with the faults of a plan."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from flashrec.testing.injector import Injector
from flashrec.testing.plan import KINDS, PLACES, PlanError, load_plan


def table(rows: dict[str, str]) -> str:
    return "\n".join(f"  {name:<16}{text}" for name, text in rows.items())


EPILOG = f"""\
places:
{table(PLACES)}

kinds:
{table(KINDS)}

example of a plan: rank 1 is killed half way through the optimizer step 7
  {{"directory": "/shared/faults", "faults": [
    {{"id": "a", "rank": 1, "step": 7, "place": "in-optimizer", "kind": "SIGKILL"}}]}}

example of a command
  flashrec run --spares 1 -- python -m flashrec.testing.inject plan.json -- train.py --steps 50

What has fired is in faults.jsonl of the plan's directory. `import flashrec.testing` has the driver's side.
"""


def parse_command(arguments: list[str]) -> tuple[str, list[str]]:
    """Path of the plan, and the script with its own arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m flashrec.testing.inject",
        description="Run a training script, unchanged, and let the faults of a plan hit it.",
        usage="%(prog)s PLAN.json -- train.py [ARGUMENT...]",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("plan", help="JSON file: directory, timeout_s and faults")
    own, dashes, command = arguments, "", []
    if "--" in arguments:
        own, dashes, command = arguments[: arguments.index("--")], "--", arguments[arguments.index("--") + 1 :]
    options = parser.parse_args(own)
    if not dashes or not command:
        parser.error("name the script after --, for example: plan.json -- train.py --steps 50")
    if not Path(command[0]).is_file():
        parser.error(f"there is no script {command[0]}")
    return options.plan, command


def main() -> None:
    plan_path, command = parse_command(sys.argv[1:])
    try:
        plan = load_plan(plan_path)
    except PlanError as error:
        sys.exit(f"flashrec.testing.inject: {error}")
    from flashrec.testing import places  # torch comes in here, after everything that can be refused without it

    places.install(Injector(plan))
    sys.argv = command
    sys.path[0] = str(Path(command[0]).absolute().parent)  # as `python train.py` would have it
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main()
