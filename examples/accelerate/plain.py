"""A small GPT-2 of Hugging Face's transformers, trained with Accelerate: its loader, optimizer and scheduler.

    torchrun --nproc-per-node 2 plain.py --steps 100
    flashrec run --local --nodes 3 -- python train.py --steps 100

`plain.py` and `train.py` are the same script without and with recovery, see docs/guides/huggingface.md.
"""

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

BATCH, CONTEXT, VOCABULARY = 4, 32, 64


def progressions(num_samples: int) -> TensorDataset:
    """Arithmetic progressions modulo VOCABULARY, (num_samples, CONTEXT): what comes next can be learnt."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randint(VOCABULARY, (num_samples, 1), generator=generator)
    stride = torch.randint(1, 8, (num_samples, 1), generator=generator)
    return TensorDataset((start + stride * torch.arange(CONTEXT)) % VOCABULARY)


def train_step(step, accelerator, model, optimizer, scheduler, batch):
    tokens = batch[0].to(accelerator.device)
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    print(f"step {step} rank {accelerator.process_index} loss {loss.item():.9g}", flush=True)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps to take")
    options = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4, **ends)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps * accelerator.num_processes)
    dataset = progressions(options.steps * BATCH * accelerator.num_processes)
    loader = DataLoader(dataset, BATCH, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    for step, batch in enumerate(loader):
        train_step(step, accelerator, model, optimizer, scheduler, batch)
    accelerator.end_training()


if __name__ == "__main__":
    main()
