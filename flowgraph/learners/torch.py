"""The learner on torch: a Hugging Face causal model, packed rows, one optimiser step per batch.

A step: check → pack → per micro-batch (backbone → head, loss and dlogits → backbone backward → add gradients
in float32) → divide and clip once → update float32 masters. Nothing is divided before the last token of the batch
is in, and then by a number of the *whole* batch, so loss and gradient are the same for any split.

Shapes: B lines of L positions in one forward pass (B = 1 for a tree), T = B·L; U predicting positions; N
masked tokens; D hidden size.
"""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flowgraph.models.directory import read_tensors
from flowgraph.models.positions import has_indexer

from .aggregate import counts_sequences, divisor
from .head import Given, Head, HeadResult, Targets, TokenHead, marked
from .layers import compute_again, head_of, layers_of
from .load import load_model, model_inputs, probe
from .lora import adapt
from .metrics import Part, metrics_of, share, totals
from .optim import Schedule, create_optimizer
from .pack import Micro, Packing, fill, positions, select
from .pack import pack as pack_rows
from .protocol import Aggregation, Rows, TokenLoss, check_aggregation
from .ranks import ALONE, Ranks
from .registry import LoraOptions
from .replay import Channel, Replay, channel
from .rows import check_rows, minibatches
from .whole import Place, Whole

log = logging.getLogger(__name__)


