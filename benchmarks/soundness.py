"""Are the derived rules true? Every combination of operand placements against the real kernels.

    python -m benchmarks.soundness [--ranks 2 4] [--two] [--uneven] [--only OP] [--limit N]

For each op: readings promised and right, illegal ones for which brute force finds no reading either,
illegal ones for which it does (missed), and promised readings that are wrong (UNSOUND).
Kernels run in child processes: some do not check the shapes they are given.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor

from spmdtypes.core.denotation import Denotation
from spmdtypes.core.engine import derive
from spmdtypes.core.layout import LayoutError
from spmdtypes.core.simulate import coordinates
from spmdtypes.core.spec import Operand
from spmdtypes.graph import Lit, Node, Ref
from spmdtypes.ops import build
from spmdtypes.rulecheck import dtype_name, flat
from tests.ops.cases import Case, N, cases, tensors_of
from tests.ops.ground import Placement, assemble, cut, placements, readings, same

ONE_AXIS = "x"
SEED = 20
EMPTY = "an empty shard"


_values = torch.Generator().manual_seed(7)


def _other_reals(draw: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Other values of the same kind: indices are permuted along the last dim, truths drawn anew."""

    def redraw(t: Tensor) -> Tensor:
        if t.dtype == torch.bool:
            return torch.rand(t.shape, generator=_values) > 0.5
        if not t.dtype.is_floating_point:
            return t[..., torch.randperm(t.shape[-1], generator=_values)] if t.ndim else t
        return draw(t)

    return redraw


DRAWS = [
    _other_reals(lambda t: torch.randn(t.shape, generator=_values, dtype=t.dtype)),
    _other_reals(lambda t: torch.randint(-2, 3, t.shape, generator=_values).to(t.dtype)),
    _other_reals(lambda t: torch.randint(0, 2, t.shape, generator=_values).to(t.dtype)),
    _other_reals(lambda t: torch.rand(t.shape, generator=_values, dtype=t.dtype) + 0.1),
]


