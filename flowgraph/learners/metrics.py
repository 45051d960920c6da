"""The metrics of a step, from sums over a batch: whatever split the batch was computed in, they are the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

COUNTS = ("tokens", "rows", "positions")
# Of the metrics whose distribution is told. The mean goes by the plain name.
QUANTILES = {"p05": 0.05, "p50": 0.5, "p95": 0.95, "max": 1.0}
_OF = " of"  # sums["x of"] is what the sum of x is divided by


def share(name: str, part: float, of: float) -> dict[str, float]:
    """A metric that is part / of, as sums."""
    return {name: float(part), name + _OF: float(of)}


def metrics_of(
    total: Mapping[str, float], spread: Mapping[str, npt.NDArray[Any]], divisor: float
) -> dict[str, float]:
    """total: sums over the batch. Counts stay, the loss is divided by `divisor`, shares by what they are of (left out
    where that is 0), all else by the number of masked tokens.

    spread: name → f[token], added as NAME_p05, NAME_p50, NAME_p95 and NAME_max.
    """
    metrics = {name: total[name] for name in COUNTS}
    metrics |= {"loss": 0.0, "entropy": 0.0}
    for name, value in total.items():
        of = divisor if name == "loss" else total.get(name + _OF, total["tokens"])
        if of and name not in (*COUNTS, "kept_tokens", "kept_sequences") and not name.endswith(_OF):
            metrics[name] = value / of
    for name, values in spread.items():
        found = np.quantile(values, list(QUANTILES.values())) if len(values) else ()
        metrics |= {f"{name}_{which}": float(q) for which, q in zip(QUANTILES, found, strict=False)}
    return metrics
