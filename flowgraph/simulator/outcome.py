"""What came of a simulation, as one value and as text."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import msgspec

from flowgraph.runtime.ledger import Counts
from flowgraph.simulator.trace import Point
from flowgraph.spec.units import counted


class Lags(msgspec.Struct, frozen=True):
    """Versions that what was trained was behind. counts: lag → trajectories, or steps"""

    mean: float
    max: int
    counts: dict[int, int]


class Cut(msgspec.Struct, frozen=True):
    """Lengths that were drawn longer than may be. of: responses or prompts; share: of all that were asked for

    at: tokens that they were cut to; by: what says so; raised: what raises it
    """

    of: str
    share: float
    at: int
    by: str
    raised: str

    def __str__(self) -> str:
        return (
            f"{_percent(self.share)} of {self.of} are cut at {self.at:,} ({self.by}); {self.raised} raises it"
        )


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation, over its measured part: the steps after the warm-up, `seconds` of the virtual clock.

    cut: of the whole run, lengths that the graph or a setting doesn't let be as long as they were drawn
    trajectories, tokens: that were trained on, prompts too
    step_seconds, step_spread: between the ends of two steps, mean and standard deviation
    slots_empty: share of slot-time; engines_idle: share of engine-time without any request; trainer_idle: of its time
    lag: of the data trained on, by trajectory; weights_lag: of the weights served when a step's training began, by step
    in_flight, ready, queued, waiting, watermark: averages over time
    flight_seconds: mean time from dispatch to ready, of those that became ready; finished: how many did
    ledger: of the whole run, as every trajectory was at its end; retractions, prefilled: of the whole run
    events: of the whole run: a trajectory is dispatched, becomes ready, is consumed or dropped
    """

    graph: str
    engines: int
    slots: int
    lengths: str
    prompts: str
    cut: tuple[Cut, ...]
    seed: int
    steps: int
    warmup: int
    seconds: float
    trajectories: int
    tokens: int
    step_seconds: float
    step_spread: float
    slots_empty: float
    engines_idle: float
    trainer_idle: float
    lag: Lags
    weights_lag: Lags
    in_flight: float
    watermark: float
    ready: float
    queued: float
    waiting: float
    finished: int
    flight_seconds: float
    residence: float
    retractions: int
    prefilled: int
    ledger: Counts
    events: int
    points: tuple[Point, ...]

    @property
    def per_minute(self) -> float:
        """Trajectories that are trained on a minute."""
        return 60 * self.trajectories / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def __str__(self) -> str:
        return render(self)


def lags(counts: dict[int, int]) -> Lags:
    n = sum(counts.values())
    mean = sum(lag * many for lag, many in counts.items()) / max(1, n)
    return Lags(mean, max(counts, default=0), dict(sorted(counts.items())))


def to_json(found: Simulated) -> bytes:
    return msgspec.json.format(msgspec.json.encode(found), indent=1)


# --- as text -----------------------------------------------------------------------------------------------


def render(s: Simulated, width: int = 110) -> str:
    rows = [
        ("throughput", f"{s.per_minute:,.1f} trajectories/min, {s.tokens_per_second:,.0f} tokens/s trained"),
        ("step", f"{time_text(s.step_seconds)} ± {time_text(s.step_spread)}"),
        ("engines", f"{s.slots_empty:.1%} of slots empty; no request at all {s.engines_idle:.1%} of the time"),
        ("", f"{s.waiting:,.1f} requests waiting, {s.retractions:,} retracted, {s.prefilled:,} tokens prefilled"),
        ("trainer", f"idle {s.trainer_idle:.1%} of the time; {s.queued:,.2f} batches waiting for it"),
        ("trajectories", f"{s.in_flight:,.1f} in flight of {s.watermark:,.1f}, {time_text(s.flight_seconds)} each"),
        ("", f"{s.ready:,.1f} ready"),
        ("lag of data", _lag_text(s.lag)),
        ("lag of weights", _lag_text(s.weights_lag)),
        ("dropped", _dropped(s.ledger)),
        *((f"{one.of} cut", f"{_percent(one.share)} at {one.at:,} tokens") for one in s.cut),
    ]  # fmt: skip
    said = f"{s.graph}: {s.steps:,} {'step' if s.steps == 1 else 'steps'} simulated, {unmeasured(s.warmup)}"
    engines = f"{counted(s.engines, 'engine')} of {s.slots:,} slots"
    means = f"{engines}, responses {s.lengths}, prompts {s.prompts}, seed {s.seed}"
    lines = [said, means, ""]
    lines += [f"  {name:<16}{text}" for name, text in rows]
    return "\n".join([*lines, "", *_histogram(s.lag)]) + "\n"


def time_text(seconds: float) -> str:
    """`4.21 s`, `12.3 min`; 0 for what is rounding"""
    if seconds < 1e-9:
        return "0 s"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def unmeasured(warmup: int) -> str:
    """`the first 10 of them not measured`"""
    return f"the first {warmup:,} of them not measured" if warmup else "all of them measured"


def _percent(share: float) -> str:
    """`98%`, `0.3%`; never all nor nothing of what is neither"""
    if 0.995 <= share < 1:
        return "over 99%"
    if share < 0.001:
        return "<0.1%"
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def _lag_text(found: Lags) -> str:
    return f"mean {found.mean:.2f}, at most {found.max}"


def _dropped(ledger: Counts) -> str:
    total = sum(ledger.dropped.values())
    if not total:
        return "none"
    why = ", ".join(f"{n:,} {reason}" for reason, n in sorted(ledger.dropped.items()))
    return f"{total / ledger.dispatched:.1%} of {ledger.dispatched:,}: {why}"


def _histogram(found: Lags, longest: int = 40) -> list[str]:
    """A bar a lag, of the trajectories trained on."""
    total = sum(found.counts.values())
    most = max(found.counts.values(), default=1)
    out = []
    for lag, n in found.counts.items():
        bar = "█" * max(1, round(longest * n / most))
        out.append(f"  lag {lag:<4}{n / total:>7.1%}  {bar}")
    return out


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation."""
    mean = fmean(values)
    return mean, (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5