@dataclass
class Tally:
    """Counts by outcome, with a few examples of each that matters."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, outcome: str, example: str = "") -> None:
        self.counts[outcome] += 1
        if example and len(self.examples.setdefault(outcome, [])) < 400:
            self.examples[outcome].append(example)

    def merge(self, other: Tally) -> None:
        self.counts += other.counts
        for k, v in other.examples.items():
            self.examples.setdefault(k, []).extend(v)


def arguments(x: Any, tensors: Iterator[Any], numbers: Iterator[Any]) -> Any:
    if isinstance(x, Tensor):
        return next(tensors)
    if isinstance(x, N):
        return next(numbers)
    if isinstance(x, (list, tuple)):
        return [arguments(y, tensors, numbers) for y in x]
    return {k: arguments(v, tensors, numbers) for k, v in x.items()} if isinstance(x, dict) else x


def _numbers(x: Any) -> Iterator[int]:
    if isinstance(x, N):
        yield int(x)
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from _numbers(y)


def variants(case: Case, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Ways a program on shards may write the case's numbers: each whole, or divided by 1 axis or all."""
    found = list(_numbers(case.args))
    ways = [sorted({v, *(v // k for k in sizes if v % k == 0)}, reverse=True) for v in found]
    every = list(product(*ways))
    whole = every[0]
    if len(every) > 24:
        every = [w for w in every if sum(a != b for a, b in zip(w, whole)) <= 2]
    return every


class Trial:
    """One case on one mesh: derivations and runs for placements and numbers."""

    def __init__(self, case: Case, mesh: Mapping[str, int], tensors: Sequence[Tensor] | None = None):
        self.case, self.mesh = case, mesh
        self.tensors = list(tensors_of([case.args, case.kwargs])) if tensors is None else list(tensors)
        self.numbers = tuple(_numbers(case.args))
        self.reference = flat(self.call(self.tensors, self.numbers))
        self.redrawn: list[Trial] = []
        sorted_input = "bucketize" in case.op
        for draw in DRAWS if tensors is None and not sorted_input else ():
            try:
                self.redrawn.append(Trial(case, mesh, [draw(t) for t in self.tensors]))
            except RuntimeError:
                continue  # outside the kernel's domain

    def call(self, tensors: Sequence[Tensor], numbers: Sequence[int]) -> Any:
        torch.default_generator.manual_seed(SEED)
        given, counts = iter([t.clone() for t in tensors]), iter(numbers)
        args = arguments(self.case.args, given, counts)
        return self.case.function(*args, **arguments(self.case.kwargs, given, counts))

    def derive(self, dens: Sequence[Denotation], numbers: Sequence[int]) -> Sequence[Any] | None:
        """Results per output; None when the call itself has no description."""
        literals = iter([v if v == r else Lit(v, r) for v, r in zip(numbers, self.numbers)])
        refs = iter([Ref(k) for k in range(len(self.tensors))])
        args = _frozen(arguments(self.case.args, refs, literals))
        kwargs = {k: _frozen(v) for k, v in arguments(self.case.kwargs, refs, literals).items()}
        node = Node(0, self.case.op, args, kwargs)
        operands = [
            Operand(k, d.local_shape, tuple(t.shape), dtype_name(t.dtype))
            for k, (d, t) in enumerate(zip(dens, self.tensors))
        ]
        try:
            spec = build(node, operands)
        except ValueError:
            return None
        return None if spec is None else derive(spec, dens, self.mesh)

    def run(self, dens: Sequence[Denotation], numbers: Sequence[int], seed: int) -> list[list[Any]] | str:
        """Outputs per rank, or how the kernel refused."""
        generator = torch.Generator().manual_seed(seed)
        locals_ = [cut(t, d, self.mesh, generator) for t, d in zip(self.tensors, dens)]
        out = []
        try:
            for r in range(len(coordinates(self.mesh))):
                mine = [x[r] for x in locals_]
                refused = _refusal(self.case.op, mine)
                if refused:
                    return refused
                out.append(flat(self.call(mine, numbers)))
        except (RuntimeError, IndexError, ValueError, NotImplementedError) as error:
            return str(error)[:80] or "refused"
        return out


def _frozen(x: Any) -> Any:
    if isinstance(x, list):
        return tuple(map(_frozen, x))
    return dtype_name(x) if isinstance(x, torch.dtype) else x


def _refusal(op: str, tensors: Sequence[Tensor]) -> str:
    """Shapes a kernel would read out of bounds: it is not given them."""
    if any(not t.numel() for t in tensors):
        return EMPTY
    if "norm_backward" in op and tensors[0].shape != tensors[1].shape:
        return "gradient of another shape"
    if "nll_loss" in op:
        classes = [t.shape[1] for t in tensors if t.dtype.is_floating_point and t.ndim > 1]
        targets = [t for t in tensors if not t.dtype.is_floating_point]
        if classes and targets and int(targets[0].max()) >= min(classes):
            return "target out of range"
    if "pool" in op and "backward" in op and tensors[0].shape[:2] != tensors[1].shape[:2]:
        return "gradient of another shape"
    sizes = {t.shape for t in tensors[1:]}
    if "batch_norm" in op and "backward" not in op and sizes != {(tensors[0].shape[1],)}:
        return "statistics of another size"
    if "_fused_" in op and len({t.shape for t in tensors if t.ndim == 2}) > 1:
        return "lists of other shapes"
    if "_fused_" in op and len({t.shape for t in tensors if t.ndim == 1}) > 1:
        return "lists of other shapes"
    if "flash_attention" in op:
        q, k, v = tensors[-5:-2] if "backward" in op else tensors[:3]
        if q.shape[:2] != k.shape[:2] or k.shape != v.shape or q.shape[3] != k.shape[3]:
            return "attention of other shapes"
        if "backward" in op and (
            tensors[0].shape != q.shape or tensors[4].shape != q.shape or tensors[5].shape != q.shape[:3]
        ):
            return "attention of other shapes"
    return ""


def judge(
    trial: Trial, dens: Sequence[Denotation], label: str, numbers: tuple[int, ...], tally: Tally
) -> None:
    """Compares what the rules promise for one combination with what the ranks compute."""
    results = trial.derive(dens, numbers)
    if results is None:
        tally.add("no description", label)
        return
    runs = trial.run(dens, numbers, 1)
    if isinstance(runs, str):
        promised = [r for r in results if isinstance(r, Denotation) and not r.varying]
        other = any(r.ref_shape != tuple(t.shape) for r, t in zip(promised, trial.reference))
        whole = promised and len(promised) == len([r for r in results if r is not None])
        excused = "between 0 and 1" in runs or runs == EMPTY
        bad = whole and not (other or numbers or excused)
        tally.add("promised but refused" if bad else "refused", f"{label}: {runs}" if bad else "")
        return
    n = prod(trial.mesh.values())
    for k, (result, reference) in enumerate(zip(results, trial.reference)):
        if result is None or not isinstance(reference, Tensor):
            continue
        locals_ = [out[k] for out in runs]
        where = f"{label} output {k}: {result}"
        if isinstance(result, Denotation) and not result.varying:
            _judge_legal(result, reference, locals_, trial, where, tally)
            if trial.redrawn and tally.counts["right"] % 2:  # every other time on other values as well
                other = trial.redrawn[tally.counts["right"] // 2 % len(trial.redrawn)]
                again = other.run(dens, numbers, 2)
                if not isinstance(again, str):
                    _judge_legal(result, other.reference[k], [o[k] for o in again], other, where, tally)
        elif len(trial.mesh) == 1:
            found = readings(reference, locals_, n)
            for other in trial.redrawn if found else ():
                again = other.run(dens, numbers, 2)
                if not isinstance(again, str):
                    still = readings(other.reference[k], [o[k] for o in again], n)
                    found = [r for r in found if r in still]
            tally.add("missed" if found else "illegal", f"{where} | reads as {found}" if found else "")
        else:
            tally.add("illegal")


def _judge_legal(
    result: Denotation, reference: Tensor, locals_: list[Tensor], trial: Trial, where: str, tally: Tally
) -> None:
    if result.ref_shape != tuple(reference.shape):
        tally.add("another program")
        return
    if result.guard is not None:
        tally.add("guarded", where)
        return
    value = assemble(result, locals_, trial.mesh, reference)
    largest = max(
        (float(x.abs().max()) for x in locals_ if x.numel() and x.dtype.is_floating_point), default=0.0
    )
    largest = largest if isfinite(largest) else 0.0
    right = value is not None and same(*_finite(value, reference), largest)
    tally.add("right" if right else "UNSOUND", "" if right else where)


def _finite(value: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Without the positions where the reference is infinite or no number (outside a function's domain)."""
    if value.shape != reference.shape or not reference.dtype.is_floating_point:
        return value, reference
    ok = reference.isfinite()
    return value[ok], reference[ok]


def check_case(case: Case, mesh: Mapping[str, int], limit: int, seed: int, uneven: bool) -> Tally:
    """One case over (a sample of) its placements."""
    rng, tally = random.Random(seed), Tally()
    trial = Trial(case, mesh)
    options = [placements(t, mesh, uneven=uneven) for t in trial.tensors]
    literal = [trial.numbers] if uneven else variants(case, sorted({*mesh.values(), prod(mesh.values())}))
    for chosen in combinations(options, limit, rng):
        if uneven and not any(p.cuts for p in chosen):
            continue
        try:
            dens = [p.denotation(t.shape, mesh) for p, t in zip(chosen, trial.tensors)]
        except LayoutError:
            continue
        for numbers in literal:
            label = f"{case.label} {[str(p) for p in chosen]}" + (f" {numbers}" if numbers else "")
            judge(trial, dens, label, numbers, tally)
    return tally


def combinations(
    options: list[list[Placement]], limit: int, rng: random.Random
) -> list[tuple[Placement, ...]]:
    """All of them when few; else a sample that favours operands cut alike."""
    if prod(map(len, options)) <= limit:
        return list(product(*options))
    found: dict[tuple[Placement, ...], None] = {}
    for _ in range(limit * 4):
        chosen = [rng.choice(o) for o in options]
        style = rng.random()
        for k in range(1, len(chosen)):
            alike = [p for p in options[k] if _alike(p, chosen[0])] if style < 0.6 else []
            plain = [p for p in options[k] if not p.cuts and not p.partial]
            if alike and rng.random() < 0.8:
                chosen[k] = rng.choice(alike)
            elif plain and style < 0.8 and rng.random() < 0.6:
                chosen[k] = plain[0]
        found[tuple(chosen)] = None
        if len(found) >= limit:
            break
    return list(found)


def _alike(p: Placement, q: Placement) -> bool:
    if p.partial or q.partial:
        return (p.partial, p.op) == (q.partial, q.op)
    return [a for _, a in p.cuts] == [a for _, a in q.cuts]


def _child(case_index: int, mesh: Mapping[str, int], limit: int, seed: int, uneven: bool, pipe: Any) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    warnings.simplefilter("ignore")
    pipe.send(check_case(cases()[case_index], mesh, limit, seed, uneven))
    pipe.close()


def check_in_child(
    index: int, mesh: Mapping[str, int], limit: int, seed: int = 0, uneven: bool = False
) -> Tally:
    """As `check_case`, in a process of its own; a crash of the kernel is an outcome."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(index, mesh, limit, seed, uneven, send))
    process.start()
    send.close()
    try:
        return receive.recv()  # type: ignore[no-any-return]
    except EOFError:
        tally = Tally()
        tally.add("CRASH", f"{cases()[index].label}: the process died")
        return tally
    finally:
        process.join()


def table(rows: dict[str, Tally]) -> Iterator[str]:
    names = [
        "right",
        "illegal",
        "refused",
        "missed",
        "UNSOUND",
        "promised but refused",
        "no description",
        "guarded",
        "CRASH",
    ]
    yield f"{'op':48}" + "".join(f"{n.split()[0]:>10}" for n in names)
    total = Tally()
    for name, tally in rows.items():
        total.merge(tally)
        yield f"{name[:47]:48}" + "".join(f"{tally.counts[n]:>10}" for n in names)
    yield f"{'total':48}" + "".join(f"{total.counts[n]:>10}" for n in names)
    right, missed = total.counts["right"], total.counts["missed"]
    complete = 100 * right / max(1, right + missed)
    yield f"completeness {complete:.2f}%   other programs {total.counts['another program']}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="sizes of the one-axis meshes")
    parser.add_argument("--two", action="store_true", help="also a mesh of two axes")
    parser.add_argument("--uneven", action="store_true", help="also shards of unequal size")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--limit", type=int, default=600, help="placements tried per case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--examples", type=int, default=0, help="print so many examples of each bad outcome per case"
    )
    options = parser.parse_args(argv)
    meshes: list[tuple[dict[str, int], bool]] = [({ONE_AXIS: n}, False) for n in options.ranks]
    meshes += [({"a": 2, "b": 2}, False)] if options.two else []
    meshes += [({ONE_AXIS: 3}, True)] if options.uneven else []
    bad = 0
    for mesh, uneven in meshes:
        start = time.monotonic()
        rows = {}
        for k, case in enumerate(cases()):
            if options.only in case.label:
                rows[f"{k} {case.label}"] = check_in_child(k, mesh, options.limit, options.seed, uneven)
        write = sys.stdout.write
        write(f"mesh {mesh}{' uneven' if uneven else ''}: {time.monotonic() - start:.0f} s\n")
        write("\n".join(table(rows)) + "\n")
        for tally in rows.values():
            bad += tally.counts["UNSOUND"] + tally.counts["CRASH"]
            for outcome in ("UNSOUND", "CRASH", "promised but refused", "missed", "no description"):
                for example in tally.examples.get(outcome, [])[: options.examples]:
                    write(f"  {outcome}: {example}\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
