"""Masked language modelling with LAMB; linear layers are tensor parallel by DTensor's plan.

Data ranks average gradients by hand. LAMB scales the update of each matrix by the ratio of two norms;
of matrices that are cut over the tensor ranks the squares are summed over those ranks first.

    torchrun --nproc-per-node 4 examples/lamb.py --tp 2
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.output = nn.Linear(dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split_heads(f(x)) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.output(mixed))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    def __init__(self, vocab: int, seq: int, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(seq, dim)
        self.norm = nn.LayerNorm(dim)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(layers))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.tokens(ids) + self.positions.weight)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


PLAN = {
    "query": ColwiseParallel(),
    "key": ColwiseParallel(),
    "value": ColwiseParallel(),
    "output": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def is_cut(p: Tensor) -> bool:
    return isinstance(p, DTensor) and any(place.is_shard() for place in p.placements)


class Lamb(torch.optim.Optimizer):
    """LAMB on parameters some of which are cut over the ranks of `group`."""

    def __init__(self, params, lr, group, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.group = group

    def _direction(self, p: Tensor, options: dict) -> Tensor:
        """Adam's direction plus the decayed weight, of this rank's part of a parameter."""
        grad, weight, state = local(p.grad), local(p), self.state[p]
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
        state["step"] += 1
        beta1, beta2 = options["betas"]
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        mean = state["exp_avg"] / (1 - beta1 ** state["step"])
        variance = state["exp_avg_sq"] / (1 - beta2 ** state["step"])
        decay = options["weight_decay"] if p.ndim > 1 else 0.0
        return mean / (variance.sqrt() + options["eps"]) + decay * weight

    def _norms(self, params: list[Tensor], updates: list[Tensor]) -> Tensor:
        """(parameters, 2): norms of each whole parameter and of its whole update."""
        pairs = zip(params, updates)
        squares = torch.stack([torch.stack((local(p).square().sum(), u.square().sum())) for p, u in pairs])
        cut = torch.tensor([is_cut(p) for p in params], device=squares.device)
        summed = squares.clone()
        dist.all_reduce(summed, group=self.group)
        return torch.where(cut[:, None], summed, squares).sqrt()

    @torch.no_grad()
    def step(self) -> None:
        for options in self.param_groups:
            params = [p for p in options["params"] if p.grad is not None]
            updates = [self._direction(p, options) for p in params]
            for p, update, (weight, size) in zip(params, updates, self._norms(params, updates)):
                ratio = weight / (size + 1e-12) if p.ndim > 1 else 1.0
                local(p).sub_(options["lr"] * ratio * update)


def average_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    for p in model.parameters():
        grad = local(p.grad)
        dist.all_reduce(grad, group=mesh.get_group("dp"))
        grad.div_(mesh["dp"].size())


def masked_batches(args: argparse.Namespace, index: int, count: int, device: str):
    """The `index`-th of `count` parts of each global batch: masked tokens, targets (-100: not asked for)."""
    generator = torch.Generator().manual_seed(args.seed)
    mask_token = args.vocab - 1
    while True:
        start = torch.randint(args.vocab, (args.global_batch, 1), generator=generator)
        tokens = (start + torch.arange(args.seq) ** 2) % (args.vocab - 1)
        asked = torch.rand(tokens.shape, generator=generator) < 0.25
        ids, targets = tokens.masked_fill(asked, mask_token), tokens.masked_fill(~asked, -100)
        yield ids.chunk(count)[index].to(device), targets.chunk(count)[index].to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    device = "cuda" if use_cuda else "cpu"
    if use_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if use_cuda else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    dp_rank, dp_size = mesh.get_local_rank("dp"), mesh["dp"].size()

    torch.manual_seed(args.seed)
    model = Encoder(args.vocab, args.seq, args.dim, args.heads, args.layers).to(device)
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], PLAN)
    optimizer = Lamb(model.parameters(), args.lr, mesh.get_group("tp"))

    for step, (ids, targets) in zip(range(args.steps), masked_batches(args, dp_rank, dp_size, device)):
        count = (targets >= 0).sum().float()
        dist.all_reduce(count, group=mesh.get_group("dp"))
        losses = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="sum")
        loss = losses * dp_size / count  # gradients are averaged over the data ranks
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model, mesh)
        optimizer.step()

        logged = loss.detach() / dp_size
        dist.all_reduce(logged, group=mesh.get_group("dp"))
        weights = [p for p in model.parameters() if is_cut(p) and p.ndim > 1]
        squares = torch.stack([local(p).detach().square().sum() for p in weights]).sum()
        dist.all_reduce(squares, group=mesh.get_group("tp"))
        if dist.get_rank() == 0:
            print(f"step {step} loss {logged.item():.6f} weight norm {squares.sqrt().item():.6f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
