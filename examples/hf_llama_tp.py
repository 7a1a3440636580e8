"""Hugging Face's Llama with the tensor-parallel plan it ships with, trained by a loop of one's own.

The ranks form a mesh of data and tensor parallel ranks. Each step has a fixed global batch, of which a data
rank takes its slice in a few micro-batches; the loss is the mean over the tokens of the global batch that
are not padding.

    torchrun --nproc-per-node 4 examples/hf_llama_tp.py --tp 2
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

IGNORED = -100


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step and rank")
    parser.add_argument("--sequence", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def build_model(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """The same initial weights on every rank, of which a tensor parallel rank then keeps its part."""
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=args.vocab,
        max_position_embeddings=args.sequence,
        pad_token_id=0,
        attn_implementation="eager",
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(device)
    distributed = DistributedConfig(tp_size=mesh["tp"].size(), tp_plan="auto")
    plan, _, _ = model._resolve_parallel_plans(distributed)
    apply_tensor_parallelism(model, mesh["tp"], plan)
    return model


def global_batch(args: argparse.Namespace, step: int) -> tuple[Tensor, Tensor]:
    """Sequences that count upwards with noise, of different lengths, and a mask of what is not padding."""
    generator = torch.Generator().manual_seed(1000 * args.seed + step)
    start = torch.randint(1, args.vocab, (args.global_batch, 1), generator=generator)
    noise = torch.randint(0, 3, (args.global_batch, args.sequence), generator=generator)
    tokens = (start + noise.cumsum(1)) % (args.vocab - 1) + 1
    lengths = torch.randint(
        args.sequence // 2, args.sequence + 1, (args.global_batch, 1), generator=generator
    )
    mask = torch.arange(args.sequence) < lengths
    return tokens.masked_fill(~mask, 0), mask


def is_sharded(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and any(isinstance(p, Shard) for p in parameter.placements)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sum_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Sums all gradients over `group` in one bucket."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            # the embedding's gradient comes whole on every rank
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
    bucket = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(bucket, group=group)
    for gradient, summed in zip(gradients, bucket.split([g.numel() for g in gradients])):
        gradient.copy_(summed.view_as(gradient))


@torch.no_grad()
def clip_gradients(model: nn.Module, limit: float, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Scales the gradients down to a total norm of `limit`; returns the norm before that."""
    sharded = torch.zeros((), device=device)
    replicated = torch.zeros((), device=device)
    for parameter in model.parameters():
        square = local(parameter.grad).pow(2).sum()
        if is_sharded(parameter):
            sharded += square
        else:
            replicated += square
    dist.all_reduce(sharded, group=group)
    norm = (sharded + replicated).sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for parameter in model.parameters():
        local(parameter.grad).mul_(scale)
    return norm


def train_step(
    model: nn.Module, tokens: Tensor, mask: Tensor, micro_batches: int, group: dist.ProcessGroup
) -> Tensor:
    """Forward and backward of a data rank's sequences; returns the loss of the global batch."""
    labels = tokens.masked_fill(~mask, IGNORED)
    # the first token of a sequence is no target
    items = (labels[:, 1:] != IGNORED).sum()
    dist.all_reduce(items, group=group)

    total = torch.zeros((), device=tokens.device)
    chunks = zip(*(t.chunk(micro_batches) for t in (tokens, mask, labels)))
    for ids, attention, targets in chunks:
        out = model(
            input_ids=ids,
            attention_mask=attention,
            labels=targets,
            num_items_in_batch=items,
        )
        out.loss.backward()
        total += out.loss.detach()
    dist.all_reduce(total, group=group)
    return total


def main() -> None:
    args = parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    shape = (dist.get_world_size() // args.tp, args.tp)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")

    model = build_model(args, mesh, device)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + 0.1 * step))

    model.train()
    data_rank = mesh["dp"].get_local_rank()
    for step in range(args.steps):
        tokens, mask = (t.chunk(dp.size())[data_rank].to(device) for t in global_batch(args, step))
        optimizer.zero_grad()
        loss = train_step(model, tokens, mask, args.accumulate, dp)
        sum_gradients(model, dp)
        norm = clip_gradients(model, args.clip, tp, device)
        optimizer.step()
        schedule.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.6f} grad norm {norm.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
