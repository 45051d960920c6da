"""What a seam costs: eight tensors from a process to another that reads every byte once, by others' ways and by ours.

    pip install -e '.[peers]' && python bench/seams.py [--sizes 1,64,512] [--runs N] [--only NAMES] [--json FILE]

A dict of eight tensors (int64 x 2, float32 x 3, bfloat16, int32, uint8) of 1, 64 and 512 MB. "there": from when A has
them in its memory to when B has them; "done": until B has read them, by a sum of every word. Each run carries other
bytes, and both sums must agree. Medians, after two runs that warm up. A way that is not installed is named as such.

Ours are hops of a graph (bench/seams.yaml) in worker processes, with the driver between them, as a run has them. `in
place`: the writer asks for the memory of its outputs before it fills them (flowgraph.outputs). `one copy`: it returns
arrays of its own. The limits are measured in the same processes between those runs: the reader reads as many bytes of
its own, and the writer copies as many into memory whose pages are there, on one thread and on two.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.seam_arena import moved, round_trips  # noqa: E402
from bench.seam_peers import WAYS  # noqa: E402

MB = 1 << 20
DEADLINE = 150.0  # seconds of one peer at one size
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "copy": ("ours, one copy, 1 thread", {"place": False, "threads": 1}),
    "copy-2": ("ours, one copy, 2 threads", {"place": False, "threads": 2}),
    "place": ("ours, in place", {"place": True, "threads": 1}),
}
TITLES = {**{name: way[0] for name, way in WAYS.items()}, **{name: way[0] for name, way in OURS.items()}}
LIMITS = {
    "read": "limit: read own memory",
    "memcpy_1": "limit: memcpy, 1 thread",
    "memcpy_2": "limit: memcpy, 2 threads",
}
TRIPS = 5000
Row = dict[str, float] | str  # medians in seconds, or why there are none


def peer(name: str, nbytes: int, runs: int) -> Row:
    """In a process group of its own, so that nothing of it outlives its deadline."""
    missing = [package for package in WAYS[name][1] if importlib.util.find_spec(package) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    command = [sys.executable, str(ROOT / "bench/seam_peers.py"), name, str(nbytes), str(runs)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, errors = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        return f"no end in {DEADLINE:.0f} s"
    finally:
        end(process)
    if process.returncode:
        return f"failed: {(errors.strip().splitlines() or ['without a word'])[-1]}"
    return medians(json.loads(out))


def end(process: subprocess.Popen[str]) -> None:
    """Asked first: then multiprocessing's tracker removes what is left in /dev/shm."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
            process.wait(5)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def measure(sizes: list[int], runs: int | None, only: set[str]) -> dict[int, dict[str, Row]]:
    """Size in MB → way or limit → medians. Limits are of all our own runs."""
    out: dict[int, dict[str, Row]] = {}
    for mb in sizes:
        count = runs or max(5, min(60, 960 // mb))
        rows: dict[str, Row] = {}
        for name in WAYS:
            if name in only:
                rows[name] = peer(name, mb * MB, count)
                print(f"{mb} MB, {TITLES[name]}: {said(rows[name])}", file=sys.stderr, flush=True)
        limits: list[dict[str, float]] = []
        for name, (title, how) in OURS.items():
            if name in only:
                found = moved(mb * MB, count, **how)
                limits += [{limit: run[limit] for limit in LIMITS} for run in found]
                rows[name] = medians(found)
                print(f"{mb} MB, {title}: {said(rows[name])}", file=sys.stderr, flush=True)
        for limit in LIMITS if limits else ():
            rows[limit] = {"done": medians(limits)[limit]}
        out[mb] = rows
    return out


def said(row: Row) -> str:
    return row if isinstance(row, str) else f"{1e3 * row['done']:.2f} ms"


def seconds(rows: dict[str, Row], name: str, what: str = "done") -> float | None:
    row = rows.get(name)
    return None if row is None or isinstance(row, str) else row[what]


def table(found: dict[int, dict[str, Row]]) -> None:
    """By size: ms until there and until done, GB/s until done, and how many times as long as in place."""
    print(f"{'':37}" + "".join(f"{f'{mb} MB':>32}" for mb in found))
    print(f"{'':37}" + f"{'there':>11}{'done, ms':>9}{'GB/s':>6}{'x':>6}" * len(found))
    for name, title in {**TITLES, **LIMITS}.items():
        if not any(name in rows for rows in found.values()):
            continue
        line = f"{title:37}"
        for mb, rows in found.items():
            row, base = rows[name], seconds(rows, "place") or seconds(rows, "read")
            if isinstance(row, str):
                line += f"{row[:30]:>32}"
                continue
            there = f"{1e3 * row['there']:.2f}" if "there" in row else ""
            times = f"{row['done'] / base:.2f}" if base else ""
            line += f"{there:>11}{1e3 * row['done']:>9.2f}{mb * MB / row['done'] / 1e9:>6.1f}{times:>6}"
        print(line)


def ratios(found: dict[int, dict[str, Row]]) -> None:
    """What is aimed at, and what was reached."""
    print(f"\n{'':52}{'aim':>8}" + "".join(f"{f'{mb} MB':>9}" for mb in found))
    ray = ("ray-torch", "ray-numpy")
    lines: list[tuple[str, str, list[float | None]]] = []
    every = list(found.values())
    for title, aim, over, what, under, of in (
        ("in place: speed to that of reading own memory", ">= 0.9", ("read",), "done", "place", "done"),
        ("one copy, 1 thread: speed to that of a memcpy", ">= 0.85", ("memcpy_1",), "done", "copy", "there"),
        (
            "one copy, 2 threads: speed to that of a memcpy",
            ">= 0.85",
            ("memcpy_2",),
            "done",
            "copy-2",
            "there",
        ),
        ("in place to Ray at its best, until read", ">= 3", ray, "done", "place", "done"),
        ("one copy, 2 threads, to Ray at its best, until read", "", ray, "done", "copy-2", "done"),
        ("in place to TransferQueue, until read", ">= 10", ("transfer-queue",), "done", "place", "done"),
        (
            "one copy, 2 threads, to TransferQueue, until read",
            "",
            ("transfer-queue",),
            "done",
            "copy-2",
            "done",
        ),
    ):
        values = []
        for rows in every:
            best = [t for t in (seconds(rows, name, what) for name in over) if t is not None]
            own = seconds(rows, under, of)
            values.append(min(best) / own if best and own else None)
        lines.append((title, aim, values))
    for title, aim, values in lines:
        print(f"{title:52}{aim:>8}" + "".join(f"{'' if v is None else f'{v:.2f}':>9}" for v in values))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="1,64,512", help="MB")
    parser.add_argument(
        "--runs", type=int, help="of each way and size; as many as take a while, unless given"
    )
    parser.add_argument("--only", help=f"some of: {', '.join(TITLES)}, trip")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every median there too, in seconds")
    options = parser.parse_args()
    names = {*TITLES, "trip"}
    only = set(options.only.split(",")) if options.only else names
    if odd := only - names:
        parser.error(f"--only: no way is called {', '.join(sorted(odd))}")
    found = measure([int(mb) for mb in options.sizes.split(",")], options.runs, only)
    table(found)
    ratios(found)
    trips = sorted(round_trips(TRIPS)) if "trip" in only else []
    if trips:
        at = {"p50": 1e6 * trips[len(trips) // 2], "p99": 1e6 * trips[len(trips) * 99 // 100]}
        print(
            f"\na descriptor to a worker and back: {at['p50']:.0f} us, p99 {at['p99']:.0f} us (aim: < 100 us)"
        )
    if options.json:
        options.json.write_text(json.dumps({"seconds": found, "round_trips": trips}, indent=1))


if __name__ == "__main__":
    main()
