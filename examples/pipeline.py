"""A transformer in pipeline stages under torch.distributed.pipelining (1F1B), inside data parallelism.

Rank r is stage r // dp of pipeline r % dp. Stages of the same index average their gradients (DDP);
the gradient norm is that of the whole model.

    torchrun --nproc-per-node 4 examples/pipeline.py --pp 2
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """The whole model, or what `keep` left of it: a stage runs only the parts it has."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.tokens: nn.Module | None = nn.Embedding(args.vocab, args.width)
        self.positions: nn.Module | None = nn.Embedding(args.seq_len, args.width)
        blocks = {str(i): Block(args.width, args.heads) for i in range(args.layers)}
        self.blocks = nn.ModuleDict(blocks)
        self.norm: nn.Module | None = nn.LayerNorm(args.width)
        self.head: nn.Module | None = nn.Linear(args.width, args.vocab, bias=False)

    def keep(self, stage: int, stages: int) -> "Transformer":
        """Drop all that belongs to other stages."""
        if stage > 0:
            self.tokens = self.positions = None
        if stage < stages - 1:
            self.norm = self.head = None
        per_stage = len(self.blocks) // stages
        for index in range(len(self.blocks)):
            if index // per_stage != stage:
                del self.blocks[str(index)]
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Token ids for the first stage, hidden states for later ones; the last gives logits."""
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        if self.norm is not None:
            x = self.norm(x)
        return self.head(x) if self.head is not None else x


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def clip_gradients(model: nn.Module, limit: float, stages: dist.ProcessGroup) -> Tensor:
    """Clip by the norm over the parameters of all stages; return that norm."""
    gradients = [p.grad for p in model.parameters()]
    total = torch.nn.utils.get_total_norm(gradients) ** 2
    dist.all_reduce(total, group=stages)
    total = total.sqrt()
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), limit, total)
    return total


def train(args: argparse.Namespace, device: torch.device) -> None:
    dp = dist.get_world_size() // args.pp
    mesh = init_device_mesh(device.type, (args.pp, dp), mesh_dim_names=("pp", "dp"))
    stage_index, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    is_first, is_last = stage_index == 0, stage_index == args.pp - 1

    torch.manual_seed(args.seed)
    part = Transformer(args).keep(stage_index, args.pp).to(device)
    model = DistributedDataParallel(part, process_group=mesh.get_group("dp"))
    stage = PipelineStage(model, stage_index, args.pp, device, group=mesh.get_group("pp"))
    microbatches = args.microbatches or 2 * args.pp
    schedule = Schedule1F1B(stage, microbatches, loss_fn=cross_entropy, scale_grads=True)
    optimizer = torch.optim.AdamW(part.parameters(), lr=args.lr)

    for step in range(args.steps):
        generator = torch.Generator().manual_seed(args.seed + step)
        shape = (args.batch_size, args.seq_len + 1)
        batch = torch.randint(args.vocab, shape, generator=generator).chunk(dp)[replica].to(device)
        ids, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()

        optimizer.zero_grad()
        losses: list[Tensor] = []
        inputs = (ids,) if is_first else ()
        if is_last:
            schedule.step(*inputs, target=targets, losses=losses)
        else:
            schedule.step(*inputs)
        norm = clip_gradients(part, 0.3, mesh.get_group("pp"))
        optimizer.step()

        # only last stages know a loss
        loss = torch.stack(losses).mean().detach() / dp if is_last else norm.new_zeros(())
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.6f} grad norm {norm.item():.6f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--microbatches", type=int, help="of one pipeline; two a stage if not given")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences in the global batch")
    parser.add_argument("--seq-len", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    train(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
