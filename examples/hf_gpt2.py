"""Hugging Face's GPT-2 under DistributedDataParallel, trained on blocks of a text with dropout.

A DistributedSampler deals blocks to the ranks, worker processes load them, each rank draws dropout from a
stream of its own, and gradients are accumulated without communication but for the last micro-batch. A
communication hook divides before it sums, so that sums of many ranks stay small.

    torchrun --nproc-per-node 4 examples/hf_gpt2.py
"""

import argparse
import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel

TEXT = """
It was the rule of the house that nobody wound the clock but the oldest, and so when the oldest had gone to
sea the clock stood still at ten past four. The others learned to tell the hour by the baker's cart, by the
shadow of the pump, by the gulls. In the ninth year a letter came. It said only: wind it. They drew lots for
the key, and she who drew it turned it slowly, and the whole street came to the door to hear it strike.
"""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=2, help="blocks of a rank at a time")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=5.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


class Blocks(Dataset[Tensor]):
    """Overlapping blocks of the letters of a text."""

    def __init__(self, text: str, block: int) -> None:
        self.letters = sorted(set(text))
        codes = {letter: code for code, letter in enumerate(self.letters)}
        self.codes = torch.tensor([codes[letter] for letter in text])
        self.block = block

    def __len__(self) -> int:
        # a number of blocks that all ranks share evenly
        return (len(self.codes) - self.block) // 64 * 64

    def __getitem__(self, index: int) -> Tensor:
        return self.codes[index : index + self.block]


def build_model(args: argparse.Namespace, vocab: int, device: torch.device) -> nn.Module:
    config = GPT2Config(
        vocab_size=vocab,
        n_positions=args.block,
        n_embd=args.hidden,
        n_layer=args.layers,
        n_head=4,
        resid_pdrop=args.dropout,
        embd_pdrop=args.dropout,
        attn_pdrop=args.dropout,
        attn_implementation="eager",
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config).to(device)


def average(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook of DistributedDataParallel."""
    gradients = bucket.buffer().div_(group.size())
    work = dist.all_reduce(gradients, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def endless(loader: DataLoader[Tensor], sampler: DistributedSampler[Tensor]) -> Iterator[Tensor]:
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def train_step(
    model: DistributedDataParallel, batches: Iterator[Tensor], count: int, device: torch.device
) -> Tensor:
    """Leaves averaged gradients; returns this rank's mean loss."""
    total = torch.zeros((), device=device)
    for i in range(count):
        tokens = next(batches).to(device)
        last = i == count - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = model(input_ids=tokens, labels=tokens).loss / count
            loss.backward()
        total += loss.detach()
    return total


def main() -> None:
    args = parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    dataset = Blocks(TEXT, args.block)
    sampler = DistributedSampler(dataset, shuffle=True, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler, num_workers=args.workers)
    batches = endless(loader, sampler)

    torch.manual_seed(args.seed)
    module = build_model(args, len(dataset.letters), device)
    model = DistributedDataParallel(module, device_ids=[device] if cuda else None)
    model.register_comm_hook(dist.group.WORLD, average)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    # dropout of its own for every rank
    torch.manual_seed(args.seed + rank)

    model.train()
    for step in range(args.steps):
        loss = train_step(model, batches, args.accumulate, device)
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        loss /= world
        if rank == 0:
            perplexity = loss.exp().item()
            print(f"step {step} loss {loss.item():.6f} perplexity {perplexity:.4f} norm {norm.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
