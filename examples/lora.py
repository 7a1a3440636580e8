"""LoRA fine-tuning of a frozen tensor-parallel language model, data parallel by hand.

The adapter of a weight cut by its rows has its second factor cut, that of a weight cut by its columns its
first; the other factor, and the norms, which are trained too, are whole on all tp ranks. Adapter dropout has
one stream for whole activations and one for cut ones. Only answers count in the loss, not prompts.

    torchrun --nproc-per-node 4 examples/lora.py --tp 2
"""

import argparse
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Copy(torch.autograd.Function):
    """Into computation on parts of weights: identity, and its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: DeviceMesh) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return funcol.all_reduce(grad.contiguous(), "sum", ctx.tp), None


class Sum(torch.autograd.Function):
    """Out of computation on parts of weights: the sum over the ranks, and its gradient is passed on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: DeviceMesh) -> Tensor:
        return funcol.all_reduce(x.contiguous(), "sum", tp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def dropout(x: Tensor, p: float, generator: Generator) -> Tensor:
    keep = torch.rand(x.shape, generator=generator, device=x.device) >= p
    return x * keep / (1 - p)


def draw(rows: int, columns: int, std: float) -> Tensor:
    return torch.randn(rows, columns) * std


class LoRALinear(nn.Module):
    """A frozen weight cut along `dim` over tp, and the two factors of its update."""

    def __init__(self, inputs: int, outputs: int, dim: int, args: argparse.Namespace, tp: DeviceMesh) -> None:
        super().__init__()
        self.tp, self.dim, self.p, self.scale = tp, dim, args.dropout, args.alpha / args.rank
        weight = draw(outputs, inputs, inputs**-0.5)
        a, b = draw(args.rank, inputs, inputs**-0.5), torch.zeros(outputs, args.rank)
        self.weight = nn.Parameter(self.part(weight, dim), requires_grad=False)
        self.lora_a = nn.Parameter(self.part(a, 1) if dim == 1 else a)
        self.lora_b = nn.Parameter(self.part(b, 0) if dim == 0 else b)

    def part(self, whole: Tensor, dim: int) -> Tensor:
        return whole.chunk(self.tp.size(), dim)[self.tp.get_local_rank()].clone()


class ColumnLoRA(LoRALinear):
    """Of a whole activation, this rank's part of the outputs."""

    def forward(self, x: Tensor, streams: dict[str, Generator]) -> Tensor:
        base = F.linear(Copy.apply(x, self.tp), self.weight)
        low = F.linear(dropout(x, self.p, streams["whole"]), self.lora_a)
        return base + self.scale * F.linear(Copy.apply(low, self.tp), self.lora_b)


class RowLoRA(LoRALinear):
    """Of this rank's part of an activation, the whole output."""

    def forward(self, x: Tensor, streams: dict[str, Generator]) -> Tensor:
        base = Sum.apply(F.linear(x, self.weight), self.tp)
        low = F.linear(dropout(x, self.p, streams["cut"]), self.lora_a)
        return base + self.scale * F.linear(Sum.apply(low, self.tp), self.lora_b)


class Block(nn.Module):
    def __init__(self, args: argparse.Namespace, tp: DeviceMesh) -> None:
        super().__init__()
        dim, hidden = args.dim, 2 * args.dim
        self.head_dim = dim // args.heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.k, self.v = (ColumnLoRA(dim, dim, 0, args, tp) for _ in range(3))
        self.o = RowLoRA(dim, dim, 1, args, tp)
        self.up, self.down = ColumnLoRA(dim, hidden, 0, args, tp), RowLoRA(hidden, dim, 1, args, tp)

    def forward(self, x: Tensor, streams: dict[str, Generator]) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            w(y, streams).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2), streams)
        return x + self.down(F.silu(self.up(self.norm2(x), streams)), streams)


class LanguageModel(nn.Module):
    def __init__(self, args: argparse.Namespace, tp: DeviceMesh) -> None:
        super().__init__()
        self.embedding = nn.Parameter(draw(args.vocab, args.dim, 1.0), requires_grad=False)
        self.position = nn.Parameter(draw(args.seq, args.dim, 0.1), requires_grad=False)
        self.blocks = nn.ModuleList(Block(args, tp) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.dim)
        self.head = nn.Parameter(draw(args.vocab, args.dim, args.dim**-0.5), requires_grad=False)

    def forward(self, tokens: Tensor, streams: dict[str, Generator]) -> Tensor:
        x = F.embedding(tokens, self.embedding) + self.position
        for block in self.blocks:
            x = block(x, streams)
        return F.linear(self.norm(x), self.head)


def sum_over_data(model: nn.Module, dp: DeviceMesh) -> None:
    """One reduction for the gradients of all trained parameters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    flat = torch.cat([p.grad.flatten() for p in trained])
    flat = funcol.all_reduce(flat, "sum", dp)
    for p, grad in zip(trained, flat.split([p.numel() for p in trained])):
        p.grad = grad.view_as(p).clone()


def conversations(args: argparse.Namespace, step: int) -> tuple[Tensor, Tensor]:
    """Tokens (batch, seq + 1) and whether a token belongs to the answer, which begins at any place."""
    generator = torch.Generator().manual_seed(100 + step)
    start, stride = torch.randint(1, args.vocab, (2, args.batch, 1), generator=generator)
    place = torch.arange(args.seq + 1)
    answer = place >= torch.randint(2, args.seq, (args.batch, 1), generator=generator)
    return (start + stride * place) % args.vocab, answer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8, help="conversations of all ranks together")
    parser.add_argument("--seq", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=48)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rank", type=int, default=4, help="of the update of a weight")
    parser.add_argument("--alpha", type=float, default=8.0)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    dp_size = dist.get_world_size() // args.tp
    mesh = init_device_mesh(device, (dp_size, args.tp), mesh_dim_names=("dp", "tp"))
    dp, dp_rank = mesh["dp"], mesh.get_local_rank("dp")

    torch.manual_seed(args.seed)
    model = LanguageModel(args, mesh["tp"]).to(device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, weight_decay=0.0)
    streams = {
        "whole": torch.Generator(device).manual_seed(args.seed + 1 + dp_rank),
        "cut": torch.Generator(device).manual_seed(args.seed + 1 + dp_size + dist.get_rank()),
    }

    for step in range(args.steps):
        tokens, answer = (t[dp_rank::dp_size].to(device) for t in conversations(args, step))
        targets = tokens[:, 1:].masked_fill(~answer[:, 1:], -100)
        count = funcol.all_reduce(answer[:, 1:].sum(), "sum", dp)
        logits = model(tokens[:, :-1], streams)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count
        optimizer.zero_grad()
        loss.backward()
        sum_over_data(model, dp)
        optimizer.step()
        total = funcol.all_reduce(loss.detach(), "sum", dp).item()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {total:.6f}  perplexity {math.exp(total):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
