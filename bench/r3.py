"""Routed-expert replay: what it costs to bring an engine's expert choices to the trainer, naive and compiled.

    python bench/r3.py [--runs 3] [--length 1024]

512 trajectories in the shapes of Qwen3-30B-A3B (48 layers, 8 of 128 experts), real arrays, real processes. Naive is
how it is done today: the engine answers with base64 of int32 in JSON, the controller decodes it, joins the batch and
sends it on to the trainer. (Its JSON is read and written by msgspec, which is faster than what is in use.) Compiled
is the graph bench/r3.yaml. In both the experts are there already when a trajectory begins, and the trainer reads every
byte once; the sums of what it read are compared with those of what was sent. Seconds are of a whole step of all
trajectories: of the ring that includes dispatch, buffer, batch and sync.
"""

from __future__ import annotations

import argparse
import base64
import json
import multiprocessing as mp
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import flowgraph  # noqa: E402
from bench.r3_hops import checksum, pool, start, sum_of_others  # noqa: E402
from hops.keys import key_of  # noqa: E402

GRAPH = str(ROOT / "bench" / "r3.yaml")
LAYERS, EXPERTS, TOP_K, TRAJECTORIES, GROUPS = 48, 128, 8, 512, 32
LONG = 32_768


class Cost(NamedTuple):
    """Of one step. driver: payload bytes through the driver or controller; moved: between processes, all together"""

    seconds: float
    driver: float
    moved: float
    control: float = 0.0


# --- naive ---------------------------------------------------------------------------------------------------------


class Reply(msgspec.Struct):
    """What an engine answers over HTTP: arrays are text."""

    key: int
    tokens: list[int]
    logprobs: list[float]
    routed_experts: str


def engine(replies: Connection, keys: list[int], length: int, steps: int) -> None:
    experts = pool(LAYERS, EXPERTS, TOP_K, length).astype(np.int32)
    for _ in range(steps):
        replies.recv_bytes()  # until it is asked
        for key in keys:
            at = start(key, length)
            text = base64.b64encode(experts[at : at + length]).decode()
            reply = Reply(key, list(range(length)), [0.0] * length, text)
            replies.send_bytes(msgspec.json.encode(reply))


def trainer(batches: Connection, steps: int) -> None:
    for _ in range(steps):
        batch = batches.recv()
        batch["tokens"].sum(), batch["logprobs"].sum()
        batches.send(checksum(batch["routed_experts"]))


def naive(keys: list[int], length: int, steps: int) -> list[Cost]:
    """The first step warms up, and is not in what is returned."""
    context = mp.get_context("fork")
    (from_engine, to_controller), (to_trainer, at_trainer) = context.Pipe(), context.Pipe()
    workers = [
        context.Process(target=engine, args=(to_controller, keys, length, steps), daemon=True),
        context.Process(target=trainer, args=(at_trainer, steps), daemon=True),
    ]
    for worker in workers:
        worker.start()
    right = wanted(keys, pool(LAYERS, EXPERTS, TOP_K, length).astype(np.int32))
    costs = []
    for _ in range(steps):
        began, received = time.perf_counter(), 0
        from_engine.send_bytes(b"go")
        parts: list[dict[str, Any]] = []
        for _ in keys:
            data = from_engine.recv_bytes()
            received += len(data)
            reply = msgspec.json.decode(data, type=Reply)
            raw = np.frombuffer(base64.b64decode(reply.routed_experts), np.int32)
            parts.append(
                {
                    "tokens": np.array(reply.tokens, np.int32),
                    "logprobs": np.array(reply.logprobs, np.float32),
                    "routed_experts": raw.reshape(length, LAYERS, TOP_K),
                }
            )
        batch = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        sent = sum(array.nbytes for array in batch.values())
        to_trainer.send(batch)
        found = to_trainer.recv()
        costs.append(Cost(time.perf_counter() - began, received + sent, received + sent))
        assert found == right, "the trainer read something else than the engine sent"
    for worker in workers:
        worker.join(30)
    return costs[1:]


# --- compiled ------------------------------------------------------------------------------------------------------


