"""Hugging Face's LlamaForCausalLM with the tensor-parallel plan that it ships with."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import tensor_parallel
from transformers.distributed.configuration_utils import DistributedConfig

from spmdtypes.contracts import Program
from spmdtypes.notation import parse

HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, SEQ, BATCH, LAYERS = 16, 4, 2, 32, 24, 6, 4, 2
HEAD = HIDDEN // HEADS


class TensorParallelLlama(nn.Module):
    """Two layers with grouped-query attention; the loss is the mean next-token cross-entropy."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=FFN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            vocab_size=VOCAB,
            max_position_embeddings=SEQ,
            attn_implementation="eager",
            use_cache=False,
        )
        self.llama = LlamaForCausalLM(config)
        plan, _, _ = self.llama._resolve_parallel_plans(
            DistributedConfig(tp_size=mesh["tp"].size(), tp_plan="auto")
        )
        tensor_parallel.apply_tensor_parallelism(self.llama, mesh["tp"], plan)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.llama(input_ids=tokens, labels=labels).loss


def llama() -> Program:
    layer = {
        "input_layernorm.weight": f"f32[{HIDDEN}]",
        "post_attention_layernorm.weight": f"f32[{HIDDEN}]",
        "self_attn.q_proj.weight": f"f32[{HIDDEN}@tp, {HIDDEN}]",
        "self_attn.k_proj.weight": f"f32[{KV_HEADS * HEAD}@tp, {HIDDEN}]",
        "self_attn.v_proj.weight": f"f32[{KV_HEADS * HEAD}@tp, {HIDDEN}]",
        "self_attn.o_proj.weight": f"f32[{HIDDEN}, {HIDDEN}@tp]",
        "mlp.gate_proj.weight": f"f32[{FFN}@tp, {HIDDEN}]",
        "mlp.up_proj.weight": f"f32[{FFN}@tp, {HIDDEN}]",
        "mlp.down_proj.weight": f"f32[{HIDDEN}, {FFN}@tp]",
    }
    params = {
        "llama.model.embed_tokens.weight": f"f32[{VOCAB}@tp, {HIDDEN}]",
        "llama.model.norm.weight": f"f32[{HIDDEN}]",
        "llama.lm_head.weight": f"f32[{VOCAB}@tp, {HIDDEN}]",
    }
    for i in range(LAYERS):
        params |= {f"llama.model.layers.{i}.{name}": text for name, text in layer.items()}
    tokens = parse(f"i64[{BATCH}, {SEQ}] < {VOCAB}")
    return Program(
        name="hugging face llama",
        mesh={"tp": 2},
        build=TensorParallelLlama,
        inputs={"tokens": tokens, "labels": tokens},
        params={name: parse(text) for name, text in params.items()},
        output=parse("f32[]"),
    )


def _partial_output(style: Any, module: nn.Module, output: DTensor, mesh: Any) -> Tensor:
    """The boundary of a row-parallel layer without its sum; the gradient stays as it was."""
    return output.to_local(grad_placements=[Replicate()])


def _input_without_gradient_sum(
    style: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The boundary of a column-parallel layer; the partial gradient of the input is not summed."""
    x = DTensor.from_local(args[0], mesh, [Replicate()], run_check=False, grad_placements=[Partial()])
    return (x, *args[1:]), kwargs


_ROW, _COLUMN = tensor_parallel.RowwiseParallel, tensor_parallel.ColwiseParallel

REMOVALS = {
    "sum after row-parallel layers": partial(
        mock.patch.object, _ROW, "transform_output_post_forward", _partial_output
    ),
    "sum of column-parallel layers' input gradients": partial(
        mock.patch.object, _COLUMN, "transform_inputs_pre_forward", _input_without_gradient_sum
    ),
}
