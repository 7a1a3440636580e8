"""Programs made of Megatron-core's own layers, on the CPU."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

with warnings.catch_warnings():
    # Transformer Engine and Apex are absent, which Megatron-core says once a module
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer.transformer_config import TransformerConfig

from spmdtypes.contracts import Program
from spmdtypes.notation import parse
from tests.real.removal import no_all_reduce

HIDDEN, HEADS, FFN, VOCAB, SEQ, BATCH, LAYERS = 16, 4, 32, 24, 6, 4, 2


def start(mesh: Any) -> None:
    """Megatron's process-wide groups for `mesh`; a second start in a process replaces the first."""
    # buffers are made on the current CUDA device, which is the CPU here
    torch.cuda.current_device = lambda: torch.device("cpu")
    # there are no CUDA generators; dropout is 0 anyway
    initialize_rng_tracker(inference_rng_tracker=True)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=mesh["tp"].size(), create_gloo_process_groups=False
    )


def config(**options: Any) -> TransformerConfig:
    dtype = torch.get_default_dtype()
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,
        perform_initialization=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        **options,
    )


class ParallelMLP(nn.Module):
    """A replicated projection and norm, then Column- and RowParallelLinear, and a residual."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        start(mesh)
        made = {"config": config(), "init_method": nn.init.zeros_, "bias": True, "skip_bias_add": False}
        self.embed = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = tensor_parallel.ColumnParallelLinear(HIDDEN, FFN, gather_output=False, **made)
        self.down = tensor_parallel.RowParallelLinear(FFN, HIDDEN, input_is_parallel=True, **made)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.embed(x)
        y, _ = self.up(self.norm(h))
        y, _ = self.down(F.gelu(y))
        return F.mse_loss(h + y, target)


class ParallelVocabulary(nn.Module):
    """VocabParallelEmbedding, a norm, a column-parallel head, and vocab_parallel_cross_entropy."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        start(mesh)
        made = {"config": config(), "init_method": nn.init.zeros_}
        self.embed = tensor_parallel.VocabParallelEmbedding(VOCAB, HIDDEN, **made)
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = tensor_parallel.ColumnParallelLinear(
            HIDDEN, VOCAB, gather_output=False, bias=False, **made
        )

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits, _ = self.head(self.norm(self.embed(tokens)))
        return tensor_parallel.vocab_parallel_cross_entropy(logits, labels).mean()


