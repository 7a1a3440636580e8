"""Values that hold only on the ranks that own them: numeric ground truth on simulated ranks.

Each program is recorded on one axis of several ranks and on one rank; every value the rules claim
a placement for is compared with what that placement says of the reference value.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spmdtypes import lockstep
from spmdtypes.capture.align import align
from spmdtypes.capture.fake import capture
from spmdtypes.checker import input_denotations, representative_ranks
from spmdtypes.contracts import Program
from spmdtypes.core.infer import infer
from spmdtypes.core.simulate import coordinates, local_indices
from spmdtypes.graph import Ref
from spmdtypes.notation import parse
from spmdtypes.ops import registry

VOCAB, TOKENS = 12, 5
REDUCE = {"sum": lambda t: t.sum(0), "max": lambda t: t.amax(0), "min": lambda t: t.amin(0)}


class Model(nn.Module):
    def __init__(self, mesh, f):
        super().__init__()
        self.group, self.f = mesh.get_group("tp"), f

    def forward(self, **inputs):
        world, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        return self.f(world, rank, self.group, **inputs)


def program(f, inputs, n):
    types = {k: parse(v) for k, v in inputs.items()}
    return Program(name=f.__name__, mesh={"tp": n}, build=lambda mesh: Model(mesh, f), inputs=types)


def recorded(made):
    """(local graph, reference graph)"""
    mesh = dict(made.mesh)
    ones = capture(made, dict.fromkeys(mesh, 1), 0)
    others = [capture(made, mesh, r) for r in representative_ranks(mesh)[1:]]
    return align(capture(made, mesh, 0), ones, others).graph, ones


def feed(made, dens):
    generator = torch.Generator().manual_seed(0)
    whole = {}
    for name, t in made.inputs.items():
        shape = [int(d.size) for d in t.dims]
        if t.limit is not None:
            whole[name] = torch.randint(t.limit, shape, generator=generator)
        else:
            whole[name] = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5

    def local(node, coords):
        if node.op == "const":
            return torch.tensor(node.args[0][0] if node.args else 0.0).expand(node.outs[0].shape).clone()
        x = whole[node.name].flatten()
        den = dens.get(node.name)
        return (x[local_indices(den, coords)] if den and coords else x).reshape(node.outs[0].shape)

    return local


def holds(den, values, reference, mesh):
    """Do the ranks' values make up the reference value as `den` says?"""
    scale = den.scale_in(mesh)
    groups = {}
    for coords, value in zip(coordinates(mesh), values, strict=True):
        key = tuple(c for a, c in coords.items() if a not in den.partial)
        groups.setdefault(key, (coords, []))[1].append(value.double().flatten())
    for coords, parts in groups.values():
        got = scale * REDUCE[den.op or "sum"](torch.stack(parts if den.partial else parts[:1]))
        want = reference.double().flatten()[local_indices(den, coords)]
        if not torch.allclose(got, want, atol=1e-9):
            return False
    return True


def checked(f, n=2, **inputs):
    """What each result of `f` denotes (None: no reading), after comparing every claim with numbers."""
    made = program(f, inputs, n)
    graph, ones = recorded(made)
    dens = input_denotations(made, graph, graph.mesh)
    found = infer(graph, dens, registry.build)
    read = feed(made, dens)
    here = lockstep.simulate(graph, read)
    there = lockstep.simulate(ones, lambda node, _: read(node, {}))
    for ref, den in found.values.items():
        node = graph.nodes[ref.node]
        claimed = ref not in found.problems and not den.varying and all(a == b for _, a, b in den.layout.open)
        if claimed and node.ref is not None and ref in here:
            reference = there[Ref(node.ref, ref.out)][0]
            assert holds(den, here[ref], reference, graph.mesh), f"{node.op} {node.args}: not {den}"
    ref = graph.outputs["output"]
    return None if ref in found.problems or found.values[ref].varying else str(found.values[ref])


# -- programs -----------------------------------------------------------------------------------


def masked(world, rank, ids, rows):
    """(which ids another rank owns, the position of the others in the own block)"""
    first = rank * rows
    foreign = (ids < first) | (ids >= first + rows)
    return foreign, (ids - first).masked_fill(foreign, 0)


def target_logit(world, rank, group, logits, labels):
    foreign, local = masked(world, rank, labels, logits.shape[-1])
    return logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(foreign, 0.0)


def target_logit_along(world, rank, group, logits, labels):
    foreign, local = masked(world, rank, labels, logits.shape[-1])
    return torch.take_along_dim(logits, local.unsqueeze(-1), -1).squeeze(-1) * (~foreign)


def target_logit_indexed(world, rank, group, logits, labels):
    foreign, local = masked(world, rank, labels, logits.shape[-1])
    picked = logits[torch.arange(logits.shape[0]), local].clone()
    picked[foreign] = 0.0
    return picked


