"""Hugging Face's Qwen3 under FSDP2, trained on packed documents by a loop of one's own.

Documents of different lengths are packed into rows, each attending to itself alone. The rows of a global
batch are dealt out to the ranks; the loss is the mean over all targets of the global batch, and gradients
are accumulated over micro-batches and reduced with the last one.

    torchrun --nproc-per-node 4 examples/hf_qwen.py
"""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM

IGNORED = -100


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--global-batch", type=int, default=8, help="rows per step")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step and rank")
    parser.add_argument("--sequence", type=int, default=24)
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def build_model(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """The same weights everywhere, of which FSDP2 then keeps this rank's shards."""
    torch.manual_seed(args.seed)
    config = Qwen3Config(
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=args.hidden // 4,
        vocab_size=args.vocab,
        max_position_embeddings=args.sequence,
        tie_word_embeddings=True,
        attn_implementation="eager",
        use_cache=False,
    )
    model = Qwen3ForCausalLM(config).to(device)
    model.gradient_checkpointing_enable()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def pack(args: argparse.Namespace, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A row of tokens and the index of the document each belongs to; the last one is cut off."""
    tokens, documents = [], []
    while len(tokens) < args.sequence:
        length = int(torch.randint(4, args.sequence, (), generator=generator))
        first, stride = torch.randint(1, 8, (2,), generator=generator).tolist()
        documents += [documents[-1] + 1 if documents else 0] * length
        tokens += [(first + stride * i) % args.vocab for i in range(length)]
    return torch.tensor(tokens[: args.sequence]), torch.tensor(documents[: args.sequence])


def rows(args: argparse.Namespace, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """This rank's rows of the global batch of `step`."""
    generator = torch.Generator().manual_seed(1000 * args.seed + step)
    packed = [pack(args, generator) for _ in range(args.global_batch)]
    mine = packed[dist.get_rank() :: dist.get_world_size()]
    tokens, documents = (torch.stack(column).to(device) for column in zip(*mine))
    return tokens, documents


def targets(tokens: Tensor, documents: Tensor) -> Tensor:
    """The next token, where it is of the same document."""
    following = F.pad(tokens[:, 1:], (0, 1), value=IGNORED)
    same = F.pad(documents[:, 1:], (0, 1), value=-1) == documents
    return following.masked_fill(~same, IGNORED)


def loss_sum(model: nn.Module, tokens: Tensor, documents: Tensor, labels: Tensor) -> Tensor:
    """The summed loss of rows; positions restart and attention ends where a document begins."""
    size = tokens.shape[1]
    index = torch.arange(size, device=tokens.device)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    positions = index - torch.where(begins, index, 0).cummax(1).values
    allowed = (documents[:, :, None] == documents[:, None, :]) & (index[:, None] >= index)
    mask = torch.zeros(allowed.shape, device=tokens.device).masked_fill(~allowed, -1e9)[:, None]
    logits = model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def train_step(model: nn.Module, tokens: Tensor, documents: Tensor, micro_batches: int) -> Tensor:
    """Leaves the gradient of the mean loss of the global batch; returns that loss."""
    labels = targets(tokens, documents)
    count = (labels != IGNORED).sum()
    dist.all_reduce(count)
    total = torch.zeros((), device=tokens.device)
    parts = list(zip(*(t.chunk(micro_batches) for t in (tokens, documents, labels))))
    for i, part in enumerate(parts):
        model.set_requires_gradient_sync(i == len(parts) - 1)
        loss = loss_sum(model, *part) / count
        # FSDP2 averages over the ranks
        (loss * dist.get_world_size()).backward()
        total += loss.detach()
    dist.all_reduce(total)
    return total


def main() -> None:
    args = parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    model = build_model(args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)

    def warmup_and_cosine(step: int) -> float:
        if step < args.warmup:
            return (step + 1) / args.warmup
        return 0.5 * (1 + math.cos(math.pi * (step - args.warmup) / max(1, args.steps - args.warmup)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_and_cosine)
    model.train()
    for step in range(args.steps):
        optimizer.zero_grad()
        loss = train_step(model, *rows(args, step, device), args.accumulate)
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip).full_tensor()
        optimizer.step()
        schedule.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.6f} grad norm {norm.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
