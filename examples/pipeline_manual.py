"""A hand-written 1F1B pipeline by send and receive, inside data parallelism, with a tied embedding.

The first stage embeds tokens and the last one reads logits off the same matrix; each keeps a copy, and
the two sum their gradients. With --pp 1 one rank is both, and the copy is the matrix itself.

    torchrun --nproc-per-node 4 examples/pipeline_manual.py --pp 2
"""

import argparse
import os
from collections import deque

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class Groups:
    """Rank = replica * stages + stage. The groups of this rank."""

    def __init__(self, pp: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        self.stages, self.replicas = pp, world // pp
        self.replica, self.stage = divmod(rank, pp)
        self.is_first, self.is_last = self.stage == 0, self.stage == pp - 1
        for replica in range(self.replicas):
            ranks = list(range(replica * pp, (replica + 1) * pp))
            pipeline = dist.new_group(ranks)
            ends = dist.new_group(sorted({ranks[0], ranks[-1]}))
            if replica == self.replica:
                self.pipeline, self.ends = pipeline, ends
        for stage in range(pp):
            group = dist.new_group(list(range(stage, world, pp)))
            if stage == self.stage:
                self.data = group


class Neighbours:
    """Sends to and receives from the stages before and after; nothing at the ends of the pipeline."""

    def __init__(self, groups: Groups, shape: tuple[int, ...], like: Tensor) -> None:
        self.groups, self.shape, self.like = groups, shape, like

    def before(self, send: Tensor | None = None, receive: bool = False) -> Tensor | None:
        return None if self.groups.is_first else self.exchange(dist.get_rank() - 1, send, receive)

    def after(self, send: Tensor | None = None, receive: bool = False) -> Tensor | None:
        return None if self.groups.is_last else self.exchange(dist.get_rank() + 1, send, receive)

    def exchange(self, peer: int, send: Tensor | None, receive: bool) -> Tensor | None:
        ops = []
        if send is not None:
            ops.append(dist.P2POp(dist.isend, send.detach().contiguous(), peer))
        received = self.like.new_empty(self.shape) if receive else None
        if received is not None:
            ops.append(dist.P2POp(dist.irecv, received, peer))
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return received


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Stage(nn.Module):
    """Consecutive blocks, with the embedding before them on the first stage and after on the last."""

    def __init__(self, args: argparse.Namespace, groups: Groups) -> None:
        super().__init__()
        self.groups = groups
        # every part has a seed of its own, so it starts the same wherever it lives
        if groups.is_first or groups.is_last:
            torch.manual_seed(args.seed)
            self.word = nn.Embedding(args.vocab, args.width)
            nn.init.normal_(self.word.weight, std=0.1)
        if groups.is_first:
            self.position = nn.Embedding(args.seq_len, args.width)
            nn.init.normal_(self.position.weight, std=0.1)
        if groups.is_last:
            self.norm = nn.RMSNorm(args.width)
        per_stage = args.layers // groups.stages
        self.blocks = nn.ModuleDict()
        for layer in range(groups.stage * per_stage, (groups.stage + 1) * per_stage):
            torch.manual_seed(args.seed + 1 + layer)
            self.blocks[str(layer)] = Block(args.width, args.heads)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Hidden states, or on the last stage the loss summed over the tokens that have a target."""
        if self.groups.is_first:
            x = self.word(x) + self.position.weight
        for block in self.blocks.values():
            x = block(x)
        if not self.groups.is_last:
            return x
        logits = self.norm(x) @ self.word.weight.T
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def one_forward_one_backward(
    stage: Stage, microbatches: list[tuple[Tensor, Tensor]], neighbours: Neighbours, tokens: Tensor
) -> Tensor:
    """Accumulate the gradients of the mean loss over `tokens`; return this stage's share of the loss."""
    groups, total = stage.groups, tokens.new_zeros((), dtype=torch.get_default_dtype())
    waiting: deque[tuple[Tensor, Tensor]] = deque()

    def forward(index: int, x: Tensor | None) -> Tensor:
        ids, targets = microbatches[index]
        x = ids if x is None else x.requires_grad_()
        y = stage(x, targets)
        if groups.is_last:
            y = y / tokens
            total.add_(y.detach())
        waiting.append((x, y))
        return y

    def backward(grad: Tensor | None) -> Tensor | None:
        x, y = waiting.popleft()
        y.backward(grad)
        return x.grad

    count = len(microbatches)
    warmup = min(groups.stages - 1 - groups.stage, count)
    for index in range(warmup):
        neighbours.after(send=forward(index, neighbours.before(receive=True)))
    x = neighbours.before(receive=True) if warmup < count else None
    for index in range(warmup, count):
        grad = neighbours.after(send=forward(index, x), receive=True)
        x = neighbours.before(send=backward(grad), receive=index + 1 < count)
    for _ in range(warmup):
        neighbours.before(send=backward(neighbours.after(receive=True)))
    return total


def reduce_gradients(stage: Stage) -> None:
    """Sum the copies of the embedding over both ends, and everything over the replicas, in one bucket."""
    groups = stage.groups
    if groups.stages > 1 and (groups.is_first or groups.is_last):
        dist.all_reduce(stage.word.weight.grad, group=groups.ends)
    gradients = [p.grad for p in stage.parameters()]
    bucket = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(bucket, group=groups.data)
    for gradient, part in zip(gradients, bucket.split([g.numel() for g in gradients])):
        gradient.copy_(part.view_as(gradient))


def clip_gradients(stage: Stage, limit: float) -> Tensor:
    """Clip by the norm of the whole model, in which the tied embedding counts once."""
    groups = stage.groups
    counted = [p.grad for n, p in stage.named_parameters() if groups.is_first or n != "word.weight"]
    square = torch.stack([g.square().sum() for g in counted]).sum()
    dist.all_reduce(square, group=groups.pipeline)
    norm = square.sqrt()
    scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for parameter in stage.parameters():
        parameter.grad.mul_(scale)
    return norm


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences in the global batch")
    parser.add_argument("--microbatch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    groups = Groups(args.pp)
    stage = Stage(args, groups).to(device)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=args.lr)
    shape = (args.microbatch_size, args.seq_len, args.width)
    neighbours = Neighbours(groups, shape, next(stage.parameters()))

    for step in range(args.steps):
        generator = torch.Generator().manual_seed(args.seed + step)
        batch = torch.randint(args.vocab, (args.batch_size, args.seq_len + 1), generator=generator)
        ids, targets = batch[:, :-1], batch[:, 1:].clone()
        # what precedes the answer is read but not learnt
        prompts = torch.randint(1, args.seq_len // 2, (args.batch_size, 1), generator=generator)
        targets[torch.arange(args.seq_len) < prompts] = -100
        ids = ids.chunk(groups.replicas)[groups.replica].to(device)
        targets = targets.chunk(groups.replicas)[groups.replica].to(device)
        tokens = (targets != -100).sum()
        dist.all_reduce(tokens, group=groups.data)

        optimizer.zero_grad()
        parts = list(zip(ids.split(args.microbatch_size), targets.split(args.microbatch_size)))
        loss = one_forward_one_backward(stage, parts, neighbours, tokens)
        reduce_gradients(stage)
        norm = clip_gradients(stage, 0.5)
        optimizer.step()

        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.6f} grad norm {norm.item():.6f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
