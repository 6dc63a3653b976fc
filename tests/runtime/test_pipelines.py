"""Pipelines: a whole one in this process, with all its stages on one rank, and jobs that lose ranks of theirs."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn import functional as F

from flashrec.runtime import codec
from flashrec.runtime.errors import LayoutMismatch, UnsupportedTorch
from flashrec.runtime.parallel.pipeline import Pipelines
from flashrec.runtime.torch_private import pipelining as private
from tests.runtime import programs
from tests.runtime.attendant import Attendant, Ending
from tests.runtime.layouts import program
from tests.runtime.layouts.layout import TABLE
from tests.runtime.layouts.outcome import Outcome, undisturbed
from tests.runtime.layouts.pipelines import MICRO, NUM_MICRO, Chunk
from tests.runtime.programs import WIDTH
from tests.runtime.support import Cluster

pytestmark = pytest.mark.torch
TIMEOUT_S = 200.0


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Whole:
    """All stages on one rank, and what a session keeps of them."""

    def __init__(self, num_stages: int = 2) -> None:
        torch.manual_seed(7)
        self.chunks = nn.ModuleList([Chunk() for _ in range(num_stages)])
        stages = [PipelineStage(chunk, i, num_stages, torch.device("cpu")) for i, chunk in enumerate(self.chunks)]
        if num_stages == 1:
            self.schedule: Any = Schedule1F1B(stages[0], NUM_MICRO, loss_fn=F.mse_loss)
        else:
            self.schedule = ScheduleInterleaved1F1B(stages, NUM_MICRO, loss_fn=F.mse_loss)
        self.stages = stages
        self.part = Pipelines(self.chunks, [self.schedule])
        self.num_forwards = 0
        self.chunks[0].register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.num_forwards += 1

    def step(self, step: int) -> list[float]:
        """Losses of the micro-batches."""
        torch.manual_seed(step)
        x, y = torch.randn(NUM_MICRO * MICRO, WIDTH), torch.randn(NUM_MICRO * MICRO, WIDTH)
        losses: list[torch.Tensor] = []
        self.schedule.step(x, target=y, losses=losses)
        return [float(loss.detach()) for loss in losses]

    def cut(self, step: int, at: int) -> None:
        """A step that ends in an error in the forward `at` of the last stage."""
        calls = iter(range(1, at + 1))

        def fail(*_: Any) -> None:
            if next(calls) == at:
                raise RuntimeError("gloo: connection closed by peer")

        handle = self.chunks[-1].register_forward_hook(fail)
        with pytest.raises(RuntimeError):
            self.step(step)
        handle.remove()

    def put_back(self, calls: list[float]) -> None:
        """What the session does beside the part: gradients and buffers."""
        self.chunks.zero_grad()
        for chunk, number in zip(self.chunks, calls, strict=True):
            chunk.calls.fill_(number)

    @property
    def calls(self) -> list[float]:
        return [float(chunk.calls) for chunk in self.chunks]


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("first", [True, False], ids=["handshake", "later"])
def test_a_step_that_was_cut_leaves_nothing_behind(first: bool, at: int, alone: None) -> None:
    right, hit = Whole(), Whole()
    if not first:
        for whole in (right, hit):
            whole.step(0)
            whole.part.before_vote(0)
            whole.chunks.zero_grad()
    step, calls = int(not first), hit.calls
    hit.cut(step, at)
    hit.part.settle_for(step)
    hit.put_back(calls)
    for stage in hit.stages:
        assert not (stage.fwd_cache or stage.bwd_cache or stage.output_chunks or stage.backward_state)
    assert hit.step(step) == right.step(step)
    assert hit.calls == right.calls
    for mine, wanted in zip(hit.chunks.parameters(), right.chunks.parameters(), strict=True):
        assert torch.equal(mine.grad, wanted.grad)


def test_a_step_that_was_voted_for_is_done_again_as_the_first_time(alone: None) -> None:
    """Nobody saw the vote of the first step complete: it is done again, with the handshake."""
    whole = Whole()
    losses, calls = whole.step(0), whole.calls
    whole.part.before_vote(0)
    whole.part.settle_for(0)
    whole.put_back([0.0, 0.0])
    assert whole.step(0) == losses
    assert (whole.calls, whole.num_forwards) == (calls, 2 * (NUM_MICRO + 1))


def test_a_replacement_does_not_shake_hands(alone: None) -> None:
    source, target = Whole(), Whole()
    source.step(0)
    source.part.before_vote(0)
    source.part.settle_for(1)
    target.part.impose(codec.decode(codec.encode(source.part.describe(), "pipeline")))
    source.put_back(target.calls)
    assert target.step(1) == source.step(1)
    assert target.num_forwards == NUM_MICRO


def test_a_replacement_in_the_first_step_shakes_hands_with_the_others(alone: None) -> None:
    source, target = Whole(), Whole()
    source.step(0)
    source.part.before_vote(0)
    source.part.settle_for(0)
    target.part.impose(source.part.describe())
    target.step(0)
    assert target.num_forwards == NUM_MICRO + 1  # to learn the shapes


def test_an_evaluation_between_steps_does_not_change_what_a_step_needs(alone: None) -> None:
    right, hit = Whole(1), Whole(1)
    for whole in (right, hit):
        whole.step(0)
        whole.part.before_vote(0)
        whole.schedule.eval(torch.randn(NUM_MICRO * MICRO, WIDTH), target=torch.randn(NUM_MICRO * MICRO, WIDTH))
        whole.chunks.zero_grad()
    losses = right.step(1)
    hit.cut(1, 3)
    hit.part.settle_for(1)
    hit.put_back([number - NUM_MICRO for number in right.calls])
    assert hit.step(1) == losses


def test_a_pipeline_that_the_session_was_not_told_of_is_refused(alone: None) -> None:
    chunk = Chunk()
    part = Pipelines(chunk)
    stage = PipelineStage(nn.Sequential(chunk), 0, 1, torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"stage 0 of a pipeline .* pipeline=schedule"):
        Pipelines(chunk)
    with pytest.raises(RuntimeError, match="pipeline=schedule"):  # made after the session
        part.open(0)
    stage.itself = stage  # not freed before the garbage collector has been there
    del stage
    Pipelines(chunk)


def test_stages_outside_of_the_model_are_refused(alone: None) -> None:
    chunk = Chunk()
    schedule = Schedule1F1B(PipelineStage(chunk, 0, 1, torch.device("cpu")), 1)
    with pytest.raises(RuntimeError, match=r"stage 0 is not in the model of the session; .* nn\.ModuleList"):
        Pipelines(Chunk(), [schedule])
    with pytest.raises(TypeError, match="give the schedule"):
        Pipelines(chunk, [chunk])


def test_a_torch_that_lacks_something_is_named(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "_STAGE_NAMES", (*private._STAGE_NAMES, "gone"))
    with pytest.raises(UnsupportedTorch, match="lacks gone, gone"):
        Whole()


def test_dtensors_between_stages_are_refused(alone: None) -> None:
    from torch.distributed.pipelining._utils import _DTensorMeta

    whole = Whole()
    whole.step(0)
    meta = _DTensorMeta(shape=torch.Size([1]), stride=(1,), dtype=torch.float32, requires_grad=True)
    whole.stages[1]._stage_meta.inputs = (meta,)
    with pytest.raises(NotImplementedError, match="stage 1 of the pipeline exchanges DTensors"):
        whole.part.before_vote(0)


def test_another_pipeline_is_a_mismatch(alone: None) -> None:
    whole, chunk = Whole(), Chunk()
    other = Pipelines(chunk, [Schedule1F1B(PipelineStage(chunk, 0, 2, torch.device("cpu")), 2)])
    with pytest.raises(LayoutMismatch, match=r"the stages \[0, 1\] of a pipeline, this rank \[0\]"):
        other.impose(whole.part.describe())
    with pytest.raises(LayoutMismatch, match="only one of source and target"):
        Pipelines(nn.Linear(1, 1)).impose(whole.part.describe())


# ---- jobs


def train(out: str, layout: str, lose_vote: tuple[int, tuple[int, ...]], **config: Any) -> None:
    """A layout; the ranks of `lose_vote` do not learn, in their first life, the result of the vote of its step."""

    def build() -> Any:
        setup = TABLE[layout].build()
        step, ranks = lose_vote
        worker = programs.api._Process.worker
        if worker is not None and worker.env.incarnation == 1 and worker.rank in ranks:
            programs._lose_vote(step)
        return setup

    program.TABLE = {layout: types.SimpleNamespace(build=build)}
    program.train(out, layout, **config)


def lose(make_cluster: Callable[..., Cluster], path: Path, layout: str, faults: list[Any], **config: Any) -> Cluster:
    """Run a layout with these faults and compare it bit by bit with a run without any."""
    steps = config["steps"]
    cluster = make_cluster(4)
    attendant = Attendant(cluster, train, {"layout": layout, "faults": faults, **config}, patience_s=1.0)
    attendant.start()
    assert attendant.run(TIMEOUT_S) is Ending.DONE, attendant.why + cluster.logs()
    assert sum(cluster.log(rank).count("fault t=") for rank in range(4)) == len(faults)
    assert not Outcome(cluster.path, 4).differences(undisturbed(layout, 4, steps, path / "undisturbed")), cluster.logs()
    return cluster


def test_stages_that_learn_shapes_from_each_other(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """In the handshake, twice, and between micro-batches; then two ranks go on without having seen the vote."""
    faults = [(3, 1, 0, "micro-1"), (0, 1, 0, "micro-1"), (3, 2, 1, "micro-2"), (2, 1, 2, "backward")]
    faults += [(2, 2, 3, "in-optimizer")]
    cluster = lose(make_cluster, tmp_path, "pp_dp_gpipe", faults, steps=5, lose_vote=(3, (1,)))
    assert (cluster.plans[-1].resume_step, cluster.plans[-1].roll_forward) == (4, (1,))


def test_several_stages_on_each_rank(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    faults = [(1, 1, 0, "micro-2"), (2, 1, 1, "stop-micro-3"), (3, 1, 2, "backward"), (0, 1, 3, "after-optimizer")]
    lose(make_cluster, tmp_path, "pp_dp_interleaved", faults, steps=5, lose_vote=(0, ()))
