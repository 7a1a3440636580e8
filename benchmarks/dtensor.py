"""DTensor's sharding strategies and our derived rules on the same placements, with the kernels as judge.

    python -m benchmarks.dtensor [--ranks 2] [--only OP] [--limit N]

Implicit redistribution is forbidden, so DTensor either has a rule for the placements or refuses.
Every disagreement is listed with who is numerically right, judged by running the op on the ranks'
shards alone; DTensor's convolution handler communicates by itself, so what it says of a convolution
can be right for DTensor and wrong here.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.soundness import ONE_AXIS, Trial, arguments, combinations, variants
from spmdtypes.core.denotation import Denotation
from spmdtypes.core.layout import LayoutError
from spmdtypes.rulecheck import flat
from tests.ops.cases import Case, cases
from tests.ops.ground import Placement, assemble, placements, same

Outcome = tuple[str, str]  # what happened, and an example when it is a disagreement


def to_dtensor(placement: Placement) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if placement.partial:
        return Partial("avg" if placement.scale else placement.op)
    return Shard(placement.cuts[0][0]) if placement.cuts else Replicate()


def from_dtensor(placement: Any) -> Placement | None:
    """None for a placement that says nothing we can read."""
    kind = type(placement).__name__
    if kind == "Replicate":
        return Placement()
    if kind in ("Shard", "_StridedShard"):
        strided = ((placement.dim, placement.split_factor),) if kind == "_StridedShard" else ()
        return Placement(((placement.dim, (ONE_AXIS,)),), strided)
    if kind == "Partial" and placement.reduce_op in ("sum", "avg", "max", "min"):
        average = placement.reduce_op == "avg"
        return Placement(
            (),
            (),
            (ONE_AXIS,),
            "sum" if average else placement.reduce_op,
            ((ONE_AXIS, -1),) if average else (),
        )
    return None


class Judge:
    """One case: what each side says of given placements, and what the kernels show."""

    def __init__(self, case: Case, device_mesh: Any, n: int) -> None:
        self.trial = Trial(case, {ONE_AXIS: n})
        self.device_mesh = device_mesh
        self.options = variants(case, [n])

    def compare(self, chosen: Sequence[Placement]) -> Outcome:
        try:
            dens = [p.denotation(t.shape, self.trial.mesh) for p, t in zip(chosen, self.trial.tensors)]
        except LayoutError:
            return "skipped", ""
        every = self.ours(dens)
        theirs = self.theirs(chosen, dens)
        where = f"{self.trial.case.label} {[str(p) for p in chosen]}"
        if not every:
            if theirs is None:
                return "both refuse", ""
            word = _word(self.holds(dens, self.options, theirs))
            return f"only DTensor, {word}", f"{where}: {[str(d) for d in theirs]}"
        if theirs is None:
            numbers, ours = every[0]
            return (
                f"only ours, {_word(self.holds(dens, [numbers], ours))}",
                f"{where}: {[str(d) for d in ours]}",
            )
        for numbers, ours in every:
            if self.agree(ours, theirs):
                right = self.holds(dens, [numbers], theirs)
                return f"same, {_word(right)}", where if right is False else ""
        numbers, ours = every[0]
        mine, right = self.holds(dens, [numbers], ours), self.holds(dens, self.options, theirs)
        said = (
            f"ours {[str(d) for d in ours]} {_word(mine)}, DTensor {[str(d) for d in theirs]} {_word(right)}"
        )
        return f"differ: ours {_word(mine)}, DTensor {_word(right)}", f"{where}: {said}"

    def agree(self, ours: Sequence[Denotation | None], theirs: Sequence[Denotation | None]) -> bool:
        return len(ours) == len(theirs) and all(
            a is None or b is None or a.same(b, self.trial.mesh) for a, b in zip(ours, theirs)
        )

    def ours(self, dens: Sequence[Denotation]) -> list[tuple[tuple[int, ...], list[Denotation | None]]]:
        """For each way to write the numbers under which every output reads as the reference: the readings."""
        found = []
        for numbers in self.options:
            results = self.trial.derive(dens, numbers)
            if results is not None and all(map(self.complete, results, self.trial.reference)):
                found.append((numbers, list(results)))
        return found

    def complete(self, result: Any, reference: Any) -> bool:
        if result is None or not isinstance(reference, Tensor):
            return True
        if not isinstance(result, Denotation) or result.varying or result.guard is not None:
            return False
        return result.ref_shape == tuple(reference.shape) and not result.layout.fixed

    def theirs(
        self, chosen: Sequence[Placement], dens: Sequence[Denotation]
    ) -> list[Denotation | None] | None:
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._utils import ExplicitRedistributionContext

        locals_ = [torch.zeros(d.local_shape, dtype=t.dtype) for d, t in zip(dens, self.trial.tensors)]
        tensors = [
            DTensor.from_local(
                x, self.device_mesh, [to_dtensor(p)], run_check=False, shape=t.shape, stride=t.stride()
            )
            for x, p, t in zip(locals_, chosen, self.trial.tensors)
        ]
        try:
            with ExplicitRedistributionContext(strict=True):
                outs = flat(self.call(tensors))
        except Exception:
            return None
        found: list[Denotation | None] = []
        for out, reference in zip(outs, self.trial.reference):
            placement = from_dtensor(out.placements[0]) if isinstance(out, DTensor) else None
            if isinstance(reference, Tensor) and placement is not None and out.shape == reference.shape:
                found.append(placement.denotation(reference.shape, self.trial.mesh))
            elif isinstance(reference, Tensor):
                return None
            else:
                found.append(None)
        return found

    def call(self, tensors: Sequence[Any]) -> Any:
        given, counts = iter(tensors), iter(self.trial.numbers)
        args = arguments(self.trial.case.args, given, counts)
        return self.trial.case.function(*args, **arguments(self.trial.case.kwargs, given, counts))

    def holds(
        self,
        dens: Sequence[Denotation],
        options: Sequence[tuple[int, ...]],
        claimed: Sequence[Denotation | None],
    ) -> bool | None:
        """Whether a claim reads as the reference, for some way to write the numbers; None: cannot run."""
        verdict: bool | None = None
        for numbers in options:
            runs = self.trial.run(dens, numbers, 1)
            if isinstance(runs, str):
                continue
            good = True
            for k, (den, reference) in enumerate(zip(claimed, self.trial.reference)):
                if den is not None and isinstance(reference, Tensor):
                    value = assemble(den, [out[k] for out in runs], self.trial.mesh)
                    good = good and value is not None and same(value, reference)
            verdict = bool(verdict) or good
        return verdict


def _word(right: bool | None) -> str:
    return {True: "right", False: "wrong", None: "not run"}[right]


def _setup(n: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n)
    return init_device_mesh("cpu", (n,), mesh_dim_names=(ONE_AXIS,))


def _child(indices: Sequence[int], n: int, limit: int, pipe: Any) -> None:
    mesh = _setup(n)
    for index in indices:
        judge = Judge(cases()[index], mesh, n)
        rng = random.Random(0)
        options = [[p for p in placements(t, judge.trial.mesh) if not p.strided] for t in judge.trial.tensors]
        found = []
        for chosen in combinations(options, limit, rng):
            found.append(judge.compare(chosen))
        pipe.send((index, found))
    pipe.close()


def compare_all(indices: Sequence[int], n: int, limit: int) -> Iterator[tuple[int, list[Outcome]]]:
    """Results case by case; a case whose kernels kill the process is skipped."""
    rest = list(indices)
    context = multiprocessing.get_context("fork")
    while rest:
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(rest, n, limit, send))
        process.start()
        send.close()
        try:
            while rest:
                index, found = receive.recv()
                rest.remove(index)
                yield index, found
        except EOFError:
            sys.stderr.write(f"skipped {cases()[rest[0]].label}: the process died\n")
            rest = rest[1:]
        process.join()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--limit", type=int, default=150, help="placements tried per case")
    parser.add_argument("--examples", type=int, default=3, help="examples per op and disagreement")
    options = parser.parse_args(argv)
    indices = [k for k, c in enumerate(cases()) if options.only in c.label]
    total: Counter[str] = Counter()
    listed: dict[str, dict[str, list[str]]] = {}
    for index, found in compare_all(indices, options.ranks, options.limit):
        total.update(outcome for outcome, _ in found)
        for outcome, example in found:
            if example:
                listed.setdefault(outcome, {}).setdefault(cases()[index].label, []).append(example)
    write = sys.stdout.write
    for outcome, count in sorted(total.items()):
        write(f"{count:7}  {outcome}\n")
    for outcome, by_op in sorted(listed.items()):
        write(f"\n{outcome}\n")
        for label, examples in by_op.items():
            write(f"  {label}: {len(examples)}\n")
            write("".join(f"      {e}\n" for e in examples[: options.examples]))
    return 1 if any("ours wrong" in o or "only ours, wrong" in o for o in total) else 0


if __name__ == "__main__":
    sys.exit(main())
