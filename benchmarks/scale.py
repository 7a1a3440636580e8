"""What checking a very large script costs: one step of Llama-3.1-405B on 16384 ranks.

    python benchmarks/scale.py [--size 405b] [--layers N] [--changed LAYER]

Seconds are CPU seconds of all processes together, memory is the largest process. `--changed` leaves out
a reduction in one layer, which must be found.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

MESH = {"replica": 64, "shard": 8, "cp": 4, "tp": 8}
SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "llama_405b.py"
# what is written differently, and for which layer
SUM = (
    "        return SumOverTensorRanks.apply(F.linear(y, self.w2), self.tp)\n",
    "        y = F.linear(y, self.w2)\n"
    "        return y if self.odd else SumOverTensorRanks.apply(y, self.tp)\n",
)
MARK = (
    "        self.w2 = weight(s.dim, hidden)\n",
    "        self.w2 = weight(s.dim, hidden)\n        self.odd = False\n",
)
ODD = (
    "    model.to_empty(device=device)\n",
    "    model.blocks[{layer}].mlp.odd = True\n    model.to_empty(device=device)\n",
)


def changed(layer: int, folder: Path) -> Path:
    """The script with the reduction after one layer's feed-forward part left out."""
    text = SCRIPT.read_text()
    for old, new in (SUM, MARK, ODD):
        if text.count(old) != 1:
            sys.exit(f"the script has changed: {old!r}")
        text = text.replace(old, new.replace("{layer}", str(layer)))
    file = folder / SCRIPT.name
    file.write_text(text)
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", default="405b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--changed", type=int, metavar="LAYER")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for one rank")
    options = parser.parse_args()

    import torch

    torch.set_num_threads(1)
    from spmdtypes.cli import quiet_libraries
    from spmdtypes.script.large import Costs, check_large
    from spmdtypes.script.launch import Launch

    quiet_libraries()
    degrees = [x for a in ("tp", "cp", "shard") for x in (f"--{a}", f"{{{a}}}")]
    args = ["--size", options.size, "--batch", "512", *degrees]
    args += ["--layers", str(options.layers)] if options.layers else []
    costs = Costs()
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        file = SCRIPT if options.changed is None else changed(options.changed, Path(folder))
        world = 1
        for n in MESH.values():
            world *= n
        report = check_large(Launch(str(file), tuple(args)), world, MESH, options.limit, costs=costs)
    print(report)
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    for stage, seconds in costs.seconds.items():
        print(f"  {stage:16s}{seconds:8.1f} s")
    total = sum(u.ru_utime + u.ru_stime for u in used)
    print(f"  all, with imports {total:6.1f} s of CPU, {time.time() - start:.0f} s")
    print(f"  largest process {max(u.ru_maxrss for u in used) / 2**20:.2f} GB")
    print(f"  {costs.raw} steps of one rank recorded, {costs.nodes} nodes checked")
    if options.changed is not None and not report.errors:
        sys.exit("the changed layer was not found")


if __name__ == "__main__":
    main()