def one_hot_scattered(world, rank, group, logits, labels):
    foreign, local = masked(world, rank, labels, logits.shape[-1])
    ones = 1.0 - foreign.unsqueeze(-1).to(logits.dtype)
    return torch.zeros_like(logits).scatter_(-1, local.unsqueeze(-1), ones)


def one_hot_added(world, rank, group, logits, labels):
    foreign, local = masked(world, rank, labels, logits.shape[-1])
    ones = (~foreign).unsqueeze(-1).to(logits.dtype)
    return torch.zeros_like(logits).scatter_add_(-1, local.unsqueeze(-1), ones)


def one_hot_compared(world, rank, group, logits, labels):
    rows = logits.shape[-1]
    foreign, local = masked(world, rank, labels, rows)
    return (local.unsqueeze(-1) == torch.arange(rows)).to(logits.dtype) * (~foreign).unsqueeze(-1)


def one_hot_by_offset(world, rank, group, logits, labels):
    rows = logits.shape[-1]
    return (labels.unsqueeze(-1) == torch.arange(rows) + rank * rows).to(logits.dtype)


def megatron_gradient(world, rank, group, logits, labels):
    """The backward pass of Megatron-core's vocabulary-parallel cross entropy."""
    foreign, local = masked(world, rank, labels, logits.shape[-1])
    grad = logits.clone().view(-1, logits.shape[-1])
    grad[torch.arange(grad.shape[0]), local.view(-1)] -= 1.0 - foreign.view(-1).float()
    return grad


def megatron_gradient_accumulated(world, rank, group, logits, labels):
    foreign, local = masked(world, rank, labels, logits.shape[-1])
    at = (torch.arange(logits.shape[0]), local)
    return logits.index_put(at, foreign.to(logits.dtype) - 1.0, accumulate=True)


def smoothed_gradient(world, rank, group, logits, labels):
    """With label smoothing, as Megatron-core writes it."""
    foreign, local = masked(world, rank, labels, logits.shape[-1])
    vocabulary = logits.shape[-1] * world
    grad, at = logits.clone(), torch.arange(logits.shape[0])
    smoothing = 0.1 * vocabulary / (vocabulary - 1)
    grad[at, local] -= (1.0 - smoothing) * (1.0 - foreign.float())
    return grad - smoothing / vocabulary


def embedding_gradient(world, rank, group, grad, ids, weight):
    foreign, local = masked(world, rank, ids, weight.shape[0])
    kept = grad.masked_fill(foreign.unsqueeze(-1), 0.0)
    return torch.ops.aten.embedding_dense_backward(kept, local, weight.shape[0], -1, False)


def rows_added(world, rank, group, grad, ids, weight):
    foreign, local = masked(world, rank, ids, weight.shape[0])
    kept = grad * (~foreign).unsqueeze(-1)
    return torch.zeros_like(weight).index_add(0, local, kept)


def rows_put(world, rank, group, grad, ids, weight):
    foreign, local = masked(world, rank, ids, weight.shape[0])
    kept = torch.where(foreign.unsqueeze(-1), 0.0, grad)
    return torch.zeros_like(weight).index_put((local,), kept, accumulate=True)


def clamped_rows(world, rank, group, ids, weight):
    """The position clamped into the block, foreign rows zeroed afterwards."""
    rows = weight.shape[0]
    local = ids - rank * rows
    own = (local >= 0) & (local < rows)
    return weight[local.clamp(0, rows - 1)] * own.unsqueeze(-1)


def owned_positions(world, rank, group, ids, weight):
    return (~masked(world, rank, ids, weight.shape[0])[0]).float()


def padded(world, rank, group, x):
    return nn.functional.pad(x, (rank * x.shape[1], (world - 1 - rank) * x.shape[1]))


def padded_rows(world, rank, group, x):
    return nn.functional.pad(x, (0, 0, rank * x.shape[0], (world - 1 - rank) * x.shape[0])).t().sum(0)


def kept_by_the_first(world, rank, group, x):
    return torch.where(torch.full((), rank) == 0, x, 0.0)


