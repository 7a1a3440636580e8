"""The stable codes. A code keeps its meaning for ever; families are by the first digit."""

from __future__ import annotations

from dataclasses import dataclass

FAMILIES = {
    "1": "forward types",
    "2": "backward and gradients",
    "3": "scale",
    "4": "layout and axes",
    "5": "random numbers",
    "6": "collectives that differ between ranks",
    "7": "optimizer, state and metrics",
    "8": "precision",
    "9": "what could not be checked",
}


@dataclass(frozen=True, slots=True)
class Code:
    """`title` completes "this program has a ..."; `meaning` is one paragraph for `explain`."""

    name: str
    title: str
    meaning: str

    @property
    def family(self) -> str:
        return FAMILIES[self.name[4]]


def _code(number: int, title: str, meaning: str) -> Code:
    return Code(f"SPMD{number}", title, " ".join(meaning.split()))


_ALL = (
    _code(
        101,
        "partial sum where the complete value is expected",
        """Each rank holds one summand of the value; the sum over the mesh axis was never taken. It usually
        begins where a sharded dim is contracted (row-parallel matmul, mean over a sharded dim) and shows
        where the value is returned or meets a border declared complete. All-reduce it, or reduce-scatter
        it when what follows is sharded.""",
    ),
    _code(
        102,
        "nonlinear function of a partial value",
        """A pending sum was put through a function that does not pass sums through: f(a + b) is not f(a) +
        f(b) for gelu, softmax, rsqrt, a norm, a comparison. Finish the sum first, then apply the
        function.""",
    ),
    _code(
        103,
        "complete value added to a partial one",
        """One operand of the sum is complete on every rank, the other still a summand. When the pending sum
        is taken, the complete operand is counted once per rank. Reduce first and add after, or let one
        rank alone (or 1/n of it on each) take part. Biases and residuals are the usual case.""",
    ),
    _code(
        104,
        "product of two partial values",
        """Both factors are pending sums over the same axis: the ranks hold the products of their own
        summands, and the cross terms exist nowhere. Reduce at least one factor before multiplying.""",
    ),
    _code(
        105,
        "one rank's own value used as if all had it",
        """The ranks hold different values that are no shard and no summand of one global value (local
        statistics, a value valid on the root only, a decision taken locally), yet the program goes on as
        if it were the same everywhere. Reduce, gather or broadcast it over the axis.""",
    ),
    _code(
        106,
        "value that is not what one device computes",
        """Running the ranks gives another value than the same program on one device, and no rule explains
        why. The notes say where the value first loses its relation to the reference.""",
    ),
    _code(
        106,
        "value that is not what one device computes",
        """Running the program on simulated ranks and on one device gives different values, and no
        shorter account of the difference was found. The notes say where the values first part.""",
    ),
    _code(
        201,
        "gradient that is a partial sum: a reduction is missing in backward",
        """The gradient a rank holds covers only its own part (its heads, its tokens, its columns) and no
        reduction follows, neither in backward nor by the declared outer wrapper. Where a replicated value
        enters sharded computation its gradient must be summed: identity forward, all-reduce backward. For
        parameters used on sharded data, sum the gradient over the axis before the optimizer reads it.""",
    ),
    _code(
        202,
        "gradient reduced twice",
        """The gradient was complete already and is summed again over the axis, so it is too large by its
        size. Typical: an all-reduce whose backward sums too (torch.distributed.nn.functional, functional
        collectives) on a value every rank uses alike, or a hook and a wrapper that both reduce.""",
    ),
    _code(
        203,
        "gradient lost or sent to the wrong place",
        """Part of the gradient does not reach its parameter: a collective that autograd does not see cuts
        the graph (all_gather into buffers, in-place ops on detached data), or a gather whose backward
        keeps the own slice without summing what the other ranks contribute.""",
    ),
    _code(
        204,
        "gradient that is not what one device computes",
        """Running the ranks gives another gradient than the same program on one device, and no rule explains
        why. The notes say where the gradient first loses its relation to the reference.""",
    ),
    _code(
        204,
        "gradient that is not what one device computes",
        """Running the program on simulated ranks and on one device gives different gradients, and no
        shorter account of the difference was found. The notes say where the values first part.""",
    ),
    _code(
        301,
        "value off by a factor of an axis size",
        """The value is right up to a constant factor, a product of axis sizes: a sum where a mean was meant,
        a division by the local instead of the global count, a mean taken twice.""",
    ),
    _code(
        302,
        "gradient off by a factor of an axis size",
        """The gradient that the optimizer sees is the reference gradient times a product of axis sizes. When
        some parameters have the factor and others not, training takes another path; a factor common to
        all is a change of learning rate.""",
    ),
    _code(
        303,
        "mean of the ranks' means",
        """Each rank divides by its own count and the results are averaged. That is the global mean only when
        all counts are equal; with masks, padding or uneven shards it is not. Sum numerators and counts
        over the axis, divide once.""",
    ),
    _code(
        304,
        "statistics of each rank's own batch",
        """A batch norm takes mean and variance of the samples its rank holds. Data-parallel training does so
        by convention, hence a warning: the result depends on how samples are dealt to ranks, and small
        local batches train differently. SyncBatchNorm takes the statistics of the whole batch.""",
    ),
    _code(
        401,
        "operands whose dims are laid out differently",
        """Two tensors meet element by element, but their dims are cut differently over the mesh: one is a
        shard and the other whole, or they are cut in another order. Local shapes may agree by chance
        while the elements are different ones.""",
    ),
    _code(
        402,
        "collective over the wrong axis",
        """The collective runs over a mesh axis on which nothing is pending or sharded, while the axis that
        needs it goes without. Check the process group that is passed.""",
    ),
    _code(
        403,
        "blocks put together in the wrong order or along the wrong dim",
        """A gather, all-to-all, reshape or concatenation places the blocks so that the result is a
        permutation of the global tensor: nested axes gathered in the wrong order, a rank-major buffer
        read as if it were dim-major, a fused dim split before it was regrouped.""",
    ),
    _code(
        404,
        "local index or size used as a global one",
        """A position, offset or count from the local shard stands where the global one is meant: positions
        that start at 0 on every rank, vocabulary ids not shifted by the rank's offset, slopes from the
        local heads.""",
    ),
    _code(
        501,
        "random numbers that differ between replicas",
        """A replicated value meets random numbers that are not the same on every rank that holds it (dropout
        on replicated activations, noise, random initial values), so the replicas part. Draw from a
        generator seeded alike over the axis.""",
    ),
    _code(
        502,
        "same random numbers on different shards",
        """Every rank draws the same numbers for a different block of the tensor, so the global tensor
        repeats a pattern. Seed the generator by the coordinate on the axis that cuts the tensor.""",
    ),
    _code(
        601,
        "ranks that issue different collectives",
        """The ranks do not agree on which collectives run, or on their order: a branch on the rank or on a
        value that differs between ranks guards a collective. The job hangs, or pairs up calls that do not
        belong together.""",
    ),
    _code(
        602,
        "same collective with another meaning on each rank",
        """All ranks enter the collective, but bring it different things: another tensor, shape, dtype,
        reduction or root. It completes with a value that means nothing.""",
    ),
    _code(
        603,
        "value read before its collective was waited for",
        """An asynchronous collective returns at once, and its result is there only after wait(). A tensor
        it works on is read or written in between, or it is never waited for: what is read depends on how
        far the transfer has come.""",
    ),
    _code(
        701,
        "parameter or optimizer state that is wrong after the step",
        """After the step a parameter or a state (momentum, moving average, scale) no longer denotes what it
        did: replicas have parted, or the update was computed from local statistics.""",
    ),
    _code(
        702,
        "metric that is one rank's value",
        """What is logged or returned comes from this rank's data alone. Reduce it over the data axes.""",
    ),
    _code(
        703,
        "clipping or norm that misses part of the gradient",
        """The norm is taken over the local shards or counts replicated parameters several times, so ranks
        clip differently or by the wrong amount. Sum squares over the axes that cut each parameter, once.""",
    ),
    _code(
        801,
        "reduction in low precision, or with scales that differ between ranks",
        """Summands are rounded, quantised or divided as integers before the sum: the result is not the
        rounding of the sum. Quantised blocks travel without the scale they were made with.""",
    ),
    _code(
        901,
        "operation without a rule",
        """The checker has no description of the operation, so nothing is known about what follows from it.
        Describe it with spmdtypes.rule, or let the program be tested by running it (the default for small
        ones).""",
    ),
    _code(
        902,
        "part of the program that was not tested",
        """The program could not be run on simulated ranks (too large, needs a device, too slow), so only
        what the rules prove is known.""",
    ),
    _code(
        903,
        "program that could not be recorded",
        """Recording stopped: the program reads a value that does not exist while recording, or leaves what
        PyTorch can report.""",
    ),
    _code(
        904,
        "value that recording had to assume",
        """The program's course depends on data (a count, a size, a comparison); recording went on with one
        value and says so. The verdict holds for that course.""",
    ),
)

CODES: dict[str, Code] = {c.name: c for c in _ALL}


def lookup(name: str) -> Code | None:
    """Find a code by "SPMD201", "spmd201" or "201"."""
    key = name.strip().upper()
    return CODES.get(key) or CODES.get(f"SPMD{key}")
