"""Hugging Face's Mixtral with its tensor-parallel plan, experts balanced over the global batch.

Each data rank draws its own batches and averages gradients with hooks that start as soon as a gradient is
there. The balancing loss is that of the global batch: tokens per expert are counted over all data ranks, of
which each adds its share of the router's probabilities.

    torchrun --nproc-per-node 4 examples/hf_mixtral.py --tp 2
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    parser.add_argument("--batch", type=int, default=4, help="sequences per step and data rank")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--sequence", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--jitter", type=float, default=0.01, help="noise on what the router sees")
    parser.add_argument("--balance", type=float, default=0.1, help="weight of the balancing loss")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def build_model(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """The same initial weights on every rank, of which a tensor parallel rank then keeps its part."""
    torch.manual_seed(args.seed)
    config = MixtralConfig(
        hidden_size=args.hidden,
        intermediate_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=args.experts,
        num_experts_per_tok=args.top_k,
        router_jitter_noise=args.jitter,
        vocab_size=args.vocab,
        max_position_embeddings=args.sequence,
        attn_implementation="eager",
        experts_implementation="eager",
        use_cache=False,
    )
    model = MixtralForCausalLM(config).to(device)
    distributed = DistributedConfig(tp_size=mesh["tp"].size(), tp_plan="auto")
    plan, _, _ = model._resolve_parallel_plans(distributed)
    apply_tensor_parallelism(model, mesh["tp"], plan)
    return model


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class GradientAverager:
    """Averages each gradient over `group` from a hook, while the backward of earlier layers goes on."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self.group = group
        self.works: list[dist.Work] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.start)

    def start(self, parameter: Tensor) -> None:
        gradient = local(parameter.grad)
        gradient.div_(self.group.size())
        self.works.append(dist.all_reduce(gradient, group=self.group, async_op=True))

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()


def batch(args: argparse.Namespace, step: int, data_rank: int) -> tuple[Tensor, Tensor]:
    """Sequences that count up by a stride of their own, and what follows each token."""
    sequences = []
    for i in range(args.batch):
        sample = (step * 1_000_000) + data_rank * args.batch + i
        generator = torch.Generator().manual_seed(args.seed + 7 * sample)
        first, stride = torch.randint(1, args.vocab, (2,), generator=generator).tolist()
        sequences.append((first + stride * torch.arange(args.sequence + 1)) % args.vocab)
    tokens = torch.stack(sequences)
    return tokens[:, :-1], tokens[:, 1:]


def balancing_loss(
    logits: tuple[Tensor, ...], args: argparse.Namespace, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Of each data rank a share; their mean is the loss. Also the tokens per expert of the global batch."""
    probabilities = torch.stack([layer.float().softmax(-1) for layer in logits])
    chosen = probabilities.topk(args.top_k, dim=-1).indices
    counts = F.one_hot(chosen, args.experts).sum((1, 2)).float()
    dist.all_reduce(counts, group=group)
    fractions = counts / counts.sum(-1, keepdim=True)
    share = args.experts * (fractions * probabilities.mean(1)).sum(-1)
    return share.mean(), counts


def main() -> None:
    args = parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    shape = (dist.get_world_size() // args.tp, args.tp)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))
    dp = mesh.get_group("dp")
    data_rank = dist.get_rank(dp)

    model = build_model(args, mesh, device)
    averager = GradientAverager(model, dp)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    # the router's noise: alike where tensor parallel ranks share activations
    torch.manual_seed(args.seed + 1 + data_rank)
    model.train()
    for step in range(args.steps):
        tokens, labels = (t.to(device) for t in batch(args, step, data_rank))
        out = model(input_ids=tokens, output_router_logits=True)
        loss = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
        balance, counts = balancing_loss(out.router_logits, args, dp)
        optimizer.zero_grad()
        (loss + args.balance * balance).backward()
        averager.wait()
        optimizer.step()

        logged = torch.stack([loss.detach(), balance.detach()]) / dp.size()
        dist.all_reduce(logged, group=dp)
        load = (counts / counts.mean(-1, keepdim=True)).max()
        if dist.get_rank() == 0:
            language, balanced = logged.tolist()
            print(
                f"step {step} loss {language:.6f} balance {balanced:.6f} peak {load.item():.4f}", flush=True
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