def keys_of(step: int) -> list[int]:
    """The keys of a step's trajectories: see `hops.dispatch`."""
    groups = range(step * GROUPS, (step + 1) * GROUPS)
    return [key_of(f"0/{uid}/{sample}") for uid in groups for sample in range(TRAJECTORIES // GROUPS)]


def wanted(keys: Sequence[int], experts: npt.NDArray[Any]) -> int:
    """The checksum of what these trajectories carry, in this order."""
    length = len(experts) // 2
    begins = [start(key, length) for key in keys]
    return sum(checksum(experts[at : at + length], i * length) for i, at in enumerate(begins)) % 2**64


def compiled(length: int, steps: int) -> tuple[list[Cost], float]:
    """The costs of every step but the first; and by how many percent a seam's bytes are off the audit's prediction."""
    experts = pool(LAYERS, EXPERTS, TOP_K, length)
    with tempfile.TemporaryDirectory() as runs:
        given = overrides(length, steps)
        done = flowgraph.run(flowgraph.load(GRAPH, given), runs=runs, live=False)
        audit = flowgraph.audit(flowgraph.load(GRAPH, given), done.directory)
        lines = (Path(done.directory) / "metrics.jsonl").read_text().splitlines()
    records = [one for one in map(json.loads, lines) if "step_seconds" in one]
    for i, one in enumerate(records):
        found = (int(one["train.high"]) << 32) + int(one["train.low"])
        assert found == wanted(keys_of(i), experts), "the trainer read something else than was sent"
        assert one["train.others"] == sum_of_others(length, length // 8, TRAJECTORIES), "so for other columns"
    driver, moved, control = audit.driver.measured, audit.total.measured, audit.control_bytes
    seams = [seam for seam in audit.seams if seam.fields]
    if None in (driver, moved, control, *(seam.difference for seam in seams)):
        raise AssertionError("a run measures all of it")
    off = max(abs(seam.difference or 0.0) for seam in seams)
    return [Cost(one["step_seconds"], driver or 0, moved or 0, control or 0) for one in records[1:]], off


def overrides(length: int, steps: int) -> dict[str, object]:
    return {"dims.prompt": length // 8, "dims.response": length - length // 8, "run.steps": steps}


def median(costs: Sequence[Cost]) -> Cost:
    return Cost(*(statistics.median(column) for column in zip(*costs, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="a run; the first of them is not counted")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a trajectory")
    args = parser.parse_args()
    rounds: list[tuple[Cost, Cost, float]] = []
    for _ in range(args.runs):
        before = median(naive(keys_of(0), args.length, args.steps))
        after, off = compiled(args.length, args.steps)
        rounds.append((before, median(after), off))
    before, after = median([one[0] for one in rounds]), median([one[1] for one in rounds])
    print(
        f"{TRAJECTORIES} trajectories of {args.length:,} tokens, {LAYERS} layers, {TOP_K} of {EXPERTS} experts; "
        f"a step, median of {args.runs} runs of {args.steps - 1} steps"
    )
    print(f"{'':<44}{'naive':>14}{'compiled':>14}{'ratio':>11}")
    rows = {
        "through the driver, payload, B a trajectory": [one.driver / TRAJECTORIES for one in (before, after)],
        "through the driver, with messages, B": [
            (one.driver + one.control) / TRAJECTORIES for one in (before, after)
        ],
        "between processes, MB": [one.moved / 1e6 for one in (before, after)],
        "seconds": [one.seconds for one in (before, after)],
    }
    for name, (x, y) in rows.items():
        print(f"{name:<44}{x:>14,.2f}{y:>14,.2f} {x / y:>9,.1f}x")
    print(f"measured bytes are off the audit's prediction by {max(one[2] for one in rounds):g} %")
    priced = flowgraph.audit(flowgraph.load(GRAPH, overrides(LONG, 1)))
    text = TRAJECTORIES * LONG * (4 * -(-4 * LAYERS * TOP_K // 3))
    print(
        f"at {LONG:,} tokens, predicted: {priced.driver.mean / TRAJECTORIES:,.2f} B a trajectory through the driver, "
        f"{priced.total.mean / 1e9:,.2f} GB between processes; naive {text / 1e9:,.1f} GB of base64 to the controller"
    )


if __name__ == "__main__":
    main()
