"""Each place is where its name says: shown by what the parameters, gradients and module calls are when it hits."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashrec.testing import Fault, FaultDirectory, FaultPlan

pytestmark = pytest.mark.torch

# Runs a script as `inject` does, without a Session: steps are counted by the optimizer.
RUNNER = """
import os, runpy, sys
from flashrec.testing.injector import Injector
from flashrec.testing.places import Places
from flashrec.testing.plan import load_plan
plan, script, *sys.argv[1:] = sys.argv[1:]
Places(Injector(load_plan(plan), int(os.environ.get("RANK", "0")))).install(None)
runpy.run_path(script, run_name="__main__")
"""

# Trains 4 layers for 5 steps; when the fault raises, tells what had been done by then.
OBSERVER = """
import json, sys, torch
from torch import nn
from flashrec.testing.injector import FaultRaised
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
calls = []
for layer in model:
    layer.register_forward_hook(lambda *_: calls.append(1))
optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.1)
votes = []
optimizer.register_step_pre_hook(lambda *_: votes.append(1))    # where the runtime has its vote
for step in range(5):
    before = [p.detach().clone() for p in model.parameters()]
    calls.clear(), votes.clear()
    try:
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
    except FaultRaised:
        parameters = list(model.parameters())
        print(json.dumps(dict(
            step=step, calls=len(calls), votes=len(votes), parameters=len(parameters),
            gradients=sum(p.grad is not None for p in parameters),
            changed=sum(not torch.equal(p, b) for p, b in zip(parameters, before)),
        )))
        break
    optimizer.zero_grad()
else:
    print(json.dumps([p.tolist() for p in model.parameters()]))
