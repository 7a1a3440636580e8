"""Training programs in the style of each framework: silent when right, loud with seeded bugs.

    python benchmarks/programs.py [NAME ...] [--json FILE] [--clean]

A program is a file benchmarks/programs/NAME.toml: a script (or module), its mesh and arguments, and
bugs as replacements of text. Every run is one `spmdcheck` command, in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path(__file__).resolve().parent / "programs"
NEAR = 2  # lines


@dataclass
class Outcome:
    """One run: `status` is "silent", "warning", "error" or "failed"; `at_line` for a seeded bug."""

    id: str
    status: str
    seconds: float
    nodes: int = 0
    at_line: bool = False
    said: str = ""


@dataclass
class Row:
    name: str
    ranks: int
    clean: Outcome
    bugs: list[Outcome] = field(default_factory=list)

    @property
    def found(self) -> int:
        return sum(b.status in ("error", "warning") for b in self.bugs)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="*", help="programs (default: all)")
    p.add_argument("--json", type=Path, help="write the rows to this file")
    p.add_argument("--clean", action="store_true", help="without the seeded bugs")
    args = p.parse_args(argv)
    rows = []
    print(f"{'program':24} {'ranks':>5} {'nodes':>6} {'seconds':>8} {'clean':>8} {'found':>7} {'at line':>8}")
    for name in args.names or sorted(f.stem for f in FOLDER.glob("*.toml")):
        spec = tomllib.loads((FOLDER / f"{name}.toml").read_text())
        row = run(name, spec, bugs=not args.clean)
        rows.append(row)
        _show(row)
    bad = [r for r in rows if r.clean.status != "silent"]
    weak = [r for r in rows if r.bugs and r.found < min(4, len(r.bugs))]
    found, total = sum(r.found for r in rows), sum(len(r.bugs) for r in rows)
    print(
        f"{len(rows)} programs: {len(rows) - len(bad)} silent when clean; "
        f"{found} of {total} seeded bugs found; {len(weak)} programs with fewer than 4 found"
    )
    if args.json:
        args.json.write_text(json.dumps([asdict(r) | {"found": r.found} for r in rows], indent=1))
    return 1 if bad or weak else 0


def _show(row: Row) -> None:
    at = sum(b.at_line for b in row.bugs)
    n = len(row.bugs)
    print(
        f"{row.name:24} {row.ranks:5} {row.clean.nodes:6} {row.clean.seconds:8.1f} {row.clean.status:>8} "
        f"{row.found:4}/{n:<2} {at:5}/{n:<2}",
        flush=True,
    )
    if row.clean.status != "silent":
        print(f"    {row.clean.said}")
    for b in row.bugs:
        if b.status in ("silent", "failed") or not b.at_line:
            print(f"    {b.id}: {b.status}{'' if b.at_line else ', not at the line'} {b.said}")


def run(name: str, spec: dict[str, Any], bugs: bool = True) -> Row:
    """The clean program and each of its bugs."""
    ranks = prod(spec["mesh"].values())
    clean = _check(spec, "clean", _target(spec), {}, ())
    row = Row(name, ranks, clean)
    for bug in spec.get("bug", []) if bugs else []:
        with tempfile.TemporaryDirectory() as folder:
            target, env, lines = _seeded(spec, bug, Path(folder))
            row.bugs.append(_check(spec, bug["id"], target, env, lines))
    return row


def _target(spec: dict[str, Any]) -> list[str]:
    return ["-m", spec["module"]] if "module" in spec else [str(ROOT / spec["script"])]


def _seeded(
    spec: dict[str, Any], bug: dict[str, Any], folder: Path
) -> tuple[list[str], dict[str, str], tuple[int, ...]]:
    """A copy with the bug: what to run, the environment it needs, and the lines that changed."""
    if "script" in spec:
        source = ROOT / spec["script"]
        file = folder / source.name
        shutil.copy(source, file)
        target, env = [str(file)], {}
    else:
        package = spec["module"].partition(".")[0]
        found = importlib.util.find_spec(package)
        assert found is not None and found.origin is not None
        shutil.copytree(Path(found.origin).parent, folder / package)
        file = folder / bug["file"]
        target, env = ["-m", spec["module"]], {"PYTHONPATH": str(folder)}
    text = file.read_text()
    if text.count(bug["old"]) != 1:
        raise SystemExit(f"{bug['id']}: the text to replace occurs {text.count(bug['old'])} times")
    file.write_text(text.replace(bug["old"], bug["new"]))
    first = text[: text.index(bug["old"])].count("\n") + 1
    return target, env, tuple(range(first - NEAR, first + max(1, bug["new"].count("\n") + 1) + NEAR))


def _check(
    spec: dict[str, Any], id: str, target: list[str], env: dict[str, str], lines: Sequence[int]
) -> Outcome:
    mesh = ",".join(f"{a}={n}" for a, n in spec["mesh"].items())
    command = [sys.executable, "-m", "spmdtypes.cli", *target, "-n", str(prod(spec["mesh"].values()))]
    command += ["--mesh", mesh, "--format", "json", *spec.get("options", []), "--", *spec.get("args", [])]
    path = os.pathsep.join([*filter(None, [env.get("PYTHONPATH"), str(ROOT), os.environ.get("PYTHONPATH")])])
    start = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **env, "PYTHONPATH": path}, timeout=900
    )
    seconds = time.monotonic() - start
    try:
        found = json.loads(done.stdout)
    except json.JSONDecodeError:
        return Outcome(id, "failed", seconds, said=(done.stderr or done.stdout).strip()[-300:])
    failures = [f["message"] for f in found["failures"]]
    findings = [f for r in found["programs"] for f in r["findings"]]
    nodes = sum(r.get("nodes", 0) for r in found["programs"])
    at = any(n in lines for f in findings for n in _lines(f))
    levels = {f["severity"] for f in findings}
    status = next((s for s in ("error", "warning") if s in levels), "failed" if failures else "silent")
    said = "; ".join(f"{f['code']} {f['message']}" for f in findings[:2]) or "; ".join(failures)
    return Outcome(id, status, seconds, nodes, at, said[:300])


def _lines(finding: dict[str, Any]) -> list[int]:
    spans = [finding.get("span"), *(n.get("span") for n in finding.get("notes", []))]
    return [s["line"] for s in spans if s]


if __name__ == "__main__":
    sys.exit(main())
