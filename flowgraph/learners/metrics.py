"""The metrics of a step, from sums over a batch: whatever split the batch was computed in, they are the same."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

COUNTS = ("tokens", "rows", "positions")
# Of the metrics whose distribution is told. The mean goes by the plain name.
QUANTILES = {"p05": 0.05, "p50": 0.5, "p95": 0.95, "max": 1.0}
# What a learner says itself: no loss may give a metric of such a name, which would be added to it or hide it.
OWN = {
    *COUNTS,
    *(
        "loss",
        "entropy",
        "grad_norm",
        "lr",
        "skipped",
        "padding",
        "imbalance",
        "kept_tokens",
        "kept_sequences",
    ),
    *("recorded", "routing_mismatch", "indexer_mismatch"),
}
_OF = " of"  # sums["x of"] is what the sum of x is divided by


class Part(NamedTuple):
    """What one process knows of a batch.

    sums: to be added up over processes; spread: name → f[token], metrics of which all values are needed
    """

    sums: dict[str, float]
    spread: dict[str, npt.NDArray[Any]]


def totals(parts: Sequence[Part]) -> Part:
    """Of the whole batch. A name that a process lacks (it had no token) is 0 there. The only sum over processes."""
    names = dict.fromkeys(name for part in parts for name in part.sums)
    sums = {name: math.fsum(part.sums.get(name, 0.0) for part in parts) for name in names}
    spread = {
        name: np.concatenate([part.spread[name] for part in parts if name in part.spread])
        for name in dict.fromkeys(name for part in parts for name in part.spread)
    }
    if len(parts) > 1:
        most = max(part.sums["positions"] for part in parts)
        sums |= share("imbalance", most, sums["positions"] / len(parts))
    return Part(sums, spread)


def check_names(metrics: Iterable[str], spread: Collection[str]) -> None:
    """Raises ValueError for a loss's metric that has a name which something else has."""
    given = [*metrics, *spread, *(f"{name}_{which}" for name in spread for which in QUANTILES)]
    for name in given:
        if name in OWN or name.endswith(_OF) or given.count(name) > 1:
            whose = "a metric of the learner" if name in OWN else "another sum of the step"
            raise ValueError(f"the loss's metric {name!r} has the name of {whose}; give it another name")


def share(name: str, part: float, of: float) -> dict[str, float]:
    """A metric that is part / of, as two sums."""
    return {name: float(part), name + _OF: float(of)}


def metrics_of(total: Part, divisor: float) -> dict[str, float]:
    """Counts stay, the loss is divided by `divisor`, shares by what they are of (left out where that is 0), all else by
    the number of masked tokens. Of spread values come NAME_p05, NAME_p50, NAME_p95 and NAME_max.
    """
    sums = total.sums
    metrics = {name: sums[name] for name in COUNTS} | {"loss": 0.0, "entropy": 0.0}
    for name, value in sums.items():
        of = divisor if name == "loss" else sums.get(name + _OF, sums["tokens"])
        if of and name not in (*COUNTS, "kept_tokens", "kept_sequences") and not name.endswith(_OF):
            metrics[name] = value / of
    for name, values in total.spread.items():
        found = np.quantile(values, list(QUANTILES.values()))
        metrics |= {f"{name}_{which}": float(q) for which, q in zip(QUANTILES, found, strict=True)}
    return metrics
