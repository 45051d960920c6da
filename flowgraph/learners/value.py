"""A critic: the learner with one number a token for an output instead of log-probabilities.

The value of the state before a token is read where the token's log-probability is, at the hidden state that predicts
it. So rows are packed, shared prefixes computed once, and gradients added up exactly as of any `TorchLearner`; only the
head is another. The model is transformers' own for token classification with one label, so that others can load it.

Shapes: as of head.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flowgraph.models.directory import read_tensors
from flowgraph.models.names import weights_of
from flowgraph.models.quiet import no_load_report

from .head import Given, HeadResult, Targets, TokenHead, evaluate, marked, widened
from .layers import head_of
from .pack import Packing
from .protocol import Aggregation, Rows, TokenLoss, Tokens
from .torch import TorchLearner, load_model


class ValueHead:
    """value = hidden · weight + bias, in float32 whatever the model's dtype: values are compared with returns."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self._layer = cast(torch.nn.Linear, layer)

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """[C,1], as the model's own forward gives them."""
        out: Tensor = self._layer(hidden_CD)
        return out

    @torch.no_grad()
    def read(self, hidden_UD: Tensor, targets: Targets) -> Tensor:
        """f32[N]: values."""
        wide = widened(hidden_UD.dtype)
        value_U = hidden_UD.to(wide) @ self._layer.weight[0].to(wide)
        if self._layer.bias is not None:
            value_U += self._layer.bias.to(wide)
        return value_U[targets.which_N]

    @torch.no_grad()
    def backward(
        self, hidden_UD: Tensor, targets: Targets, given: Given, loss: TokenLoss, mode: Aggregation
    ) -> HeadResult:
        """See `Head.backward`. Raises ValueError for a loss that reads no values."""
        if not marked(loss, "values"):
            raise ValueError(
                "the loss reads log-probabilities, and a critic has none; mark one that reads Tokens.values by"
                " token_loss(values=True), or use hops.value.fit"
            )
        value_N = self.read(hidden_UD, targets)
        masked_M = torch.bincount(given.sequence_N, minlength=given.sequences).to(value_N.dtype)
        none_N = torch.zeros_like(value_N)
        seen = Tokens(value_N, none_N, given.fields, given.sequence_N, given.sequences, value_N)
        found = evaluate(loss, seen, mode, masked_M)
        dvalue_U = torch.zeros(len(hidden_UD), dtype=value_N.dtype)
        dvalue_U.index_add_(0, targets.which_N, found.dlogprob_N)
        _add(self._layer.weight, (dvalue_U @ hidden_UD.to(value_N.dtype))[None])
        if self._layer.bias is not None:
            _add(self._layer.bias, dvalue_U.sum()[None])
        dhidden_UD = dvalue_U[:, None] * self._layer.weight.to(value_N.dtype)
        kept = {
            "kept_tokens": float(found.kept_M.sum()),
            "kept_sequences": float(torch.count_nonzero(found.kept_M)),
        }
        return HeadResult(found.sums | kept, dict(found.spread), dhidden_UD.to(hidden_UD.dtype))


class ValueLearner(TorchLearner):
    """A `Critic` (see protocol.py). Options are those of `TorchLearner`, without temperature.

    model_dir: a causal model, whose backbone it begins with and whose head it leaves; or what `save` wrote
    Raises NotImplementedError for a model that transformers has no token classification for.
    """

    def values(self, rows: Rows) -> npt.NDArray[np.float32]:
        """See `Critic.values`."""
        with torch.no_grad():
            return self._read(rows, replay=True)

    def step(self, rows: Rows, loss: TokenLoss, **how: Any) -> dict[str, float]:
        """See `Critic.step`."""
        metrics = super().step(rows, loss, **how)
        return {name: value for name, value in metrics.items() if name != "entropy"}

    def logprobs(self, rows: Rows, *, replay: bool = True) -> npt.NDArray[np.float32]:
        raise NotImplementedError(
            "a critic has values and no log-probabilities; ask a learner with head: tokens"
        )

    def _load(self, model_dir: str, dtype: torch.dtype, how: Packing) -> Any:
        from transformers import AutoConfig, AutoModelForTokenClassification

        config = AutoConfig.from_pretrained(model_dir)
        if type(config) not in AutoModelForTokenClassification._model_mapping:
            raise NotImplementedError(
                f"transformers has no token classification for {config.model_type} models, of which a critic is made;"
                " give the critic another model"
            )
        with no_load_report():  # of the head that it leaves, and of the one that it begins with
            model = load_model(AutoModelForTokenClassification, model_dir, dtype, how, num_labels=1)
        names = read_tensors(Path(model_dir)).keys()
        lost = sorted(n for n in weights_of(model, names).keys() - names if not n.startswith("score."))
        if lost:
            raise ValueError(f"{model_dir} has no tensor {lost[0]}, which the backbone of a critic needs")
        if "score.weight" not in names:
            _begin(model.score)
        return model

    def _make_head(self, temperature: float) -> TokenHead:
        return ValueHead(head_of(self._model))


@torch.no_grad()
def _begin(layer: torch.nn.Linear) -> None:
    """A new head: values near 0, the same in every run."""
    random = torch.Generator().manual_seed(0)
    layer.weight.copy_(torch.randn(layer.weight.shape, generator=random) / (layer.in_features + 1))
    if layer.bias is not None:
        layer.bias.zero_()


def _add(parameter: Tensor, gradient: Tensor) -> None:
    gradient = gradient.to(parameter.dtype)
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
