"""A transformer sharded with FSDP2, the shards replicated (HSDP), put together as torchtitan does it: built on the meta
device, each block sharded on its own, then the whole, weights made where they stay, bfloat16 in forward and backward.

    torchrun --nproc-per-node 4 plain.py --steps 100
    flashrec run --local --nodes 3 --ntasks-per-node 2 -- python train.py --steps 100

`plain.py` and `train.py` are the same script without and with recovery, see docs/guides/torchtitan-style.md.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import flashrec

BATCH, CONTEXT, VOCABULARY, WIDTH, HEADS, BLOCKS = 4, 32, 64, 32, 4, 2
SHARDS = 2  # ranks that share one copy of the model
WARMUP = 10  # steps


def progressions(num_samples: int) -> TensorDataset:
    """Arithmetic progressions modulo VOCABULARY, (num_samples, CONTEXT + 1): what comes next can be learnt."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randint(VOCABULARY, (num_samples, 1), generator=generator)
    stride = torch.randint(1, 8, (num_samples, 1), generator=generator)
    return TensorDataset((start + stride * torch.arange(CONTEXT + 1)) % VOCABULARY)


class Block(nn.Module):
    """One pre-norm transformer block: causal self-attention, then a gated perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class Transformer(nn.Module):
    """(batch, context) tokens in, (batch, context, VOCABULARY) logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.trunc_normal_(module.weight, std=0.02)
            elif isinstance(module, nn.RMSNorm):
                module.reset_parameters()


def build() -> nn.Module:
    """The model of this rank: a shard, which ranks in the other half of the mesh hold, too."""
    replicas = dist.get_world_size() // SHARDS
    mesh = init_device_mesh("cpu", (replicas, SHARDS), mesh_dim_names=("dp_replicate", "dp_shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = Transformer()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    return model


def train_step(step, model, optimizer, scheduler, batch):
    (tokens,) = batch
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    print(f"step {step} rank {dist.get_rank()} loss {loss.item():.9g}", flush=True)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps to take")
    options = parser.parse_args()

    flashrec.init()
    dist.init_process_group("gloo")
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP, (options.steps - step) / options.steps)
    )
    dataset = progressions(options.steps * BATCH * dist.get_world_size())
    loader = DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset))
    session = flashrec.Session(model, optimizer, state={"scheduler": scheduler})
    data = session.data(loader)

    for step in session.steps(options.steps):
        with step:
            train_step(step, model, optimizer, scheduler, data.batch(step))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
