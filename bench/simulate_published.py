"""The simulator against what others published: parameters fitted on one configuration, the others predicted.

    python bench/simulate_published.py

Nothing is fitted twice, and every error is printed. What is assumed stands in the tables of assumptions below.
"""

from __future__ import annotations

from typing import Any

import flowgraph

GRAPH = (
    "graphs/quickstart.yaml"  # its dispatch, buffer and batch; models and engines are what is assumed here
)

VERL = """
verl, "Recipe: Fully Async Policy Trainer", docs/advance/fully_async.md at b178a3c (github.com/volcengine/verl)
Qwen2.5-Math-7B on H20, DAPO, 28K tokens, 512 prompts x 16 responses a step, tensor parallel 4. Seconds a step of
512 prompts: its column `step`. Fitted on: colocate sync, 64 GPUs (gen 150.72, old_log_prob 70.26, update 133.41,
step 365.28).
  fitted   decode speed (one factor on all coefficients) from gen; training and log-probabilities in GPU-seconds; the
           rest of the step (10.89 s) as a constant
  assumed  responses lognormal, mean 1500, sigma 1.2, cut at 28672 (lengths are not published)
           a decode step takes 5 ms + 43 us a request + 3.6 ns a cached token, times the factor: 2 FLOPs a parameter at
           60 % of 4 x 148 TFLOPS, and 57 KB of KV a token at 4 x 4 TB/s
           training takes GPU-seconds / GPUs; colocated engines use all GPUs; asynchronous training needs no
           log-probabilities of its own
           32 prompts a batch, weights every 16 batches; staleness s allows (1 + s)·16 batches ahead, rounded
           256 requests in flight a server (concurrent_samples_per_replica 16 x 16 responses); 2 s a weight sync
"""
# (name, rollout GPUs, trainer GPUs, staleness or None for colocated, published seconds a step)
VERL_ROWS = [
    ("colocate sync, 64 (fitted)", 64, 64, None, 365.28),
    ("colocate sync, 32", 32, 32, None, 790.10),
    ("colocate sync, 128", 128, 128, None, 356.30),
    ("fully async 16:16, s 0.5", 16, 16, 0.5, 294.77),
    ("fully async 32:32, s 0.5", 32, 32, 0.5, 189.26),
    ("fully async 64:64, s 0", 64, 64, 0.0, 231.34),
    ("fully async 64:64, s 0.1", 64, 64, 0.1, 171.30),
    ("fully async 64:64, s 0.3", 64, 64, 0.3, 146.11),
    ("fully async 64:64, s 0.5", 64, 64, 0.5, 150.63),
]

AREAL = """
AReaL v0.3, blog/AReaL_v0_3.md, Table 2 (github.com/inclusionAI/AReaL; the paper is arXiv 2505.24298): hours of
training of R1-Distill-Qwen on 128 (1.5B) and 192 (7B) H800. Fitted on: synchronous, 1.5B, 41.0 hours.
  fitted   one number: what a decode step costs beyond the roofline, the same for both models
  assumed  1000 PPO steps are 250 batches of 512 prompts x 16 responses (4 mini-batches each, as in its ablation)
           responses lognormal, mean 9000, sigma 0.7, cut at 27648 (lengths are not published)
           a decode step reads the weights and the KV cache at 3.35 TB/s x 0.7, and takes 2 FLOPs a parameter and
           token at 989 TFLOPS x 0.5; one engine a GPU, 256 slots
           training takes 8 FLOPs a parameter and token at 989 TFLOPS x 0.4, a pass for log-probabilities 2
           synchronous: all GPUs do both, in turn; asynchronous: 3 of 4 decode (sglang.d96 + d32 of its quick start)
           max_head_offpolicyness 4; weights stop engines for 5 s, and KV is computed anew
"""
# (name, parameters, weight bytes, KV bytes a token, GPUs, asynchronous, published hours)
AREAL_ROWS = [
    ("1.5B synchronous (fitted)", 1.54e9, 3.1e9, 28_672, 128, False, 41.0),
    ("1.5B asynchronous", 1.54e9, 3.1e9, 28_672, 128, True, 14.8),
    ("7B synchronous", 7.6e9, 15.2e9, 57_344, 192, False, 57.7),
    ("7B asynchronous", 7.6e9, 15.2e9, 57_344, 192, True, 25.4),
]

