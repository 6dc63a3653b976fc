"""`python -m flashrec.testing.inject` refuses what cannot work in a sentence, and otherwise is as good as `python`."""

import json
import subprocess
import sys

import pytest

from flashrec.testing import Fault, FaultDirectory, FaultPlan


def inject(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "flashrec.testing.inject", *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


@pytest.fixture
def script(tmp_path):
    (tmp_path / "beside.py").write_text("word = 'found'")
    path = tmp_path / "train.py"
    path.write_text(
        "import json, sys, beside, flashrec, torch\n"
        "flashrec.init()\n"
        "print(json.dumps([__name__, sys.argv, sys.path[0], beside.word]))\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "session = flashrec.Session(model, optimizer)\n"
        "for step in session.steps(4):\n"
        "    with step:\n"
        "        print('step', int(step), flush=True)\n"
        "        model(torch.ones(2)).sum().backward()\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
    )
    return path


def test_help_teaches_places_and_kinds():
    text = inject("--help").stdout
    for word in ("in-collective", "before-vote", "SIGSTOP", "request", "plan.json"):
        assert word in text


def test_script_must_come_after_dashes(tmp_path):
    done = inject(tmp_path / "plan.json")
    assert (done.returncode, "name the script after --" in done.stderr) == (2, True)


def test_missing_script_is_named(tmp_path):
    done = inject(tmp_path / "plan.json", "--", "/nowhere/train.py")
    assert (done.returncode, "no script /nowhere/train.py" in done.stderr) == (2, True)


def test_bad_plan_is_refused_before_the_script_starts(tmp_path, script):
    (tmp_path / "plan.json").write_text("{")
    done = inject(tmp_path / "plan.json", "--", script)
    assert done.returncode == 1
    assert done.stderr.startswith("flashrec.testing.inject: ") and "plan.json" in done.stderr
    assert done.stdout == ""


def test_driver_side_needs_no_torch():
    code = "import sys, flashrec.testing, flashrec.testing.injector; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.torch
def test_script_runs_as_with_python(tmp_path, script):
    plan = FaultDirectory(tmp_path / "faults").write_plan(FaultPlan(str(tmp_path / "faults"), ()))
    done = inject(plan, "--", script, "--steps", "3")
    assert done.returncode == 0, done.stderr
    name, argv, path, word = json.loads(done.stdout.splitlines()[0])
    assert (name, argv, path, word) == ("__main__", [str(script), "--steps", "3"], str(tmp_path), "found")
    assert done.stdout.splitlines()[1:] == [f"step {step}" for step in range(4)]


@pytest.mark.torch
def test_step_is_the_one_of_the_session(tmp_path, script):
    plan = FaultPlan(str(tmp_path / "faults"), (Fault("it", rank=0, step=2, place="before-vote", kind="exit"),))
    done = inject(FaultDirectory(tmp_path / "faults").write_plan(plan), "--", script)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "step 2"
    FaultDirectory(tmp_path / "faults").assert_all_fired(plan)


@pytest.mark.torch
def test_replacement_is_hit_when_it_joins(tmp_path, script):
    plan = FaultPlan(str(tmp_path / "faults"), (Fault("it", rank=0, place="join", kind="exit"),))
    path = FaultDirectory(tmp_path / "faults").write_plan(plan)
    assert inject(path, "--", script).returncode == 0
    second = inject(path, "--", script)
    assert (second.returncode, "step" in second.stdout) == (1, False)
