"""One rank of a learner, as a process of its own: runs the cases that it is told, and keeps what rank 0 found.

    python ranks_job.py RANK OF STORE JOB.json

A job is {"model": directory, "out": directory, "deadline": seconds, "end": how rank 1 ends, "cases": {name: case}}.
The same functions run a case in one process, to compare with.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from learner_rows import LOSS, make_rows, sampled
from torch.distributed.tensor import DTensor

from flowgraph.errors import RunError
from flowgraph.learners.protocol import Losses, Rows, TokenLoss, Tokens, token_loss
from flowgraph.learners.ranks import Ranks
from flowgraph.learners.registry import LoraOptions
from flowgraph.learners.rows import take
from flowgraph.learners.torch import TorchLearner
from flowgraph.learners.value import ValueLearner


@token_loss(values=True)
def value_loss(tokens: Tokens) -> Losses:
    return Losses((tokens.values - tokens.fields["advantages"]) ** 2)


class Found(NamedTuple):
    """gradient: of the undivided sum; updates: the change of the weights by `steps` steps; all on the first rank.

    logprobs: of all ranks; of a critic its values
    """

    gradient: dict[str, torch.Tensor]
    metrics: list[dict[str, float]]
    updates: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    logprobs: np.ndarray[Any, Any]


def batch(name: str, vocabulary: int = 256) -> tuple[Rows, list[int]]:
    """Rows, and how many of them each of two ranks takes."""
    if name == "L3":  # 12 trained tokens on one, 2 on the other
        return make_rows([list(range(5, 19)), [40, 41, 42]], [[0, 0] + [1] * 12, [0, 1, 1]]), [1, 1]
    if name == "L4":  # nothing to train on the other
        return make_rows([[1, 2, 3, 4], [5, 6, 7], [7, 8]], [[0, 1, 1, 1], [0, 1, 1], [0, 0]]), [2, 1]
    if name == "idle":  # no row at all on the other
        return make_rows([[1, 2, 3, 4], [5, 6, 7]], [[0, 1, 1, 1], [0, 1, 1]]), [2, 0]
    if name == "B4":  # many micro-batches on one, one on the other
        return sampled(3, 20, 4, 30), [10, 2]
    if name == "B1":  # seven rows of unlike lengths
        tokens = [list(range(5 * i, 6 * i + 3)) for i in range(1, 8)]
        return make_rows(tokens, [[0] + [1] * (len(one) - 1) for one in tokens]), [4, 3]
    if name == "nothing":
        return make_rows([[1, 2, 3], [4, 5, 6]], [[0, 0, 0], [0, 0, 0]]), [1, 1]
    if name == "real":  # for a real model: longer rows
        return sampled(2, 24, 4, 24, seed=1), [5, 3]
    raise KeyError(name)


def run(model: str, case: dict[str, Any], ranks: Ranks) -> Found:
    """case: rows (of `batch`), steps, where to save, whether it is a critic, and the learner's options."""
    options = dict(case)
    rows, shares = batch(options.pop("rows"))
    steps, save = options.pop("steps", 0), options.pop("save", None)
    if "lora" in options:
        options["lora"] = LoraOptions(**options["lora"])
    first = sum(shares[: ranks.rank])
    order = list(range(first, first + shares[ranks.rank]))
    mine = rows if ranks.of == 1 else take(rows, order)
    defaults = {"lr": 1e-2, "dtype": "float32", "threads": 1, "max_tokens": 64}
    critic = options.pop("critic", False)
    kind, loss = (ValueLearner, value_loss) if critic else (TorchLearner, LOSS)
    learner = kind(model, ranks=ranks, **defaults | options)
    logprobs = learner.values(mine) if isinstance(learner, ValueLearner) else learner.logprobs(mine)
    gradient = {} if options.get("frozen") else accumulated(learner, mine, loss)
    before = {name: tensor.clone() for name, tensor in learner.weights().items()}
    metrics = [learner.step(mine, loss) for _ in range(steps)]
    weights = learner.weights()
    if save is not None:
        learner.save(save)
    updates = {name: before[name].neg_().add_(tensor) for name, tensor in weights.items()}
    kept = {name: tensor.clone() for name, tensor in weights.items()} if save is not None else {}
    return Found(gradient, metrics, updates, kept, np.concatenate(ranks.gather(logprobs)))


def accumulated(learner: TorchLearner, rows: Rows, loss: TokenLoss) -> dict[str, torch.Tensor]:
    """The sum over all ranks, whole, before anything is divided."""
    learner.accumulate(rows, loss)
    named = [(name, p) for name, p in learner._model.named_parameters() if p.requires_grad]
    found = {}
    for (name, parameter), sums in zip(named, learner._optimizer._gradients(), strict=True):
        sharded = isinstance(parameter, DTensor)
        if sums is not None:
            found[name] = parameter.grad.full_tensor() if sharded else sums.clone()  # type: ignore[union-attr]
    learner._optimizer.drop()
    return found


def end(how: str, model: str, ranks: Ranks) -> str:
    """Rank 1 ends in the middle of a step; the name and text of the error that the others get, and after what time."""

    def loss(tokens: Any) -> Any:
        if ranks.rank == 1 and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if ranks.rank == 1 and how == "hang":
            time.sleep(2 * ranks.deadline)
        if ranks.rank == 1 and how == "raise":
            raise ValueError("no such advantage")
        return LOSS(tokens)

    rows, _ = batch("L3")
    learner = TorchLearner(model, lr=1e-2, dtype="float32", threads=1, ranks=ranks)
    began = time.monotonic()
    try:
        learner.step(take(rows, [ranks.rank]), loss)
    except (RunError, ValueError) as error:
        return f"{type(error).__name__} after {time.monotonic() - began:.1f} s: {error}"
    return "no error"


def main() -> None:
    rank, of, store, job = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    told = json.loads(job.read_text())
    ranks = Ranks(rank, of, store=store, deadline=told.get("deadline", 60))
    for name, case in told["cases"].items():
        found = run(told["model"], case, ranks)
        if ranks.first:
            torch.save(found._asdict(), Path(told["out"], f"{name}.pt"))
        else:
            assert found.updates == {}
    if "end" in told:
        text = end(told["end"], told["model"], ranks)
        Path(told["out"], f"end-{rank}.txt").write_text(text)
    ranks.close()


if __name__ == "__main__":
    main()