class SmallGPT(nn.Module):
    """GPTModel with Megatron-core's local layer spec, rotary positions, an untied head."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        start(mesh)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.gpt = GPTModel(
                config=config(),
                transformer_layer_spec=get_gpt_layer_local_spec(),
                vocab_size=VOCAB,
                max_sequence_length=SEQ,
                position_embedding_type="rope",
                share_embeddings_and_output_weights=False,
            )

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        size = tokens.shape[1]
        positions = torch.arange(size).unsqueeze(0).expand_as(tokens)
        mask = torch.ones(1, 1, size, size, dtype=torch.bool).triu(1)
        return self.gpt(tokens, positions, mask, labels=labels).mean()


class SequenceParallel(nn.Module):
    """Embedding, norm, MLP and head of Megatron-core, cut along the sequence in between.

    Gradients of the norm and of the bias after a reduce-scatter are partial; `finalize_model_grads`
    of Megatron-core sums them after backward.
    """

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        start(mesh)
        made = {"config": config(sequence_parallel=mesh["tp"].size() > 1), "init_method": nn.init.zeros_}
        column = {"gather_output": False, "bias": False, **made}
        self.embed = tensor_parallel.VocabParallelEmbedding(
            VOCAB, HIDDEN, reduce_scatter_embeddings=True, **made
        )
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = tensor_parallel.ColumnParallelLinear(HIDDEN, FFN, **column)
        self.down = tensor_parallel.RowParallelLinear(
            FFN, HIDDEN, input_is_parallel=True, bias=True, skip_bias_add=False, **made
        )
        self.head = tensor_parallel.ColumnParallelLinear(HIDDEN, VOCAB, **column)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(tokens)  # sequence first
        y, _ = self.up(self.norm(h))
        y, _ = self.down(F.gelu(y))
        logits, _ = self.head(h + y)
        return tensor_parallel.vocab_parallel_cross_entropy(logits, labels.t().contiguous()).mean()


def _tokens() -> dict[str, Any]:
    text = f"i64[{BATCH}, {SEQ}] < {VOCAB}"
    return {"tokens": parse(text), "labels": parse(text)}


def mlp() -> Program:
    x = parse(f"f32[{BATCH}, {SEQ}, {HIDDEN}]")
    params = {
        "embed.weight": f"f32[{HIDDEN}, {HIDDEN}]",
        "norm.weight": f"f32[{HIDDEN}]",
        "norm.bias": f"f32[{HIDDEN}]",
        "up.weight": f"f32[{FFN}@tp, {HIDDEN}]",
        "up.bias": f"f32[{FFN}@tp]",
        "down.weight": f"f32[{HIDDEN}, {FFN}@tp]",
        "down.bias": f"f32[{HIDDEN}]",
    }
    return _program("megatron mlp", ParallelMLP, {"x": x, "target": x}, params)


def vocabulary() -> Program:
    params = {
        "embed.weight": f"f32[{VOCAB}@tp, {HIDDEN}]",
        "norm.weight": f"f32[{HIDDEN}]",
        "norm.bias": f"f32[{HIDDEN}]",
        "head.weight": f"f32[{VOCAB}@tp, {HIDDEN}]",
    }
    return _program("megatron vocabulary", ParallelVocabulary, _tokens(), params)


def gpt() -> Program:
    return _program("megatron gpt", SmallGPT, _tokens(), _gpt_params())


def sequence_parallel() -> Program:
    params = {
        "embed.weight": f"f32[{VOCAB}@tp, {HIDDEN}]",
        "norm.weight": f"f32[{HIDDEN}]",
        "norm.bias": f"f32[{HIDDEN}]",
        "up.weight": f"f32[{FFN}@tp, {HIDDEN}]",
        "down.weight": f"f32[{HIDDEN}, {FFN}@tp]",
        "down.bias": f"f32[{HIDDEN}]",
        "head.weight": f"f32[{VOCAB}@tp, {HIDDEN}]",
    }
    program = _program("megatron sequence parallel", SequenceParallel, _tokens(), params)
    return replace(program, grads={"tp": "sum"})


def _gpt_params() -> dict[str, str]:
    layer = {
        "input_layernorm.weight": f"f32[{HIDDEN}]",
        "input_layernorm.bias": f"f32[{HIDDEN}]",
        "pre_mlp_layernorm.weight": f"f32[{HIDDEN}]",
        "pre_mlp_layernorm.bias": f"f32[{HIDDEN}]",
        "self_attention.linear_qkv.weight": f"f32[{3 * HIDDEN}@tp, {HIDDEN}]",
        "self_attention.linear_qkv.bias": f"f32[{3 * HIDDEN}@tp]",
        "self_attention.linear_proj.weight": f"f32[{HIDDEN}, {HIDDEN}@tp]",
        "self_attention.linear_proj.bias": f"f32[{HIDDEN}]",
        "mlp.linear_fc1.weight": f"f32[{FFN}@tp, {HIDDEN}]",
        "mlp.linear_fc1.bias": f"f32[{FFN}@tp]",
        "mlp.linear_fc2.weight": f"f32[{HIDDEN}, {FFN}@tp]",
        "mlp.linear_fc2.bias": f"f32[{HIDDEN}]",
    }
    params = {
        "gpt.embedding.word_embeddings.weight": f"f32[{VOCAB}@tp, {HIDDEN}]",
        "gpt.output_layer.weight": f"f32[{VOCAB}@tp, {HIDDEN}]",
        "gpt.decoder.final_layernorm.weight": f"f32[{HIDDEN}]",
        "gpt.decoder.final_layernorm.bias": f"f32[{HIDDEN}]",
    }
    for i in range(LAYERS):
        params |= {f"gpt.decoder.layers.{i}.{name}": text for name, text in layer.items()}
    return params


def _program(name: str, build: Any, inputs: dict[str, Any], params: dict[str, str]) -> Program:
    return Program(
        name=name,
        mesh={"tp": 2},
        build=build,
        inputs=inputs,
        params={key: parse(text) for key, text in params.items()},
        output=parse("f32[]"),
    )


def _own_part(x: Tensor, group: Any, *_: Any, **__: Any) -> Tensor:
    """What a reduce-scatter leaves when nothing is reduced."""
    return mappings._split_along_first_dim(x, group)


_INPUT_GRADIENT = "LinearWithGradAccumulationAndAsyncCommunication.backward"
_CROSS_ENTROPY = "_VocabParallelCrossEntropy.forward"

REMOVALS = {
    "sum after a row-parallel layer or the embedding": partial(no_all_reduce, "_reduce"),
    "sum of a column-parallel layer's input gradient": partial(no_all_reduce, _INPUT_GRADIENT),
    "sum in a reduce-scatter": partial(
        mock.patch.object, mappings, "_reduce_scatter_along_first_dim", _own_part
    ),
    "maximum of the logits": partial(no_all_reduce, _CROSS_ENTROPY, 0),
    "sum of the predicted logits": partial(no_all_reduce, _CROSS_ENTROPY, 1),
    "sum of the exponentials": partial(no_all_reduce, _CROSS_ENTROPY, 2),
}