TINKER = """
thinking-machines-lab/tinker-cookbook, pull request 822: mean staleness 0.97 with sampling 1 step ahead, 2.49 with 3,
both under a bound of 3. Fitted on depth 1: the number of steps from an empty ring, which is not published. The first
batch has no lag and all others one, so 33 steps are chosen because 1 - 1/33 is 0.97: depth 1 is met by construction,
and only depth 3 tests anything.
  assumed  a sampler that is fast enough; exponential lengths, a slot for every trajectory, 16 groups of 8
           depth d: d batches may be in flight or ready while one is trained, which is `capacity` of the buffer
"""


def verl(rollout: int, trainer: int, staleness: float | None, **speed: float) -> flowgraph.Simulated:
    """The decode times given, and training of the fitted GPU-seconds."""
    update, again, rest = 133.41 * 64, 70.26 * 64, 10.89
    engines, dims = (
        rollout // 4,
        ["dims.prompt={mean: 150, max: 2048}", "dims.response={mean: 1500, max: 28672}"],
    )
    common: dict[str, Any] = {"lengths": "lognormal:1500,1.2", "speed": speed, "engines": engines}
    if staleness is None:
        dims += ["dims.group=512", "dims.sample=16"]
        train = (update + again) / trainer + rest
        return flowgraph.simulate(
            GRAPH, steps=4, warmup=0, overrides=dims, slots=1024, train_seconds=train, **common
        )
    ahead = round((1 + staleness) * 16)
    dims += [
        "dims.group=32", "dims.sample=16", "hops.sync.in.weights={from: train, every: 16}",
        f"hops.dispatch.in.version.max_lag={ahead - 1}", f"hops.dispatch.with.target={min(256 * engines, ahead * 512)}",
    ]  # fmt: skip
    train = update / trainer / 16 + rest / 16
    return flowgraph.simulate(
        GRAPH, steps=80, warmup=32, overrides=dims, slots=256, train_seconds=train, sync_seconds=2.0, **common
    )


def verl_table() -> list[tuple[str, float, float]]:
    base = {"step": 5e-3, "per_request": 4.3e-5, "per_token": 3.6e-9, "prefill": 40_000.0}
    first = verl(64, 64, None, **base)
    gen = first.step_seconds - (133.41 + 70.26 + 10.89)
    factor = 150.72 / gen  # all times of an engine scale together
    print(f"  fitted: factor {factor:.3f} on decode times")
    speed = {k: v * factor for k, v in base.items() if k != "prefill"} | {"prefill": base["prefill"] / factor}
    out = []
    for name, rollout, trainer, staleness, published in VERL_ROWS:
        done = verl(rollout, trainer, staleness, **speed)
        steps = 1 if staleness is None else 16
        out.append((name, published, done.step_seconds * steps))
    return out


def areal(size: float, weights: float, kv: float, gpus: int, asynchronous: bool, extra: float) -> float:
    """Hours of 250 batches."""
    bandwidth, flops, mean, samples = 3.35e12 * 0.7, 989e12, 9000, 512 * 16
    trainer = gpus // 4 if asynchronous else gpus
    engines = gpus - trainer if asynchronous else gpus
    train = (8 + 2) * size * samples * mean / (trainer * flops * 0.4)
    over = ["dims.group=512", "dims.sample=16", "dims.prompt={mean: 200, max: 1024}"]
    over += ["dims.response={mean: 9000, max: 27648}"]
    over += [f"hops.dispatch.in.version.max_lag={4 if asynchronous else 0}"]
    done = flowgraph.simulate(
        GRAPH, steps=8 if asynchronous else 3, warmup=4 if asynchronous else 0, overrides=over, engines=engines,
        slots=256, lengths=f"lognormal:{mean},0.7", train_seconds=train, sync_seconds=5.0,
        speed={"step": extra + weights / bandwidth, "per_request": 2 * size / (flops * 0.5),
               "per_token": kv / bandwidth, "prefill": flops * 0.5 / (2 * size)},
    )  # fmt: skip
    return done.step_seconds * 250 / 3600


