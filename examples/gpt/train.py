"""Train a small GPT on the sources of Python's standard library, with FlashRecovery.

The text is on every machine that has Python, byte by byte: nothing to download. The script is an ordinary DDP
script plus the lines marked `# flashrec`. Under `flashrec run` it survives the loss of a process or a node;
under `torchrun`, or started alone, the same lines do nothing and it trains as ever.

What makes a run repeatable bit by bit, with or without a failure: what a step reads (text, learning rate) is
a pure function of (step, rank), and what it logs from other ranks is reduced *before* `optimizer.step()`.
"""

import argparse
import hashlib
import json
import math
import os
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import flashrec  # flashrec

EXAMPLES = """\
examples:
  python train.py --steps 20                                       one process, to look at it
  torchrun --nproc-per-node 4 train.py --steps 100                 four ranks, nothing survives
  flashrec run --local --nodes 3 -- python train.py --steps 100    three pretended nodes on this machine
  flashrec run --spares 1 -- python train.py --out results         in a Slurm job: sbatch_templates/ddp.sbatch
"""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults and leaves the examples as they are."""


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=HelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps to take")
    parser.add_argument("--dim", type=int, default=64, help="width of the model")
    parser.add_argument("--layers", type=int, default=2, help="transformer blocks")
    parser.add_argument("--heads", type=int, default=4, help="attention heads; must divide --dim")
    parser.add_argument("--context", type=int, default=64, help="bytes the model looks back")
    parser.add_argument("--batch", type=int, default=4, help="windows of text per rank and step")
    parser.add_argument("--dropout", type=float, default=0.1, help="dropout probability")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=20, help="steps of linear warm-up")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, dropout and text order")
    parser.add_argument("--bucket-mb", type=float, default=0.1, help="size of a DDP bucket in MiB")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch per rank")
    parser.add_argument("--out", type=Path, help="where rank-R.jsonl (exact losses) and final-R.json (digest) go")
    options = parser.parse_args()
    if options.steps < 1 or options.batch < 1 or options.context < 1:
        parser.error("--steps, --batch and --context must be at least 1")
    if options.dim % options.heads:
        parser.error(f"--heads {options.heads} does not divide --dim {options.dim}")
    return options


class Text:
    """The single-file modules of the standard library, in alphabetical order, as one array of bytes.

    Same Python version, same bytes: distributions split packages off, never modules. The digest is printed,
    so that two machines can be compared.
    """

    def __init__(self, context: int, batch: int, seed: int):
        library = Path(sysconfig.get_path("stdlib"))
        files = [library / f"{name}.py" for name in sorted(sys.stdlib_module_names)]
        raw = b"".join(file.read_bytes() for file in files if file.is_file())
        self.digest = hashlib.sha256(raw).hexdigest()[:12]
        self.data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        self.context, self.batch, self.seed = context, batch, seed

    def batch_of(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and target of a step, both (batch, context) of int64; the target is one byte ahead."""
        place = torch.Generator().manual_seed((self.seed * 1_000_003 + step) * 65_537 + rank)
        starts = torch.randint(len(self.data) - self.context, (self.batch, 1), generator=place)
        windows = self.data[starts + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]


class Block(nn.Module):
    """One pre-norm transformer block: causal self-attention, then a two-layer perceptron."""

    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_attention, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.project = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, dim = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, context, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + F.dropout(self.project(y.transpose(1, 2).reshape(batch, context, dim)), p)
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """A byte-level GPT: (batch, context) bytes in, (batch, context, 256) logits out."""

    def __init__(self, dim: int, layers: int, heads: int, context: int, dropout: float):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, dim), nn.Embedding(context, dim)
        self.blocks = nn.Sequential(*[Block(dim, heads, dropout) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.bytes(text) + self.places(torch.arange(text.shape[1], device=text.device))
        return self.head(self.norm(self.blocks(x)))


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine to a tenth: a function of the step, so no scheduler state can be lost."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    progress = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """sha256 over every bit of the parameters, buffers and optimizer state."""
    digest = hashlib.sha256()
    tensors = dict(model.state_dict())
    for index, slots in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": slot for name, slot in slots.items()}
    for name, tensor in tensors.items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def train(options: argparse.Namespace, text: Text, model: nn.Module, device: torch.device) -> None:
    """All steps of this rank, then its digest. The model is freed on return, before the groups it uses."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    model = DistributedDataParallel(model.to(device), bucket_cap_mb=options.bucket_mb)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    session = flashrec.Session(model, optimizer, seed=options.seed)  # flashrec

    losses = None
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"rank-{rank}.jsonl"
        losses = path.open("a", buffering=1)  # a replacement appends: the last line of a step counts
    if rank == 0:
        size = sum(parameter.numel() for parameter in model.parameters())
        print(f"text {len(text.data)} bytes ({text.digest}), {size} parameters, {world_size} ranks, {device.type}")

    began = time.monotonic()
    for step in session.steps(options.steps):  # flashrec
        with step:  # flashrec: this block is run again if a failure hits it
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(int(step), options)
            source, target = (part.to(device) for part in text.batch_of(int(step), rank))
            loss = F.cross_entropy(model(source).flatten(0, 1), target.flatten())
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)

            mean = loss.detach().clone()
            dist.all_reduce(mean)  # before the optimizer step: what comes after it is never redone
            mean /= world_size
            if losses:
                exact = {"step": int(step), "loss": loss.item().hex(), "mean": mean.item().hex()}
                losses.write(json.dumps(exact) + "\n")
            if rank == 0:
                now = time.monotonic()
                took = f"norm {norm.item():.3f} {(now - began) * 1e3:.0f} ms"
                print(f"step {int(step)} loss {mean.item():.7f} {took}", flush=True)
                began = now

            optimizer.step()
            optimizer.zero_grad()

    digest = digest_of(model, optimizer)
    print(f"final digest of rank {rank}: {digest}", flush=True)
    if options.out:
        final = options.out / f"final-{rank}.json"
        record = {"rank": rank, "steps": options.steps, "digest": digest, "job_id": os.environ.get("SLURM_JOB_ID")}
        final.with_suffix(".tmp").write_text(json.dumps(record) + "\n")
        final.with_suffix(".tmp").replace(final)


def main() -> None:
    options = parse_options()
    torch.use_deterministic_algorithms(True)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which cuBLAS needs for it
    torch.set_num_threads(options.threads)  # several ranks share the cores of a node
    torch.manual_seed(options.seed)
    text = Text(options.context, options.batch, options.seed)  # alike on all ranks, as is the model:
    model = GPT(options.dim, options.layers, options.heads, options.context, options.dropout)  # a hot spare has both

    flashrec.init()  # flashrec
    if "RANK" not in os.environ:  # neither torchrun nor flashrec run: a world of one
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    dist.init_process_group("nccl" if cuda else "gloo")
    train(options, text, model, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