class TorchLearner:
    """A `Learner` (see protocol.py), in one process or as one of several ranks.

    model_dir: a Hugging Face model directory
    lr, optimizer, betas, eps, weight_decay, clip, warmup, schedule, total_steps: see `optim.py`
    dtype: of parameters in forward and backward; the optimiser works on float32 masters whatever it is
    pack, max_tokens: how rows become micro-batches, see pack.py; max_tokens bounds memory, not the result
    temperature: logits are divided by it, as they were when sampled
    checkpoint, frozen, lora: see `TorchOptions`
    weights_dtype: of the weights that it gives away, copies then; None for views of its own
    threads: of torch in this process; None leaves torch's own choice
    ranks: the processes that hold the model between them, this one among them

    Deterministic: the same inputs give the same bits for the same number of threads.
    Raises NotImplementedError for a model whose attention or head is not what the packing assumes.
    """

    def __init__(
        self,
        model_dir: str,
        *,
        lr: float | None = None,
        dtype: str = "bfloat16",
        pack: Packing = "tree",
        max_tokens: int = 4096,
        optimizer: str = "adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        clip: float = 1.0,
        warmup: int = 0,
        schedule: Schedule = "constant",
        total_steps: int | None = None,
        temperature: float = 1.0,
        checkpoint: bool = False,
        frozen: bool = False,
        lora: LoraOptions | None = None,
        weights_dtype: str | None = None,
        threads: int | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        _check_config(model_dir, dtype, pack, max_tokens, lr, clip, warmup, temperature)
        if threads is not None:
            torch.set_num_threads(threads)
        self._ranks = ranks
        ranks.open()
        self._model_dir, self._pack, self._max_tokens = model_dir, pack, max_tokens
        self._model = self._load(model_dir, getattr(torch, dtype), pack)
        self._names = read_tensors(Path(model_dir)).keys()
        self._given: torch.dtype | None = getattr(torch, weights_dtype) if weights_dtype else None
        self._channels: dict[str, Channel] = {}
        if pack != "padded" and has_indexer(self._model):
            raise NotImplementedError(
                f"pack={pack!r} knows no attention of {type(self._model).__name__}, which reads the positions that an "
                "indexer chooses; use pack='padded'"
            )
        self._head = self._make_head(temperature)
        config = self._model.config.get_text_config()
        self._vocabulary = int(config.vocab_size)
        self._context = int(getattr(config, "max_position_embeddings", None) or 1 << 62)
        self._dtype: torch.dtype = self._model.dtype
        if frozen:
            self._model.requires_grad_(False)
        if lora is not None:
            adapt(self._model, lora)
        self._place: Place = Whole(self._model, lora)
        probe(self._model, self._forward, self._head, pack)
        if checkpoint:
            compute_again(layers_of(self._model))
        if ranks.of > 1:
            from .sharded import Sharded

            self._place = Sharded(self._model, layers_of(self._model), ranks, lora)
        self._frozen = frozen
        self._optimizer = create_optimizer(
            optimizer,
            self._place.parameters(),
            lr=lr or 0.0,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            clip=clip,
            warmup=warmup,
            schedule=schedule,
            total_steps=total_steps,
            totals=ranks.sum,
        )

    def _load(self, model_dir: str, dtype: torch.dtype, how: Packing) -> Any:
        """The model; what is not its head is its `base_model`."""
        from transformers import AutoModelForCausalLM

        return load_model(AutoModelForCausalLM, model_dir, dtype, how)

    def _make_head(self, temperature: float) -> TokenHead:
        return Head(head_of(self._model), temperature)

    def step(
        self,
        rows: Rows,
        loss: TokenLoss,
        *,
        aggregate: Aggregation = "token-mean",
        length: int | None = None,
        replay: bool = True,
    ) -> dict[str, float]:
        """See `Learner.step`. Metrics besides: positions, how many the model computed, and padding, the share of them
        that hold no token; those of `Replay` where rows have side channels.

        Raises FloatingPointError for a loss or a gradient norm that is not finite; parameters and optimiser
        are then as before.
        """
        if self._frozen:
            raise RuntimeError(
                "the learner is frozen: it scores rows and takes no step; train one without `frozen`"
            )
        check_aggregation(aggregate, length)
        with self._ranks.together("for a batch"):
            return self._step(rows, loss, aggregate, length, replay)

    def _step(
        self, rows: Rows, loss: TokenLoss, aggregate: Aggregation, length: int | None, replay: bool
    ) -> dict[str, float]:
        try:
            mine = self.accumulate(rows, loss, aggregate=aggregate, replay=replay)
            total = totals(self._ranks.gather(mine))
        except BaseException:
            self._optimizer.drop()
            raise
        by = divisor(aggregate, length, total.sums["kept_tokens"], total.sums["kept_sequences"])
        metrics = metrics_of(total, by)
        if not by:
            self._optimizer.drop()
            log.warning(
                "no token of the batch of %d rows is trained on: no step taken", len(rows.offsets) - 1
            )
            return {**metrics, "grad_norm": 0.0, "lr": 0.0, "skipped": 1.0}
        norm, lr = self._optimizer.step(by)
        return {**metrics, "grad_norm": norm, "lr": lr, "skipped": 0.0}

    def accumulate(
        self, rows: Rows, loss: TokenLoss, *, aggregate: Aggregation = "token-mean", replay: bool = True
    ) -> Part:
        """Forward and backward of this process's rows: their gradients are added up in the optimiser, undivided."""
        check_rows(rows, vocabulary=self._vocabulary, context=self._context)
        together = marked(loss, "whole") or counts_sequences(aggregate)
        micros = self._micros(self._laid(rows, together))
        chosen = self._replay(rows, replay)
        sums = {
            "tokens": float(rows.mask.sum()),
            "rows": float(_trained_rows(rows)),
            "positions": float(positions(micros)),
            "kept_tokens": 0.0,
            "kept_sequences": 0.0,
            **share("padding", sum(int((micro.source_T < 0).sum()) for micro in micros), positions(micros)),
        }
        spread: dict[str, list[Tensor]] = {}
        for micro in micros:
            found = self._backward(micro, rows, loss, aggregate, chosen)
            for name, value in found.sums.items():
                sums[name] = sums.get(name, 0.0) + value
            for name, values in found.spread.items():
                spread.setdefault(name, []).append(values)
            if len(micros) > 1:
                self._optimizer.accumulate()
        sums |= chosen.sums() if chosen else {}
        return Part(sums, {name: torch.cat(parts).numpy() for name, parts in spread.items()})

    def _replay(self, rows: Rows, force: bool) -> Replay | None:
        for name in rows.side:
            if name not in self._channels:
                self._channels[name] = channel(name, self._model)
        return Replay(self._channels, rows, force=force) if rows.side else None

    def _backward(
        self, micro: Micro, rows: Rows, loss: TokenLoss, aggregate: Aggregation, chosen: Replay | None
    ) -> HeadResult:
        """Add one micro-batch's gradient; returns its share of loss, entropy and the loss's metrics."""
        # Around all of it: where activations are computed again, what was recorded has to be put in again.
        with chosen.forward(micro) if chosen else nullcontext():
            hidden_UD = self._forward(micro)
            given = _given(micro, rows, self._dtype)
            result = self._head.backward(hidden_UD.detach(), _targets(micro), given, loss, aggregate)
            self._place.backward(hidden_UD, result.dhidden_UD)
        return result

    def _forward(self, micro: Micro) -> Tensor:
        """Hidden states of the predicting positions, after the backbone's last norm: [U,D]."""
        hidden_BLD = self._place.forward(model_inputs(micro, self._dtype))
        return hidden_BLD.flatten(0, 1).index_select(0, torch.from_numpy(micro.predictor_U))

    def minibatches(self, rows: Rows, count: int) -> list[Rows]:
        """See `Learner.minibatches`."""
        with self._ranks.together("to cut a batch"):
            return minibatches(rows, count, self._ranks.places, self._ranks.gather)

    @torch.no_grad()
    def logprobs(self, rows: Rows, *, replay: bool = True) -> npt.NDArray[np.float32]:
        """See `Learner.logprobs`; at the learner's temperature."""
        return self._read(rows, replay)

    def _read(self, rows: Rows, replay: bool) -> npt.NDArray[np.float32]:
        """f32[token]: what the head reads of the masked tokens, 0 elsewhere."""
        with self._ranks.together("to score a batch"):
            check_rows(rows, vocabulary=self._vocabulary, context=self._context)
            out, chosen = np.zeros(len(rows.tokens), np.float32), self._replay(rows, replay)
            for micro in self._micros(self._laid(rows, together=False)):
                with chosen.forward(micro) if chosen else nullcontext():
                    hidden_UD = self._forward(micro)
                if len(micro.source_N):
                    out[micro.source_N] = self._head.read(hidden_UD, _targets(micro)).numpy()
                self._place.done()
        return out

    def _laid(self, rows: Rows, together: bool) -> list[Micro]:
        """This process's micro-batches; together: each trajectory in one, with all its leaves."""
        micros = pack_rows(rows if together else rows._replace(trajectory=None), self._pack, self._max_tokens)
        largest = max((len(micro.token_T) for micro in micros), default=0)
        if largest > self._max_tokens:
            log.warning(
                "a micro-batch has %d positions, more than max_tokens %d: %s stands alone",
                largest,
                self._max_tokens,
                "a trajectory, which this loss needs whole," if together else "a row",
            )
        return micros

    def _micros(self, micros: list[Micro]) -> list[Micro]:
        """As many on each rank as on the one that has most."""
        return fill(micros, self._ranks.most(len(micros)), self._pack)

    def weights(self) -> dict[str, Tensor]:
        """See `Learner.weights`."""
        with self._ranks.together("for weights"):
            found = self._place.weights(self._names)
        return {name: tensor.to(self._given) for name, tensor in found.items()} if self._given else found

    def save(self, directory: str) -> None:
        """See `Learner.save`; an existing directory of that name is replaced."""
        with self._ranks.together("to save the model"):
            self._place.save(self._model_dir, directory)

    def close(self) -> None:
        """Free the model and the optimiser. Harmless when repeated."""
        for name in ("_model", "_place", "_head", "_optimizer", "_channels"):
            self.__dict__.pop(name, None)
        self._ranks.close()


def _check_config(
    model_dir: str,
    dtype: str,
    how: str,
    max_tokens: int,
    lr: float | None,
    clip: float,
    warmup: int,
    temperature: float,
) -> None:
    if not os.path.isdir(model_dir):
        raise FileNotFoundError(f"no model directory at {model_dir!r}")
    if dtype not in ("bfloat16", "float32", "float64"):
        raise ValueError(f"dtype must be bfloat16, float32 or float64, not {dtype!r}")
    if how not in ("padded", "packed", "tree"):
        raise ValueError(f"pack must be padded, packed or tree, not {how!r}")
    for name, value in (("max_tokens", max_tokens), ("clip", clip), ("temperature", temperature)):
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be positive and finite, not {value}")
    for name, value in (("lr", lr or 0.0), ("warmup", warmup)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be finite and not negative, not {value}")


def _targets(micro: Micro) -> Targets:
    return Targets(torch.from_numpy(micro.which_N), torch.from_numpy(micro.target_N))


def _given(micro: Micro, rows: Rows, dtype: torch.dtype) -> Given:
    """What the loss reads of a micro-batch's masked tokens: integers and booleans as they are, all else (bfloat16 too)
    widened.
    """
    fields = {
        name: torch.from_numpy(values)
        if values.dtype.kind in "biu"
        else torch.from_numpy(values.astype(np.float64 if dtype == torch.float64 else np.float32))
        for name, values in select(micro, dict(rows.fields)).items()
    }
    row_N = np.searchsorted(rows.offsets, micro.source_N, side="right") - 1
    of_N = row_N if rows.trajectory is None else rows.trajectory[row_N]
    names, sequence_N = np.unique(of_N, return_inverse=True)
    return Given(fields, torch.from_numpy(sequence_N.astype(np.int64)), len(names))


def _trained_rows(rows: Rows) -> int:
    counts = np.concatenate([[0], np.cumsum(rows.mask)])[rows.offsets]
    return int(np.count_nonzero(np.diff(counts)))
