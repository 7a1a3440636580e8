"""Hugging Face's BERT on masked words, with gradients reduced by hand and a sharded optimizer.

Each rank takes its slice of a global batch. The number of masked words differs between ranks, so summed
losses are divided by the number in the global batch. Gradients are summed bucket by bucket after backward,
then clipped; ZeroRedundancyOptimizer keeps the state of each parameter on one rank.

    torchrun --nproc-per-node 4 examples/hf_bert.py
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForMaskedLM

IGNORED = -100
PADDING, MASK, FIRST_WORD = 0, 1, 4


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--longest", type=int, default=20, help="words of a sentence")
    parser.add_argument("--masked", type=float, default=0.2, help="share of words to be guessed")
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--bucket", type=int, default=8192, help="elements reduced at a time")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """Sentences of different lengths, some of whose words are hidden, chosen by the sentence's index."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    def __len__(self) -> int:
        return 16 * self.args.global_batch

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        args = self.args
        generator = torch.Generator().manual_seed(args.seed * 100_003 + index)
        length = int(torch.randint(args.longest // 4, args.longest + 1, (), generator=generator))
        start, stride = torch.randint(0, args.vocab, (2,), generator=generator).tolist()
        words = FIRST_WORD + (start + stride * torch.arange(length)) % (args.vocab - FIRST_WORD)
        hidden = torch.rand(length, generator=generator) < args.masked
        hidden[0] = True
        labels = words.masked_fill(~hidden, IGNORED)
        # of hidden words some are shown as another word and some as they are
        kind = torch.rand(length, generator=generator)
        other = torch.randint(FIRST_WORD, args.vocab, (length,), generator=generator)
        shown = torch.where(kind < 0.8, MASK, torch.where(kind < 0.9, other, words))
        return torch.where(hidden, shown, words), labels


def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    words, labels = zip(*samples)
    ids = nn.utils.rnn.pad_sequence(list(words), batch_first=True, padding_value=PADDING)
    targets = nn.utils.rnn.pad_sequence(list(labels), batch_first=True, padding_value=IGNORED)
    return {"input_ids": ids, "attention_mask": (ids != PADDING).long(), "labels": targets}


class SliceSampler:
    """Batches of indices: of each global batch, in order, this rank's slice."""

    def __init__(self, size: int, global_batch: int) -> None:
        self.size, self.global_batch = size, global_batch
        self.local = global_batch // dist.get_world_size()

    def __iter__(self) -> Any:
        for start in range(0, self.size, self.global_batch):
            first = start + dist.get_rank() * self.local
            yield list(range(first, first + self.local))

    def __len__(self) -> int:
        return self.size // self.global_batch


def build_model(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """Starts from rank 0's initial weights on every rank."""
    config = BertConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        intermediate_size=2 * args.hidden,
        max_position_embeddings=args.longest,
        type_vocab_size=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    model = BertForMaskedLM(config).to(device)
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, src=0)
    return model


@torch.no_grad()
def sum_gradients(model: nn.Module, bucket_size: int) -> None:
    """Sums gradients over the ranks, in buckets of about `bucket_size` elements."""
    buckets: list[list[Tensor]] = [[]]
    for parameter in model.parameters():
        buckets[-1].append(parameter.grad)
        if sum(g.numel() for g in buckets[-1]) >= bucket_size:
            buckets.append([])
    for bucket in filter(None, buckets):
        flat = torch.cat([g.flatten() for g in bucket])
        dist.all_reduce(flat)
        offset = 0
        for gradient in bucket:
            gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
            offset += gradient.numel()


def masked_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The summed loss over this rank's hidden words, and how many of them were guessed."""
    labels = batch["labels"]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (logits.argmax(-1) == labels).sum()


def main() -> None:
    args = parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    torch.manual_seed(args.seed + dist.get_rank())
    model = build_model(args, device)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=args.lr, weight_decay=0.01
    )
    dataset = Sentences(args)
    sampler = SliceSampler(len(dataset), args.global_batch)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)

    model.train()
    for step, cpu_batch in zip(range(args.steps), loader):
        batch = {name: tensor.to(device) for name, tensor in cpu_batch.items()}
        counts = (batch["labels"] != IGNORED).sum()
        dist.all_reduce(counts)

        model.zero_grad()
        total, guessed = masked_loss(model, batch)
        loss = total / counts
        loss.backward()
        sum_gradients(model, args.bucket)
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()

        logged = torch.stack([loss.detach(), guessed / counts])
        dist.all_reduce(logged)
        if dist.get_rank() == 0:
            mean, accuracy = logged.tolist()
            print(f"step {step} loss {mean:.6f} accuracy {accuracy:.4f} norm {norm.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
