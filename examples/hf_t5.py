"""Hugging Face's T5 under hybrid-sharded FSDP2, taught to sort digits.

Parameters are sharded within a group of ranks and replicated between groups. Every rank draws its own
batches from a seed of its own; targets are of different lengths, so the loss is divided by the number of
target tokens of all ranks.

    torchrun --nproc-per-node 4 examples/hf_t5.py --shard 2
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import T5Config, T5ForConditionalGeneration

PADDING, END, FIRST = 0, 1, 2
IGNORED = -100


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shard", type=int, default=1, help="ranks that share one replica")
    parser.add_argument("--batch", type=int, default=4, help="examples per step and rank")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--longest", type=int, default=12)
    parser.add_argument("--digits", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--smoothing", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--clip", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def build_model(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    torch.manual_seed(args.seed)
    config = T5Config(
        vocab_size=FIRST + args.digits,
        d_model=args.hidden,
        d_kv=args.hidden // 4,
        d_ff=2 * args.hidden,
        num_layers=args.layers,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        pad_token_id=PADDING,
        eos_token_id=END,
        decoder_start_token_id=PADDING,
        use_cache=False,
    )
    model = T5ForConditionalGeneration(config).to(device)
    # a mesh of two dims: replicas of shards
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    for block in (*model.encoder.block, *model.decoder.block):
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def draw(args: argparse.Namespace, generator: torch.Generator) -> dict[str, Tensor]:
    """Rows of digits to be sorted, padded to the same length for all ranks."""
    lengths = torch.randint(2, args.longest, (args.batch, 1), generator=generator)
    digits = FIRST + torch.randint(args.digits, (args.batch, args.longest), generator=generator)
    index = torch.arange(args.longest)
    inside, end = index < lengths, index == lengths
    source = digits.masked_fill(~inside, PADDING).masked_fill(end, END)
    # what is beyond the end is larger than all digits
    largest = FIRST + args.digits
    ordered = digits.masked_fill(~inside, largest).sort(dim=1).values
    labels = ordered.masked_fill(~inside, IGNORED).masked_fill(end, END)
    return {"input_ids": source, "attention_mask": (inside | end).long(), "labels": labels}


def train_step(
    model: nn.Module, batch: dict[str, Tensor], smoothing: float, group: dist.ProcessGroup
) -> Tensor:
    """Leaves the gradient of the mean loss per target token over `group`; returns that loss."""
    labels = batch["labels"]
    tokens = (labels != IGNORED).sum()
    dist.all_reduce(tokens, group=group)
    logits = model(**batch).logits
    total = F.cross_entropy(
        logits.flatten(0, 1),
        labels.flatten(),
        ignore_index=IGNORED,
        label_smoothing=smoothing,
        reduction="sum",
    )
    loss = total / tokens
    # FSDP2 averages over shards and replicas
    (loss * dist.get_world_size()).backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=group)
    return mean


def main() -> None:
    args = parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(
        device.type, (world // args.shard, args.shard), mesh_dim_names=("replicate", "shard")
    )
    data = mesh._flatten("data").get_group()

    model = build_model(args, mesh, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(1000 * args.seed + rank)
    model.train()
    for step in range(args.steps):
        batch = {name: tensor.to(device) for name, tensor in draw(args, generator).items()}
        optimizer.zero_grad()
        loss = train_step(model, batch, args.smoothing, data)
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip).full_tensor()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f} grad norm {norm.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
