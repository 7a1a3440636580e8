"""A mixture-of-experts language model: every rank has its own data, experts are cut over the ep axis.

Tokens travel to the ranks of their top-k experts and back by all-to-alls whose splits depend on the
router; a load-balance loss keeps the experts of the whole batch evenly used.

    torchrun --nproc-per-node 4 examples/moe_ep.py --ep 2
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Experts(nn.Module):
    """This rank's share of the experts, each a two-layer network."""

    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh) -> None:
        super().__init__()
        self.local = args.experts // mesh.size()

        def weights(rows: int, columns: int) -> nn.Parameter:
            full = torch.randn(args.experts, rows, columns) / rows**0.5
            return nn.Parameter(full.chunk(mesh.size())[mesh.get_local_rank()].clone())

        self.up = weights(args.width, args.expert_width)
        self.down = weights(args.expert_width, args.width)

    def forward(self, tokens: Tensor, counts: list[int]) -> Tensor:
        """Tokens lie in the order of this rank's experts, `counts[i]` of them for expert i."""
        parts = tokens.split(counts)
        return torch.cat([F.silu(t @ up) @ down for t, up, down in zip(parts, self.up, self.down)])


class MoE(nn.Module):
    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh) -> None:
        super().__init__()
        self.ep, self.top_k, self.total = mesh, args.top_k, args.experts
        self.router = nn.Linear(args.width, args.experts, bias=False)
        self.experts = Experts(args, mesh)
        self.balance_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        probabilities = self.router(tokens).softmax(dim=-1)
        gates, chosen = probabilities.topk(self.top_k, dim=-1)
        gates = gates / gates.sum(dim=-1, keepdim=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.total)
        self.balance_loss = self.balance(probabilities, counts)

        order = chosen.flatten().argsort(stable=True)
        rows = order // self.top_k
        done = self.exchange(tokens[rows], counts)
        weighted = done * gates.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, rows, weighted).view_as(x)

    def balance(self, probabilities: Tensor, counts: Tensor) -> Tensor:
        """This rank's share of: experts * sum over experts of (share of tokens * mean probability)."""
        shares = counts.to(probabilities.dtype)
        dist.all_reduce(shares)
        shares = shares / shares.sum()
        tokens = len(probabilities) * dist.get_world_size()
        return self.total * (shares * probabilities.sum(dim=0)).sum() / tokens

    def exchange(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Send tokens, ordered by expert, to the ranks of their experts; give back the results."""
        ranks, local = self.ep.size(), self.experts.local
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.ep.get_group())
        sends = counts.view(ranks, local).sum(dim=1).tolist()
        receives = arriving.view(ranks, local).sum(dim=1).tolist()
        received = all_to_all_single_autograd(tokens, receives, sends, self.ep.get_group())

        # they arrive ordered by sender, then by expert; the experts want all senders together
        experts = torch.arange(local, device=tokens.device).repeat(ranks).repeat_interleave(arriving)
        order = experts.argsort(stable=True)
        done = self.experts(received[order], arriving.view(ranks, local).sum(dim=0).tolist())
        return all_to_all_single_autograd(done[order.argsort()], sends, receives, self.ep.get_group())


class Block(nn.Module):
    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh) -> None:
        super().__init__()
        self.heads = args.heads
        self.norm1, self.norm2 = nn.LayerNorm(args.width), nn.LayerNorm(args.width)
        self.qkv = nn.Linear(args.width, 3 * args.width)
        self.proj = nn.Linear(args.width, args.width)
        self.moe = MoE(args, mesh)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.moe(self.norm2(x))


class Model(nn.Module):
    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh) -> None:
        super().__init__()
        self.tokens = nn.Embedding(args.vocab, args.width)
        self.positions = nn.Parameter(torch.randn(args.seq_len, args.width) * 0.02)
        self.blocks = nn.ModuleList(Block(args, mesh) for _ in range(args.layers))
        self.head = nn.Linear(args.width, args.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def reduce_gradients(model: nn.Module, replicas: dist.ProcessGroup) -> None:
    """Experts already have the gradients of their ep group's tokens; all else has its own rank's."""
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad, group=replicas if ".experts." in name else None)


def clip(model: nn.Module, ep: dist.ProcessGroup, limit: float) -> Tensor:
    """Scale gradients down to the norm `limit` of the whole model; return the norm they had."""
    experts, shared = [], []
    for name, parameter in model.named_parameters():
        (experts if ".experts." in name else shared).append(parameter.grad.pow(2).sum())
    of_experts = torch.stack(experts).sum()
    dist.all_reduce(of_experts, group=ep)
    norm = (of_experts + torch.stack(shared).sum()).sqrt()
    for parameter in model.parameters():
        parameter.grad.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ep", type=int, default=1, help="ranks the experts are cut over")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=2, help="sequences of one rank")
    parser.add_argument("--seq-len", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--expert-width", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--balance", type=float, default=0.05, help="weight of the load-balance loss")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world // args.ep, args.ep), mesh_dim_names=("dp", "ep"))

    torch.manual_seed(args.seed)
    model = Model(args, mesh["ep"]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    generator = torch.Generator().manual_seed(args.seed + 1000 * (rank + 1))

    for step in range(args.steps):
        shape = (args.batch_size, args.seq_len + 1)
        ids = torch.randint(args.vocab, shape, generator=generator).to(device)
        logits = model(ids[:, :-1])
        cross_entropy = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) / world
        balance = torch.stack([block.moe.balance_loss for block in model.blocks]).sum()
        loss = cross_entropy + args.balance * balance

        optimizer.zero_grad()
        loss.backward()
        reduce_gradients(model, mesh.get_group("dp"))
        norm = clip(model, mesh.get_group("ep"), 0.5)
        optimizer.step()

        metrics = torch.stack([cross_entropy, balance]).detach()
        dist.all_reduce(metrics)
        if rank == 0:
            print(f"step {step} loss {metrics[0]:.6f} balance {metrics[1]:.6f} grad norm {norm:.6f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
