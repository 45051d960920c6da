"""The learner on torch: a Hugging Face causal model, packed rows, one AdamW step per batch.

A step: check → pack → per micro-batch (backbone → head, loss and dlogits → backbone backward → add gradients
in float32) → divide and clip once → AdamW on float32 masters. Nothing is divided before the last token of the batch
is in, and then by a number of the *whole* batch, so loss and gradient are the same for any split.

Shapes: B lines of L positions in one forward pass (B = 1 for a tree), T = B·L; U predicting positions; N
masked tokens; D hidden size.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flowgraph.models.directory import read_tensors
from flowgraph.models.names import weights_of
from flowgraph.models.positions import has_indexer
from flowgraph.models.quiet import no_progress_bar

from . import attention
from .aggregate import divisor
from .head import Given, Head, HeadResult, Targets, TiedEmbedding, TokenHead
from .metrics import Part, metrics_of, share, totals
from .optim import MasterAdamW
from .pack import Micro, Packing, fill, positions, select
from .pack import pack as pack_rows
from .protocol import Aggregation, Rows, TokenLoss, check_aggregation
from .ranks import ALONE, Ranks
from .replay import Channel, Replay, channel
from .rows import check_rows
from .save import save_model

log = logging.getLogger(__name__)


class TorchLearner:
    """A `Learner` (see protocol.py) for one process.

    model_dir: a Hugging Face model directory
    lr, betas, eps, weight_decay, clip, warmup: see `MasterAdamW`
    dtype: of parameters in forward and backward; the optimiser works on float32 masters whatever it is
    pack, max_tokens: how rows become micro-batches, see pack.py; max_tokens bounds memory, not the result
    temperature: logits are divided by it, as they were when sampled
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
        lr: float,
        dtype: str = "bfloat16",
        pack: Packing = "tree",
        max_tokens: int = 4096,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        clip: float = 1.0,
        warmup: int = 0,
        temperature: float = 1.0,
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
        self._backbone = self._model.base_model
        self._head = self._make_head(temperature)
        self._embedding = _tied_embedding(self._model)
        config = self._model.config.get_text_config()
        self._vocabulary = int(config.vocab_size)
        self._context = int(getattr(config, "max_position_embeddings", None) or 1 << 62)
        _probe(self._model, self._forward, self._head, pack)
        self._optimizer = MasterAdamW(
            self._model.parameters(),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            clip=clip,
            warmup=warmup,
        )

    def _load(self, model_dir: str, dtype: torch.dtype, how: Packing) -> Any:
        """The model; what is not its head is its `base_model`."""
        from transformers import AutoModelForCausalLM

        return load_model(AutoModelForCausalLM, model_dir, dtype, how)

    def _make_head(self, temperature: float) -> TokenHead:
        return Head(self._model.get_output_embeddings(), temperature)

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
        check_aggregation(aggregate, length)
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
        micros = pack_rows(rows, self._pack, self._max_tokens)
        micros = fill(micros, self._ranks.most(len(micros)), self._pack)
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
        inputs = _inputs(micro, self._model.dtype)
        token_BL = inputs["input_ids"]
        embedded_BLD = self._embedding(token_BL) if self._embedding else None
        if embedded_BLD is not None:
            inputs |= {"input_ids": None, "inputs_embeds": embedded_BLD}
        hidden_UD = self._hidden(inputs, micro, chosen)
        given = _given(micro, rows, self._model.dtype)
        result = self._head.backward(hidden_UD.detach(), _targets(micro), given, loss, aggregate)
        torch.autograd.backward(hidden_UD, result.dhidden_UD)
        if self._embedding and embedded_BLD is not None:
            assert embedded_BLD.grad is not None
            self._embedding.backward(token_BL, embedded_BLD.grad)
        return result

    def _forward(self, micro: Micro, chosen: Replay | None = None) -> Tensor:
        """Hidden states of the predicting positions, after the backbone's last norm: [U,D]."""
        return self._hidden(_inputs(micro, self._model.dtype), micro, chosen)

    def _hidden(self, inputs: dict[str, Any], micro: Micro, chosen: Replay | None) -> Tensor:
        with chosen.forward(micro) if chosen else nullcontext():
            out = self._backbone(**inputs)
        hidden_TD: Tensor = out.last_hidden_state.flatten(0, 1)
        return hidden_TD.index_select(0, torch.from_numpy(micro.predictor_U))

    @torch.no_grad()
    def logprobs(self, rows: Rows, *, replay: bool = True) -> npt.NDArray[np.float32]:
        """See `Learner.logprobs`; at the learner's temperature."""
        return self._read(rows, replay)

    def _read(self, rows: Rows, replay: bool) -> npt.NDArray[np.float32]:
        """f32[token]: what the head reads of the masked tokens, 0 elsewhere."""
        check_rows(rows, vocabulary=self._vocabulary, context=self._context)
        out, chosen = np.zeros(len(rows.tokens), np.float32), self._replay(rows, replay)
        for micro in pack_rows(rows, self._pack, self._max_tokens):
            hidden_UD = self._forward(micro, chosen)
            out[micro.source_N] = self._head.read(hidden_UD, _targets(micro)).numpy()
        return out

    def weights(self) -> dict[str, Tensor]:
        """See `Learner.weights`."""
        found = weights_of(self._model, self._names)
        return {name: tensor.to(self._given) for name, tensor in found.items()} if self._given else found

    def save(self, directory: str) -> None:
        """See `Learner.save`; an existing directory of that name is replaced."""
        save_model(self._model, self._model_dir, directory)

    def close(self) -> None:
        """Free the model and the optimiser. Harmless when repeated."""
        for name in ("_model", "_backbone", "_head", "_embedding", "_optimizer", "_channels"):
            self.__dict__.pop(name, None)


