"""What checking costs: a Llama-3-8B training step on 8192 ranks, next to running it unobserved.

    python benchmarks/speed.py [--layers 32] [--json FILE]

Every measurement is a process of its own; seconds are CPU seconds, without imports. The floor is
the same program as one rank, under fake tensors and the same process group, with nobody looking.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MESH = {"pod": 8, "dp": 128, "tp": 8}


class Clock:
    """CPU seconds per stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def run(self, stage: str, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        out = work()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.process_time() - start
        return out


def floor(layers: int) -> dict[str, Any]:
    """The program run eagerly under fake tensors."""
    import torch
    from torch._subclasses import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks import llama
    from spmdtypes.capture.environment import environment
    from spmdtypes.capture.fake import local_shape
    from spmdtypes.capture.raw import DTYPES

    program = llama.program(MESH, llama.Shape(layers=layers))
    clock = Clock()

    def run() -> None:
        mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
        with FakeTensorMode(allow_non_fake_inputs=True):
            inputs = {
                k: torch.empty(local_shape(k, t, MESH), dtype=DTYPES[t.dtype or "f32"])
                for k, t in program.inputs.items()
            }
            module = program.build(mesh)
            assert program.step is not None
            program.step(module, mesh, **inputs)

    with environment(math.prod(MESH.values()), 0):
        clock.run("floor", run)
    return {"seconds": clock.seconds}


def ours(layers: int) -> dict[str, Any]:
    """The same program captured, functionalised, aligned and inferred."""
    from benchmarks import llama
    from spmdtypes.capture import fake
    from spmdtypes.capture.align import align

    program = llama.program(MESH, llama.Shape(layers=layers))
    clock = Clock()
    recorded, local_rss = clock.run("capture", lambda: fake.record(program, MESH, 0)), _rss()
    raw = len(recorded.trace)
    graph = clock.run("functionalise", recorded.graph)
    del recorded
    gc.collect()
    reference = clock.run("reference", lambda: fake.capture(program, dict.fromkeys(MESH, 1), 0))
    other = clock.run("other rank", lambda: fake.capture(program, MESH, 1))
    aligned = clock.run("align", lambda: align(graph, reference, [other]))
    collectives = sum(n.comm is not None for n in graph.nodes)
    out = {"raw": raw, "nodes": len(graph.nodes), "collectives": collectives, "rss after capture": local_rss}
    out |= _infer(program, aligned.graph, clock)
    return {"seconds": clock.seconds, **out}


def _infer(program: Any, graph: Any, clock: Clock) -> dict[str, Any]:
    try:
        from spmdtypes.checker import input_denotations
        from spmdtypes.core.infer import infer
        from spmdtypes.ops import registry
    except ImportError:
        return {}
    inputs = input_denotations(program, graph, MESH)
    clock.run("infer", lambda: infer(graph, inputs, registry.build))
    clock.run("infer again", lambda: infer(graph, inputs, registry.build))
    return {}


def _rss() -> float:
    """Peak resident memory of this process so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(what: str, layers: int) -> dict[str, Any]:
    """Run one measurement in a fresh process."""
    root = Path(__file__).resolve().parent.parent
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.speed",
        "--worker",
        what,
        "--layers",
        str(layers),
    ]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def report(layers: int) -> dict[str, Any]:
    base, run = measure("floor", layers), measure("ours", layers)
    low = base["seconds"]["floor"]
    one = sum(v for k, v in run["seconds"].items() if k not in ("reference", "other rank", "infer again"))
    counts = f"{run['raw']} recorded, {run['nodes']} nodes, {run['collectives']} collectives"
    print(f"{layers} layers, mesh {MESH}: {counts}")
    print(f"  {'floor':15s}{low:8.2f} s{'':10s}{base['rss']:6.2f} GB")
    for stage, seconds in run["seconds"].items():
        print(f"  {stage:15s}{seconds:8.2f} s{seconds / low:8.2f} x")
    print(f"  {'one rank':15s}{one:8.2f} s{one / low:8.2f} x {run['rss']:6.2f} GB")
    return {"layers": layers, "floor": base, "ours": run, "one rank": one, "ratio": one / low}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=("floor", "ours"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        import torch
        import torch._dynamo  # fake tensors import it on first use

        torch.set_num_threads(1)
        result = {"floor": floor, "ours": ours}[options.worker](options.layers)
        print(json.dumps(result | {"rss": _rss()}))
        return
    small = report(options.layers)
    large = report(4 * options.layers)
    growth = large["one rank"] / small["one rank"]
    print(f"four times the layers: {growth:.2f} x the time")
    if options.json:
        options.json.write_text(json.dumps({"runs": [small, large], "growth": growth}, indent=1))


if __name__ == "__main__":
    main()