def areal_table() -> list[tuple[str, float, float]]:
    fitted = AREAL_ROWS[0]
    low, high = 0.0, 0.05
    for _ in range(7):
        middle = (low + high) / 2
        low, high = (middle, high) if areal(*fitted[1:6], middle) < fitted[6] else (low, middle)
    print(f"  fitted: {1e3 * (low + high) / 2:.1f} ms a decode step beyond the roofline")
    return [(name, hours, areal(*row, (low + high) / 2)) for name, *row, hours in AREAL_ROWS]


def tinker(depth: int, response: float = 0.1) -> float:
    """Mean lag with sampling so many steps ahead. response: its mean time, in training steps"""
    group, sample = 16, 8
    over = [f"dims.group={group}", f"dims.sample={sample}", "dims.response={mean: 100, max: 100000}"]
    over += ["hops.dispatch.in.version.max_lag=3", f"hops.buffer.with.capacity={depth * group * sample}"]
    done = flowgraph.simulate(
        GRAPH, steps=33, warmup=0, overrides=[*over, "hops.batch.capacity=0"], engines=64, slots=64,
        lengths="exponential:100", train_seconds=1.0,
        speed={"step": response / 100, "per_request": 0.0, "prefill": 1e9},
    )  # fmt: skip
    return done.lag.mean


def show(rows: list[tuple[str, float, float]], unit: str) -> None:
    print(f"\n  {'':<28}{'published':>12}{'simulated':>12}{'error':>9}   {unit}")
    for name, published, simulated in rows:
        print(f"  {name:<28}{published:>12.2f}{simulated:>12.2f}{simulated / published - 1:>+9.0%}")


def main() -> None:
    print(VERL)
    rows = verl_table()
    show(rows, "seconds a step")
    named = {name: (published, simulated) for name, published, simulated in rows}
    pairs = [
        ("colocate sync, 32", "fully async 16:16, s 0.5"),
        ("colocate sync, 64 (fitted)", "fully async 32:32, s 0.5"),
    ]
    pairs += [("colocate sync, 128", "fully async 64:64, s 0.5")]
    speedups = [
        (
            f"{before.split(', ')[1].split()[0]} GPUs",
            *(b / a for b, a in zip(named[before], named[after], strict=True)),
        )
        for before, after in pairs
    ]
    show(speedups, "times as fast, asynchronous over synchronous")
    print(AREAL)
    show(areal_table(), "hours")
    print(TINKER)
    show(
        [("depth 1 (fitted: 33 steps)", 0.97, tinker(1)), ("depth 3", 2.49, tinker(3))],
        "mean lag, in versions",
    )
    print("\n  depth 3 by how slow the sampler is, which is not published:")
    for response in (0.5, 0.75, 1.0):
        print(f"    a mean response takes {response:g} training steps: mean lag {tinker(3, response):.2f}")
    print(
        "\n  and by the depth of the train queue, in which batches wait (max_lag 6, one batch in flight or ready):"
    )
    for depth in range(4):
        print(f"    capacity {depth} of the batch: mean lag {queued(depth):.2f}")


def queued(depth: int) -> float:
    """Mean lag where batches that are formed wait in a queue of this depth."""
    over = [
        "dims.group=16",
        "dims.sample=8",
        "dims.response={mean: 100, max: 100000}",
        f"hops.batch.capacity={depth}",
    ]
    over += ["hops.dispatch.in.version.max_lag=6", "hops.buffer.with.capacity=128"]
    done = flowgraph.simulate(
        GRAPH, steps=60, warmup=10, overrides=over, engines=64, slots=64, lengths="exponential:100",
        train_seconds=1.0, speed={"step": 0.0005, "per_request": 0.0, "prefill": 1e9},
    )  # fmt: skip
    return done.lag.mean


if __name__ == "__main__":
    main()
