"""A decoder-only language model, tensor parallel by DTensor.

`parallelize_module` cuts the embedding table and the output head over the vocabulary, attention over heads
and the feed-forward block over its width. LayerNorm stays an ordinary, replicated module, and all ranks
read the same batch. Residual dropout acts on replicated activations, so all ranks draw the same masks.

    torchrun --nproc-per-node 4 examples/dtensor_tp.py --tp 4
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def alibi_slopes(heads: int) -> Tensor:
    return 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)


class Attention(nn.Module):
    """Causal self-attention with ALiBi. `qkv` holds query, key and value head by head, so that a cut of its
    rows is a cut of the heads."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.first_head = 0  # of those this rank holds
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.register_buffer("slopes", alibi_slopes(heads), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        qkv = self.qkv(x).view(batch, seq, -1, 3, self.head_dim)
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(3))
        heads = q.size(1)
        position = torch.arange(seq, device=x.device)
        distance = position[:, None] - position[None, :]
        slopes = self.slopes[self.first_head : self.first_head + heads]
        bias = (-slopes[:, None, None] * distance).masked_fill(distance < 0, float("-inf"))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        return self.out(y.transpose(1, 2).reshape(batch, seq, -1))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.mlp = FeedForward(dim, 4 * dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class LanguageModel(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(args.vocab, args.dim)
        self.blocks = nn.ModuleList(Block(args.dim, args.heads, args.dropout) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.dim)
        self.head = nn.Linear(args.dim, args.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallelize(model: LanguageModel, mesh: DeviceMesh) -> None:
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        },
    )
    for block in model.blocks:
        plan = {
            "attention.qkv": ColwiseParallel(),
            "attention.out": RowwiseParallel(output_layouts=Replicate()),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(block, mesh, plan)
        local_heads = block.attention.slopes.numel() // mesh.size()
        block.attention.first_head = mesh.get_local_rank() * local_heads


def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Scales the gradients of DTensors and ordinary parameters alike; the norm before that."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norms = [torch.linalg.vector_norm(g) for g in grads]
    norm = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(scale)
    return norm


def random_tokens(args: argparse.Namespace, generator: torch.Generator) -> Tensor:
    """Sequences that count up by a random stride: (batch, seq + 1)."""
    start = torch.randint(args.vocab, (args.batch, 1), generator=generator)
    stride = torch.randint(1, 4, (args.batch, 1), generator=generator)
    return (start + stride * torch.arange(args.seq + 1)) % args.vocab


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = init_device_mesh(device, (args.tp,), mesh_dim_names=("tp",))

    torch.manual_seed(args.seed)
    model = LanguageModel(args).to(device)
    parallelize(model, mesh["tp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=False)
    generator = torch.Generator().manual_seed(args.seed + 1)

    for step in range(args.steps):
        tokens = random_tokens(args, generator).to(device)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = clip_grad_norm(model, args.clip)
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.6f}  grad norm {norm.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
