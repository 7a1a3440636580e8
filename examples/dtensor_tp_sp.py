"""A Llama-like model: tensor parallel with sequence parallelism and loss parallel, inside data parallelism.

Between attention and feed-forward the activations are cut along the sequence (`SequenceParallel` norms and
dropout on the shards, each tp rank drawing its own mask); logits stay cut over the vocabulary and the
cross entropy is taken on the shards. Sequences have different lengths: the loss is the mean over all
tokens of all data ranks, so gradients are summed over "dp".

    torchrun --nproc-per-node 4 examples/dtensor_tp_sp.py --tp 2
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import get_total_norm

IGNORED = -100


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of (batch, seq, heads, head_dim)."""
    half = x.size(-1) // 2
    frequency = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.size(1), device=x.device)[:, None, None] * frequency
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1).type_as(x)


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys; heads are those the weights at hand have."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(self.head_dim), nn.RMSNorm(self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (w(x).view(batch, seq, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(self.q_norm(q)), rotate(self.k_norm(k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(batch, seq, -1))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(args.dim), nn.RMSNorm(args.dim)
        self.attention = Attention(args.dim, args.heads, args.kv_heads)
        self.feed_forward = FeedForward(args.dim, 2 * args.dim)
        self.dropout = args.dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.attention_norm(x)), self.dropout)
        return x + F.dropout(self.feed_forward(self.ffn_norm(x)), self.dropout)


class Llama(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocab, args.dim)
        self.layers = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.dim)
        self.output = nn.Linear(args.dim, args.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def parallelize(model: Llama, tp: DeviceMesh) -> None:
    vocabulary = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, tp, vocabulary)
    whole_sequence = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    for layer in model.layers:
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(**whole_sequence),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.q_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
            "attention.k_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(**whole_sequence),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, tp, plan)


def sum_over_data(model: nn.Module, group: dist.ProcessGroup) -> None:
    for p in model.parameters():
        grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        dist.all_reduce(grad, group=group)


def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    grads = [p.grad for p in model.parameters()]
    norms = []
    if cut := [g for g in grads if isinstance(g, DTensor)]:
        norms.append(get_total_norm(cut).full_tensor())
    if whole := [g for g in grads if not isinstance(g, DTensor)]:
        norms.append(get_total_norm(whole))
    norm = torch.stack(norms).norm()
    for g in grads:
        g.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def make_batch(args: argparse.Namespace, step: int, reader: int) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens of the sequences this data rank reads, IGNORED behind their ends."""
    generator = torch.Generator().manual_seed(1000 * step + reader)
    start = torch.randint(args.vocab, (args.batch, 1), generator=generator)
    text = (start + torch.arange(args.seq + 1) ** 2) % args.vocab
    length = torch.randint(args.seq // 4, args.seq + 1, (args.batch, 1), generator=generator)
    return text[:, :-1], text[:, 1:].masked_fill(torch.arange(args.seq) >= length, IGNORED)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=2, help="of each data rank")
    parser.add_argument("--seq", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=0.5)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    shape = (dist.get_world_size() // args.tp, args.tp)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "tp"))
    dp_group, dp_rank = mesh.get_group("dp"), mesh.get_local_rank("dp")

    torch.manual_seed(0)
    model = Llama(args).to(device)
    parallelize(model, mesh["tp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=False)
    torch.manual_seed(1 + dist.get_rank())  # every rank drops other elements of other sequences

    for step in range(args.steps):
        tokens, targets = (t.to(device) for t in make_batch(args, step, dp_rank))
        count = (targets != IGNORED).sum()
        dist.all_reduce(count, group=dp_group)
        optimizer.zero_grad()
        with loss_parallel():
            logits = model(tokens).flatten(0, 1)
            loss = F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORED) / count
            loss.backward()
        sum_over_data(model, dp_group)
        norm = clip_grad_norm(model, args.clip)
        optimizer.step()
        mean_loss = loss.detach().full_tensor()
        dist.all_reduce(mean_loss, group=dp_group)
        if dist.get_rank() == 0:
            print(f"step {step}  loss {mean_loss.item():.6f}  grad norm {norm.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
