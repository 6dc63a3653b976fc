"""FSDP2, HSDP and tensor parallel layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from tests.runtime.layouts.layout import Setup
from tests.runtime.layouts.model import WIDTH, batch


class Block(nn.Module):
    """Residual, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Blocks(nn.Module):
    """Parameters of its own, so that the root of FSDP has some, too; a width that two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Middle:
    """Calls hooks in the middle of a backward: FSDP's parameters are no leaves, they never accumulate a gradient."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.is_armed = True  # in forward

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> object:
        def after_forward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if output.requires_grad and self.is_armed:
                output.register_hook(lambda _: hook(None))

        return self._module.register_forward_hook(after_forward)


def hsdp() -> Setup:
    return _sharded(_hsdp_mesh())


def hsdp_bf16() -> Setup:
    return _sharded(_hsdp_mesh(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def hsdp_accumulate() -> Setup:
    """Two micro-batches, the first without communication; reduced in another type, so FSDP keeps its own sums."""
    return _sharded(_hsdp_mesh(), num_micro=2, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def hsdp_offload() -> Setup:
    return _sharded(_hsdp_mesh(), offload_policy=CPUOffloadPolicy(pin_memory=False))


def fsdp2() -> Setup:
    return _sharded(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",)))


def fsdp2_mirrored() -> Setup:
    return _sharded(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",)), mirrors=True)


def tp() -> Setup:
    """Tensor parallel in pairs, each pair a replica: nothing is left to shard over."""
    return _tensor_parallel(init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp")))


def hsdp_tp() -> Setup:
    return _tensor_parallel(init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp")))


def hsdp_compiled() -> Setup:
    """Each block compiled. No C++ compiler is asked for."""
    return _sharded(_hsdp_mesh(), compiles=True)


def _hsdp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


def _sharded(
    mesh: DeviceMesh, num_micro: int = 1, compiles: bool = False, mirrors: bool = False, **policies: Any
) -> Setup:
    torch.manual_seed(7)
    model = Blocks()
    for block in model.blocks:
        if compiles:
            block.compile(backend="aot_eager")
        fully_shard(block, mesh=mesh, **policies)
    fully_shard(model, mesh=mesh, **policies)
    session = {"mirrors": True} if mirrors else {}
    return _setup(model, Middle(model.blocks[1]), dist.get_rank(), num_micro, session)


def _tensor_parallel(mesh: DeviceMesh) -> Setup:
    """Every parameter is a DTensor over all dimensions: what is not split is the same on both ranks of a pair, and so
    is what they draw."""
    torch.manual_seed(7)
    model, pair = Blocks(), mesh["tp"]

    def keep_whole(module: nn.Module) -> None:
        distribute_module(
            module,
            pair,
            input_fn=lambda _, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Replicate()]),
            output_fn=lambda _, output, mesh: output.to_local(),
        )

    for block in model.blocks:
        parallelize_module(block, pair, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        keep_whole(block.norm)
    keep_whole(model.first)
    keep_whole(model.last)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["replicate", "shard"])
    number = dist.get_rank() // 2
    return _setup(model, Middle(model.blocks[1]), number, session={"seed_rank": number})


def _setup(
    model: nn.Module, watched: Middle, shard: int, num_micro: int = 1, session: dict[str, Any] | None = None
) -> Setup:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def communicate(is_last: bool) -> None:
        if num_micro > 1 and isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_last)

    def run(step: int) -> torch.Tensor:
        total = torch.zeros(())
        for micro in range(num_micro):
            watched.is_armed = micro == num_micro - 1
            if watched.is_armed:
                communicate(True)
            x, y = batch(step, shard, (8, WIDTH), micro)
            loss = F.mse_loss(model(x).float(), y[:, :5])
            loss.backward()
            total += loss.detach()
        communicate(False)  # and so it is found by the next step
        return total

    communicate(False)

    return Setup(
        model,
        [optimizer],
        run,
        watched=watched,
        clip=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        state={"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)},
        session=session or {},
    )
