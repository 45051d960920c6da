"""How long does a graph take to compile? `python bench/compile.py` prints seconds for 10 to 10,000 hops.

The graph is a ring with two long chains, one on trajectories and one on steps, with branches, far reads and hops
that no owner is given for. Each run is a fresh process; a row is the median of its runs. Imports are counted once,
in a row of their own: they do not depend on the graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
HERE = "bench.compile_hops"
OWNERS = ("", "rollout", "trainer", "scorer")
HOPS = (10, 100, 1_000, 10_000)
STAGES = ("import", "parse", "check", "rewrite", "lower")
FRAME = f"""\
graph: ring
dims: {{group: 8, sample: 8, prompt: {{mean: 32, max: 64}}, response: {{mean: 8, max: 16}}}}
owners: {{PROCESSES}}
hops:
  dataset: {{use: {HERE}.numbers}}
  dispatch:
    use: hops.dispatch.watermark
    in: {{group: dataset, finished: LAST, free: buffer, dropped: batch, version: {{from: sync, delay: 1, max_lag: 1}}}}
  rollout: {{use: {HERE}.sample, owner: rollout, in: {{prompt: dispatch, key: dispatch}}}}
  buffer: {{use: hops.buffer.ready, in: {{trajectory: LAST, taken: batch, dropped: batch}}}}
  batch: {{use: hops.batch.oldest_first, in: {{ready: buffer}}}}
"""


def ring(hops: int) -> str:
    """A graph file of `hops` hops, at least 8: those of FRAME, two chains and a sync."""
    on_trajectories = (hops - 6) // 2
    first = list(_chain("t", on_trajectories, "rollout.x"))
    second = list(_chain("s", hops - 6 - on_trajectories, f"batch.{'out' if first else 'x'}"))
    last = f"t{on_trajectories - 1}"
    sync = f"  sync: {{use: {HERE}.publish, in: {{x: s{len(second) - 1}, batch_id: batch}}}}\n"
    owners = OWNERS[1 : max(2, len(first), len(second))]  # those that a hop has
    frame = FRAME.replace("PROCESSES", ", ".join(f"{owner}: {{}}" for owner in owners))
    return frame.replace("LAST", last) + "".join((*first, *second)) + sync


def _chain(name: str, length: int, start: str) -> Iterator[str]:
    """Of five hops one joins a branch and one reads columns that the first hop of all wrote."""
    for i in range(length):
        before = f"{name}{i - 1}" if i else start
        hop = before.partition(".")[0]
        use, reads = "shift", f"x: {before}"
        if i % 5 == 3:
            use, reads = "mix", f"a: {before}, b: {name}{i - 2}"
        elif i % 5 == 4:
            use, reads = "weigh", f"x: {before}, tokens: {hop}, mask: {hop}"
        owner = OWNERS[i % len(OWNERS)]
        at = f"owner: {owner}, " if owner else ""
        yield f"  {name}{i}: {{use: {HERE}.{use}, {at}in: {{{reads}}}}}\n"


def measure(path: str) -> dict[str, float]:
    """Seconds of each stage, in this process. Raises AssertionError when the graph has findings."""
    marks = [time.perf_counter()]
    from flowgraph.passes.check import check
    from flowgraph.passes.resolve import resolve
    from flowgraph.passes.rewrite import rewrite
    from flowgraph.plan.lower import lower
    from flowgraph.spec.config import import_object
    from flowgraph.spec.graphfile import read_graph
    from flowgraph.spec.source import read

    for module in ("compile_hops.shift", "compile_hops.numbers"):
        import_object(f"bench.{module}")
    for use in ("dispatch.watermark", "buffer.ready", "batch.oldest_first"):
        import_object(f"hops.{use}")
    marks.append(time.perf_counter())
    root, found = read(path, Path(path).read_text())
    assert root is not None
    file, more = read_graph(path, root)
    marks.append(time.perf_counter())
    graph, resolved = resolve(file)
    found = [*found, *more, *resolved, *check(graph)]
    marks.append(time.perf_counter())
    assert not found, found[0]
    graph = rewrite(graph)
    marks.append(time.perf_counter())
    lower(graph)
    marks.append(time.perf_counter())
    return {stage: b - a for stage, a, b in zip(STAGES, marks, marks[1:], strict=False)}


def fresh(path: str) -> dict[str, float]:
    """`measure` in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--measure", path], cwd=ROOT, check=True, capture_output=True
    )
    times: dict[str, float] = json.loads(done.stdout)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each size; a third of it for 10,000 hops")
    parser.add_argument(
        "--measure", metavar="GRAPH", help="print the seconds of one graph as JSON, and no table"
    )
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    rows: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for hops in HOPS:
            path = Path(folder) / f"{hops}.yaml"
            path.write_text(ring(hops))
            runs = [fresh(str(path)) for _ in range(options.runs if hops < 10_000 else -(-options.runs // 3))]
            rows[hops] = {stage: statistics.median(run[stage] for run in runs) for stage in STAGES}
    _print(rows)


def _print(rows: dict[int, dict[str, float]]) -> None:
    graph = STAGES[1:]
    each = {hops: sum(row[stage] for stage in graph) / hops * 1e6 for hops, row in rows.items()}
    print(f"imports, once: {rows[HOPS[0]]['import']:.2f} s\n")
    print("  hops    parse  resolve+check   7 passes    lower    total   us a hop   to 1,000 hops")
    for hops, row in rows.items():
        parse, check, rewrite, lower = (row[stage] for stage in graph)
        total = parse + check + rewrite + lower
        cells = f"{hops:>6,} {parse:>8.3f} {check:>14.3f} {rewrite:>10.3f} {lower:>8.3f} {total:>8.3f}"
        print(f"{cells} {each[hops]:>10.0f} {each[hops] / each[1_000]:>15.2f}")


if __name__ == "__main__":
    main()