def _check_config(
    model_dir: str,
    dtype: str,
    how: str,
    max_tokens: int,
    lr: float,
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
    for name, value in (("lr", lr), ("warmup", warmup)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be finite and not negative, not {value}")


def load_model(kind: Any, model_dir: str, dtype: torch.dtype, how: Packing, **config: Any) -> Any:
    """kind: one of transformers' Auto classes; config: what its configuration has besides that of the files."""
    implementation = attention.register() if how != "padded" else None  # None: the model's own default
    with no_progress_bar():
        model = kind.from_pretrained(model_dir, dtype=dtype, attn_implementation=implementation, **config)
    # Not train(): dropout would make the log-probabilities random, and the ratio of the first step not 1.
    return model.eval()


def _tied_embedding(model: Any) -> TiedEmbedding | None:
    """Only for a plain embedding: one that scales or projects is left to autograd."""
    layer, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and layer.weight is head.weight
    return TiedEmbedding(layer) if tied and type(layer) is torch.nn.Embedding else None


def _probe(model: Any, forward: Callable[[Micro], Tensor], head: TokenHead, how: Packing) -> None:
    """Refuse a model that the packing does not fit, on two short rows that share a prompt.

    The second row's logits are computed by our backbone and head beside one first row, and by the model's own
    forward pass beside another. They differ if logits are more than hidden · headᵀ (caps, scales), or if rows
    leak into each other (recurrence, a model that ignores the plan).
    """
    prompt, length = 6, 12
    config = model.config.get_text_config()
    row_2L = np.arange(2 * length, dtype=np.int32).reshape(2, -1) % min(97, config.vocab_size - 1)
    row_2L[1, :prompt] = row_2L[0, :prompt]
    other_2L = row_2L.copy()
    other_2L[0, prompt:] = row_2L[0, prompt:][::-1]
    mask_2L = np.broadcast_to(np.arange(length) >= prompt, row_2L.shape)
    offsets = np.array([0, length, 2 * length])
    logits = []
    with torch.no_grad():
        for tokens_2L, whole in ((row_2L, False), (other_2L, True)):
            rows = Rows(tokens_2L.ravel(), offsets, mask_2L.ravel(), {})
            (micro,) = pack_rows(rows, how, max_tokens=2 * length)
            if whole:
                out_TV = model(**_inputs(micro, model.dtype)).logits.flatten(0, 1)
                logits_UV = out_TV[torch.from_numpy(micro.predictor_U)]
            else:
                logits_UV = head.logits(forward(micro))
            second = np.sort(micro.source_N.argsort()[length - prompt :])
            logits.append(logits_UV[micro.which_N[second]].double())
    error = float(torch.linalg.vector_norm(logits[0] - logits[1]) / torch.linalg.vector_norm(logits[1]))
    if not error < (2e-2 if model.dtype == torch.bfloat16 else 1e-4):
        raise NotImplementedError(
            f"{type(model).__name__} does not fit pack={how!r}: packed logits differ by {error:.1%} from its"
            " own (recurrent layers, or a head that is more than one matrix)"
        )


def _inputs(micro: Micro, dtype: torch.dtype) -> dict[str, Any]:
    """Keyword arguments of a model's forward pass."""
    inputs: dict[str, Any] = {
        "input_ids": torch.from_numpy(micro.token_T).view(micro.lines, -1),
        "position_ids": torch.from_numpy(micro.depth_T).view(micro.lines, -1),
        "use_cache": False,
    }
    # Padding stands on the right, where causal attention never looks: padded lines need no mask.
    return inputs | {"tree": attention.TreePlan(micro, dtype)} if micro.buckets else inputs


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