LOSS = {"logits": f"f32[{TOKENS} {VOCAB}@tp]", "labels": f"i64[{TOKENS}] < {VOCAB}"}
ROWS = {"ids": f"i64[{TOKENS}] < {VOCAB}", "weight": f"f32[{VOCAB}@tp 3]"}
GRAD = {"grad": f"f32[{TOKENS} 3]"} | ROWS


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    ("f", "inputs", "result"),
    [
        (target_logit, LOSS, "5 | tp:P"),
        (target_logit_along, LOSS, "5 | tp:P"),
        (target_logit_indexed, LOSS, "5 | tp:P"),
        (one_hot_scattered, LOSS, "5 12@tp"),
        (one_hot_added, LOSS, "5 12@tp"),
        (one_hot_compared, LOSS, "5 12@tp"),
        (one_hot_by_offset, LOSS, "5 12@tp"),
        (megatron_gradient, LOSS, "5 12@tp"),
        (megatron_gradient_accumulated, LOSS, "5 12@tp"),
        (smoothed_gradient, LOSS, "5 12@tp"),
        (embedding_gradient, GRAD, "12@tp 3"),
        (rows_added, GRAD, "12@tp 3"),
        (rows_put, GRAD, "12@tp 3"),
        (clamped_rows, ROWS, "5 3 | tp:P"),
        (padded, {"x": "f32[4 12@tp]"}, "4 12 | tp:P"),
        (padded_rows, {"x": "f32[12@tp 4]"}, "12 | tp:P"),
        (kept_by_the_first, {"x": "f32[4 3]"}, "4 3 | tp:P"),
    ],
)
def test_owned_blocks(f, inputs, result, n):
    assert checked(f, n, **inputs) == result


# -- and what breaks them -----------------------------------------------------------------------


def spurious_one_hot(world, rank, group, logits, labels):
    """Every rank hits its position 0 for the ids of the others."""
    _, local = masked(world, rank, labels, logits.shape[-1])
    return torch.zeros_like(logits).scatter(-1, local.unsqueeze(-1), 1.0)


def unmasked_embedding_gradient(world, rank, group, grad, ids, weight):
    _, local = masked(world, rank, ids, weight.shape[0])
    return torch.ops.aten.embedding_dense_backward(grad, local, weight.shape[0], -1, False)


def unmasked_logit(world, rank, group, logits, labels):
    _, local = masked(world, rank, labels, logits.shape[-1])
    return logits.gather(-1, local.unsqueeze(-1)).squeeze(-1)


def mask_of_other_ids(world, rank, group, grad, ids, weight):
    """The gradient is zeroed by the mask of the ids in another order."""
    foreign, _ = masked(world, rank, ids.flip(0), weight.shape[0])
    _, local = masked(world, rank, ids, weight.shape[0])
    return torch.zeros_like(weight).index_add(0, local, grad.masked_fill(foreign.unsqueeze(-1), 0.0))


def summed_positions(world, rank, group, ids, weight):
    """Positions in a block are not the global ones, masked or not."""
    foreign, local = masked(world, rank, ids, weight.shape[0])
    return local.masked_fill(foreign, 0)


def weighted_by_position(world, rank, group, ids, weight):
    foreign, local = masked(world, rank, ids, weight.shape[0])
    return local * (~foreign).float()


def clamped_to_one_block(world, rank, group, x, ids):
    """The reference clamps to the bounds of one block, too."""
    local = ids - rank * 3
    own = (local >= 0) & (local < 3)
    return torch.where(own, local.clamp(0, 2), 0)


def masked_in_the_reference(world, rank, group, ids, weight):
    """Ids of the upper half count nowhere in the reference, on every rank but one here."""
    first = rank * weight.shape[0]
    return torch.where((ids >= first) & (ids < first + 6), 1.0, 0.0)


def padded_at_another_place(world, rank, group, x):
    return nn.functional.pad(x, ((world - 1 - rank) * x.shape[1], rank * x.shape[1]))


def product_of_padded(world, rank, group, x, y):
    return padded(world, rank, group, x).t() @ y


def padded_with_ones(world, rank, group, x):
    return nn.functional.pad(x, (rank * x.shape[1], (world - 1 - rank) * x.shape[1]), value=1.0)


def padded_and_joined(world, rank, group, x):
    return torch.cat([padded(world, rank, group, x), torch.ones(1, x.shape[1] * world)])


def update_of_all(world, rank, group, logits, labels):
    """The mask is forgotten: rank 0's first column is lowered for foreign labels."""
    _, local = masked(world, rank, labels, logits.shape[-1])
    grad = logits.clone()
    grad[torch.arange(grad.shape[0]), local] -= 1.0
    return grad


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    ("f", "inputs"),
    [
        (spurious_one_hot, LOSS),
        (unmasked_embedding_gradient, GRAD),
        (unmasked_logit, LOSS),
        (mask_of_other_ids, GRAD),
        (summed_positions, ROWS),
        (weighted_by_position, ROWS),
        (clamped_to_one_block, {"x": "f32[12@tp]", "ids": f"i64[{TOKENS}] < {VOCAB}"}),
        (masked_in_the_reference, ROWS),
        (padded_at_another_place, {"x": "f32[4 12@tp]"}),
        (product_of_padded, {"x": "f32[4 12@tp]", "y": "f32[4 12@tp]"}),
        (padded_with_ones, {"x": "f32[4 12@tp]"}),
        (padded_and_joined, {"x": "f32[4 12@tp]"}),
        (update_of_all, LOSS),
    ],
)
def test_no_reading(f, inputs, n):
    assert checked(f, n, **inputs) is None
