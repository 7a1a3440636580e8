"""Megatron-core's GPTModel with tensor, sequence and data parallelism, trained by a loop of one's own.

Megatron's DistributedDataParallel sums gradients over the data ranks while backward runs, and
`finalize_model_grads` does the rest: gradients that are partial under sequence parallelism, and the division
by the number of tokens of the global batch. A data rank has a fixed number of micro-batches of its own.

    torchrun --nproc-per-node 4 examples/megatron_gpt.py --tp 2 --sequence-parallel
"""

import argparse
import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences of a data rank at a time")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--sequence", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=2.7)
    parser.add_argument("--seed", type=int, default=1234)
    return parser.parse_args()


class Norm(nn.LayerNorm):
    """LayerNorm that tells `finalize_model_grads` when it sees a part of the sequence only.

    Stands in for the fused one of Apex, which needs a GPU.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


def start(args: argparse.Namespace) -> torch.device:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        # Megatron makes its buffers on the current CUDA device
        torch.cuda.current_device = lambda: torch.device("cpu")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tp, create_gloo_process_groups=False
    )
    torch.manual_seed(args.seed)
    if cuda:
        tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    else:
        tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    return torch.device("cuda") if cuda else torch.device("cpu")


def build_model(args: argparse.Namespace, device: torch.device) -> DistributedDataParallel:
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=args.tp,
        sequence_parallel=args.sequence_parallel and args.tp > 1,
        calculate_per_token_loss=True,
    )
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = Norm
    layer.submodules.pre_mlp_layernorm = Norm
    model = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules([layer] * args.layers, layer_norm=Norm),
        vocab_size=args.vocab,
        max_sequence_length=args.sequence,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True,
    ).to(device)
    overlapped = DistributedDataParallelConfig(overlap_grad_reduce=True)
    return DistributedDataParallel(config, overlapped, model)


def data(args: argparse.Namespace) -> Iterator[list[Tensor]]:
    """Micro-batches of this data rank: sequences of a random walk, and how many of their targets count."""
    generator = torch.Generator().manual_seed(args.seed)
    count = 256
    walk = torch.randint(-2, 4, (count, args.sequence + 1), generator=generator).cumsum(1)
    lengths = torch.randint(args.sequence // 2, args.sequence + 1, (count,), generator=generator)
    dataset = TensorDataset(walk % args.vocab, lengths)
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset,
        num_replicas=parallel_state.get_data_parallel_world_size(),
        rank=parallel_state.get_data_parallel_rank(),
        seed=args.seed,
    )
    while True:
        yield from DataLoader(dataset, batch_size=args.micro_batch, sampler=sampler, drop_last=True)


def forward_step(model: nn.Module, batch: list[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """The summed loss of a micro-batch and the number of its tokens."""
    walk, lengths = (t.to(device) for t in batch)
    tokens, labels = walk[:, :-1].contiguous(), walk[:, 1:].contiguous()
    size = tokens.shape[1]
    positions = torch.arange(size, device=device).expand_as(tokens)
    causal = torch.ones(1, 1, size, size, dtype=torch.bool, device=device).triu(1)
    losses = model(tokens, positions, causal, labels=labels)
    counted = positions < lengths[:, None]
    return (losses * counted).sum(), counted.sum()


@torch.no_grad()
def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """Scales `main_grad` down to a total norm of `limit`; returns the norm before that."""
    gradients = [p.main_grad for p in model.parameters()]
    # what every tensor parallel rank has alike is counted by the first
    counted = [p for p in model.parameters() if tensor_parallel.param_is_not_tensor_parallel_duplicate(p)]
    square = torch.zeros((), device=gradients[0].device)
    for parameter in counted:
        square += parameter.main_grad.pow(2).sum()
    dist.all_reduce(square, group=parallel_state.get_tensor_model_parallel_group())
    norm = square.sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return norm


def train_step(
    model: DistributedDataParallel, batches: Iterator[list[Tensor]], count: int, device: torch.device
) -> Tensor:
    """Leaves the gradient of the mean loss per token in `main_grad`; returns that loss."""
    model.zero_grad_buffer()
    total = torch.zeros((), device=device)
    tokens = torch.zeros((), dtype=torch.int, device=device)
    for i in range(count):
        last = i == count - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss, counted = forward_step(model, next(batches), device)
            loss.backward()
        total += loss.detach()
        tokens += counted
    # sums the number of tokens over the data ranks in place
    finalize_model_grads([model], tokens)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total / tokens


def main() -> None:
    args = parse_args()
    device = start(args)
    model = build_model(args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    batches = data(args)
    for step in range(args.steps):
        loss = train_step(model, batches, args.accumulate, device)
        norm = clip_gradients(model, args.clip)
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.6f} grad norm {norm.item():.6f}", flush=True)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
