"""How long do the reports of a graph take? `python bench/reports.py` times the whole commands on 10 to 1,000 hops.

Each number is the wall time of a fresh process, from the shell to its end, imports and compiling included; a row is
the median of its runs. The peer is Graphviz: `dot -Tsvg` lays out what `flowgraph draw -o ring.dot` writes. It is given
that file, so neither compiler nor Python is in its time. Without `dot` (Debian: graphviz) its column is empty.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOPS = (10, 100, 1_000)
COMMANDS = {
    "check": ["check"],
    "audit": ["audit"],
    "naive": ["audit", "--naive"],
    "draw": ["draw", "-o", "ring.svg"],
    "page": ["draw", "-o", "ring.html"],
}
LIMIT = 120.0  # seconds after which a peer is given up


def seconds(command: list[str], folder: Path, limit: float = 600.0) -> float | None:
    """Wall time of one process in a folder; None when it did not end within the limit."""
    began = time.perf_counter()
    environment = {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    try:
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    return time.perf_counter() - began


def measure(hops: int, runs: int) -> dict[str, float | None]:
    from bench.compile import ring

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "ring.yaml").write_text(ring(hops))
        flowgraph = [sys.executable, "-m", "flowgraph.cli"]
        found: dict[str, float | None] = {}
        for title, (command, *options) in COMMANDS.items():
            whole = [*flowgraph, command, "ring.yaml", *options]
            times = [seconds(whole, folder) for _ in range(runs)]
            found[title] = statistics.median(t for t in times if t is not None)
        found["dot"] = None
        if dot := shutil.which("dot"):
            subprocess.run(
                [*flowgraph, "draw", "ring.yaml", "-o", "ring.dot"],
                cwd=folder,
                check=True,
                capture_output=True,
                env={"PYTHONPATH": str(ROOT)},
            )
            times = [seconds([dot, "-Tsvg", "ring.dot", "-o", "dot.svg"], folder, LIMIT) for _ in range(runs)]
            known = [t for t in times if t is not None]
            found["dot"] = statistics.median(known) if len(known) == len(times) else None
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each size")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    names = [*COMMANDS, "dot"]
    print("  hops" + "".join(f"{name:>9}" for name in names) + "   draw / dot")
    for hops in HOPS:
        row = measure(hops, options.runs)
        cells = "".join(f"{row[name]:>9.2f}" if row[name] is not None else f"{'–':>9}" for name in names)
        ratio = f"{row['draw'] / row['dot']:>13.2f}" if row["dot"] and row["draw"] else f"{'–':>13}"
        print(f"{hops:>6,}{cells}{ratio}")
    if shutil.which("dot") is None:
        print("no dot: install Graphviz for the peer")
    print(f"seconds; a peer that takes more than {LIMIT:g} s is given up (–)")


if __name__ == "__main__":
    main()