"""


def run_script(tmp_path: Path, script: str, plan: FaultPlan, **options) -> subprocess.Popen:
    faults = FaultDirectory(plan.directory)
    (tmp_path / "runner.py").write_text(RUNNER)
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, tmp_path / "runner.py", faults.write_plan(plan), tmp_path / "script.py"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def observe(tmp_path: Path, *faults: Fault, optimizer: str = "AdamW"):
    plan = FaultPlan(str(tmp_path / "faults"), faults, timeout_s=20)
    process = run_script(tmp_path, OBSERVER.replace("{optimizer}", optimizer), plan)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    FaultDirectory(plan.directory).assert_all_fired(plan)
    return json.loads(output)


def raised_at(place: str) -> Fault:
    return Fault("it", rank=0, step=3, place=place, kind="raise")


def test_forward_is_in_the_middle_of_the_module_calls(tmp_path):
    seen = observe(tmp_path, raised_at("forward"))
    assert (seen["step"], seen["gradients"], seen["changed"]) == (3, 0, 0)
    assert 0 < seen["calls"] < 4


def test_backward_has_some_gradients(tmp_path):
    seen = observe(tmp_path, raised_at("backward"))
    assert (seen["step"], seen["calls"], seen["changed"], seen["votes"]) == (3, 4, 0, 0)
    assert 0 < seen["gradients"] < seen["parameters"]


def test_before_vote_has_all_gradients_no_vote_and_no_change(tmp_path):
    seen = observe(tmp_path, raised_at("before-vote"))
    assert (seen["step"], seen["gradients"], seen["votes"], seen["changed"]) == (3, 8, 0, 0)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_in_optimizer_has_voted_and_changed_some_parameters(tmp_path, optimizer):
    seen = observe(tmp_path, raised_at("in-optimizer"), optimizer=optimizer)
    assert (seen["step"], seen["gradients"], seen["votes"]) == (3, 8, 1)
    assert 0 < seen["changed"] < seen["parameters"]


def test_after_optimizer_has_changed_all_parameters(tmp_path):
    seen = observe(tmp_path, raised_at("after-optimizer"))
    assert (seen["step"], seen["votes"], seen["changed"]) == (3, 1, 8)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return observe(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("place", ["forward", "backward", "before-vote", "in-optimizer", "after-optimizer"])
def test_victim_that_lives_on_computes_the_same(tmp_path, undisturbed, place):
    plan = FaultPlan(str(tmp_path / "faults"), (Fault("it", rank=0, step=3, place=place, kind="request"),), 20)
    process = run_script(tmp_path, OBSERVER.replace("{optimizer}", "AdamW"), plan)
    armed = FaultDirectory(plan.directory).await_armed("it", timeout_s=30)
    assert (armed.rank, armed.step, armed.place, armed.pid) == (0, 3, place, process.pid)
    assert process.poll() is None
    FaultDirectory(plan.directory).mark_fired("it", time.monotonic())
    output, errors = process.communicate(timeout=60)
    assert json.loads(output) == undisturbed, errors


@pytest.mark.parametrize("kind", ["SIGKILL", "SIGSEGV"])
def test_signal_ends_the_process(tmp_path, kind):
    plan = FaultPlan(str(tmp_path / "faults"), (Fault("it", rank=0, step=2, place="backward", kind=kind),))
    process = run_script(tmp_path, OBSERVER.replace("{optimizer}", "SGD"), plan)
    process.communicate(timeout=60)
    assert process.returncode == -signal.Signals[kind]
    FaultDirectory(plan.directory).assert_all_fired(plan)


def test_exit_ends_the_process_without_a_word(tmp_path):
    plan = FaultPlan(str(tmp_path / "faults"), (Fault("it", rank=0, step=2, place="forward", kind="exit"),))
    process = run_script(tmp_path, OBSERVER.replace("{optimizer}", "SGD"), plan)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 1


def test_stopped_process_stands_still(tmp_path):
    plan = FaultPlan(str(tmp_path / "faults"), (Fault("it", rank=0, step=2, place="forward", kind="SIGSTOP"),))
    process = run_script(tmp_path, OBSERVER.replace("{optimizer}", "SGD"), plan)
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP
        assert "it" in FaultDirectory(plan.directory).fired()
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert process.communicate(timeout=60)[0]


DDP = """
import json, os, sys, torch, torch.distributed as dist
from torch import nn
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(os.environ["RANK"]), world_size=2)
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for step in range(5):
    model(torch.ones(2, 64)).square().mean().backward()
    print("reduced", step, flush=True)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("kind", ["SIGKILL", "request"])
def test_in_collective_hits_a_victim_that_waits_for_the_holder(tmp_path, kind):
    fault = Fault("it", rank=0, step=3, place="in-collective", kind=kind, holder=1)
    plan = FaultPlan(str(tmp_path / "faults"), (fault,), timeout_s=30)
    faults = FaultDirectory(plan.directory)
    (tmp_path / "runner.py").write_text(RUNNER)
    (tmp_path / "script.py").write_text(DDP)
    command = [
        sys.executable,
        tmp_path / "runner.py",
        faults.write_plan(plan),
        tmp_path / "script.py",
        tmp_path / "meet",
    ]
    victim, holder = (
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | {"RANK": rank}
        )
        for rank in "01"
    )
    try:
        if kind == "request":
            assert faults.await_armed("it", timeout_s=30).step == 3
            assert (victim.poll(), holder.poll()) == (None, None)
            stat = Path(f"/proc/{victim.pid}/stat").read_text()
            assert stat.rpartition(")")[2].split()[0] == "S"
            victim.kill()
            faults.mark_fired("it", time.monotonic())
        output, _ = victim.communicate(timeout=60)
        assert victim.returncode == -signal.SIGKILL
        assert output.split() == ["reduced", "0", "reduced", "1", "reduced", "2"]
        assert holder.communicate(timeout=60)[0] == output, "the holder was held, then lost its peer"
        assert holder.returncode != 0
    finally:
        victim.kill()
        holder.kill()
    faults.assert_all_fired(plan)
