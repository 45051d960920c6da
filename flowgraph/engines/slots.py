"""A Hugging Face causal model over a fixed number of slots: the tensors of the `transformers` engine.

Every decode step runs all S slots against all T columns of the cache, used or not: with shapes that never
change, the bits of a row depend on the row alone. A prompt is prefilled by itself, at the shape [1, P].

Shapes: L layers, S slots, H key/value heads, G query heads per key/value head, T columns (the context),
D head width, P prompt tokens, V vocabulary; B = S x H.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from flowgraph.engines.caches import Prefix, PromptCache, SlotCache
from flowgraph.engines.routing import RECORDERS, Recorder, Rows
from flowgraph.engines.weights.fit import refuse, unlike
from flowgraph.models.directory import read_tensors
from flowgraph.models.facts import layers_with_experts
from flowgraph.models.names import by_file_name, weights_of
from flowgraph.models.quiet import no_progress_bar

ALIGNMENT = 64  # bytes; kernels may sum in another order when a block starts off a vector boundary


def slot_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention for transformers: SDPA for a prompt; for a step, two batched products over the slots' heads.

    With one query per row, SDPA on the CPU takes up to 1.8 times as long as the products do, and seven
    times as long where the key/value heads are first repeated for each query head.
    """
    if (chosen := options.pop("indices", None)) is not None:
        mask = _only(mask, chosen)
    a_prompt = query.shape[2] > 1 or (
        mask is not None and mask.dtype == torch.bool
    )  # as transformers masks one
    if mask is None or a_prompt or options.get("position_bias") is not None:
        output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, **options)
        return output
    slots, heads, columns, width = key.shape
    groups = query.shape[1] // heads
    scale = options.get("scaling") or width**-0.5
    bias_BGT = mask.expand(slots, heads, groups, columns).reshape(-1, groups, columns)
    query_BGD, keys_BTD = query.reshape(-1, groups, width), key.view(-1, columns, width)
    scores_BGT = torch.baddbmm(bias_BGT, query_BGD, keys_BTD.mT, alpha=scale)
    mixed_BGD = torch.bmm(scores_BGT.softmax(dim=-1), value.reshape(-1, columns, value.shape[3]))
    return mixed_BGD.view(slots, 1, heads * groups, -1), None


def _only(mask_B1ST: Tensor | None, chosen_BSK: Tensor) -> Tensor:
    """The mask of a layer whose indexer chose what each query may attend to."""
    assert mask_B1ST is not None, "an indexer is given a mask, whatever it is"
    chosen_BST = torch.zeros_like(mask_B1ST[:, 0], dtype=torch.bool).scatter(-1, chosen_BSK.long(), True)
    if mask_B1ST.dtype == torch.bool:
        return mask_B1ST & chosen_BST[:, None]
    return mask_B1ST.masked_fill(~chosen_BST[:, None], -math.inf)


AttentionInterface.register("flowgraph_slots", slot_attention)
AttentionMaskInterface.register("flowgraph_slots", sdpa_mask)


class SlotModel:
    """Prefill prompts, fill slots, decode all slots by one token, and replace the weights in place."""

    def __init__(self, model_dir: str, *, slots: int, context: int, dtype: torch.dtype) -> None:
        with no_progress_bar():
            self._model = AutoModelForCausalLM.from_pretrained(
                model_dir, dtype=dtype, attn_implementation="flowgraph_slots", local_files_only=True
            ).eval()
        self._names = read_tensors(Path(model_dir)).keys()
        self._recorders: dict[str, Recorder] = {}
        if layers_with_experts(name for name, _ in self._model.named_parameters()):
            self._model.set_experts_implementation("flowgraph_slots")
        config = self._model.config
        if not self._model._supports_sdpa:
            raise ValueError(f"model type {config.model_type!r} needs an attention that this engine has not")
        _check_attention(config, context)
        # transformers renamed this argument in 5.24 and deprecates the old name.
        parameters = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        _in_one_dtype(self._model, dtype)
        self._context = context
        shapes = [(part.shape[1], part.shape[3]) for part in self.prefill([0]).parts_LHPD]
        multiple = math.lcm(
            *(ALIGNMENT // math.gcd(ALIGNMENT, width * dtype.itemsize) for _, width in shapes)
        )
        columns = math.ceil(context / multiple) * multiple
        self._cache = SlotCache(config.num_hidden_layers, slots, shapes, columns, dtype)
        self._columns_T = torch.arange(columns)
        self._visible = torch.zeros((), dtype=dtype)
        self._hidden = torch.full((), -math.inf, dtype=dtype)
        self.vocabulary: int = config.vocab_size
        eos = self._model.generation_config.eos_token_id
        eos = config.eos_token_id if eos is None else eos
        self.eos_ids = frozenset([eos] if isinstance(eos, int) else eos or ())

    def recorder(self, name: str) -> Recorder:
        """What records a side channel. ModelError where that can't be done."""
        if name not in self._recorders:
            self._recorders[name] = RECORDERS[name](self._model, self._context)
        return self._recorders[name]

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int], record: Iterable[str] = ()) -> Prefix:
        """Run one prompt of P tokens by itself. record: side channels"""
        cache, positions_1P = PromptCache(), torch.arange(len(prompt))[None]
        logits_1V, chosen = self._forward(torch.tensor([prompt]), positions_1P, None, cache, record)
        return Prefix(cache.parts, logits_1V[0], chosen)

    @torch.inference_mode()
    def fill(self, slot: int, prefix: Prefix) -> None:
        """Give a slot a prompt; whatever it held before is gone."""
        self._taken_cache().fill(slot, prefix.parts_LHPD)

    @torch.inference_mode()
    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], record: Iterable[str] = ()
    ) -> tuple[Tensor, dict[str, Rows]]:
        """Feed every slot one token at its position (any in a free slot); returns the logits [S, V], and of the side
        channels to be recorded what was chosen for those tokens.
        """
        cache = self._taken_cache()
        positions_S = torch.tensor(positions)
        mask_ST = torch.where(self._columns_T <= positions_S[:, None], self._visible, self._hidden)
        cache.positions_S = positions_S
        tokens_S1 = torch.tensor(tokens)[:, None]
        return self._forward(tokens_S1, positions_S[:, None], mask_ST[:, None, None, :], cache, record)

    def release_cache(self) -> int:
        """Give the memory of all slots back to the system, and lose what they hold; returns its bytes.

        Addresses stay. Until `resume_cache`, `fill` and `decode` raise RuntimeError. Again: does nothing, 0.
        """
        return self._cache.memory.release()

    def resume_cache(self) -> None:
        """Take the memory of the slots again, all zero as at the start. Does nothing where none is released."""
        self._cache.memory.resume()

    def _taken_cache(self) -> SlotCache:
        if self._cache.memory.released:
            raise RuntimeError("the memory of the key/value cache is released: call resume_cache() first")
        return self._cache

    def _forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache, record: Iterable[str]
    ) -> tuple[Tensor, dict[str, Rows]]:
        with ExitStack() as inside:
            captured = {name: inside.enter_context(self.recorder(name).capture()) for name in record}
            output = self._model(
                input_ids=ids,
                position_ids=positions,
                attention_mask=mask,
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_name: cache},
            )
        logits: Tensor = output.logits
        return logits[:, -1], {
            name: self.recorder(name).rows(one, positions) for name, one in captured.items()
        }

    @property
    def released(self) -> bool:
        return self._cache.memory.released

    @torch.inference_mode()
    def score(self, prompt: Sequence[int]) -> npt.NDArray[np.float32]:
        """f32[P]: the log-probability of each token given those before it, without any cache; 0 for the first."""
        ids_1P = torch.tensor([list(prompt)])
        logits_PV = self._model(input_ids=ids_1P, use_cache=False).logits[0].float()
        chosen_Q1 = logits_PV[:-1].log_softmax(dim=-1).gather(1, ids_1P[0, 1:, None])
        return np.concatenate([np.zeros(1, np.float32), chosen_Q1[:, 0].numpy()])

    def weights(self) -> dict[str, Tensor]:
        """Names as in the model's files → the memory that it computes with, tied ones once."""
        return weights_of(self._model, self._names)

    def load_weights(self, tensors: Mapping[str, Any]) -> None:
        """Copy every tensor into the model; see Engine.sync for what is refused.

        The two names of a tied weight are one weight: either may be given, or both with equal values.
        """
        targets = self.check_weights(tensors)
        with torch.no_grad():
            for name, tensor in tensors.items():
                targets[name].copy_(tensor)

    def check_weights(self, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
        """ValueError unless `load_weights` would take them; the model's own tensors by name."""
        targets = by_file_name(self._model.state_dict(), self._names)
        refuse(_mismatches(targets, tensors))
        return targets


def _in_one_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """transformers keeps some weights wider, such as a router's: weights cross in one dtype, and that one computes."""
    for tensor in model.state_dict(keep_vars=True).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def _mismatches(targets: Mapping[str, Tensor], tensors: Mapping[str, Any]) -> list[str]:
    """One line per tensor that is missing, unknown, of another shape or dtype, or unlike its tied twin."""
    problems: list[str] = []
    first: dict[int, str] = {}  # by address of the target, which tied names share
    for name, tensor in tensors.items():
        target = targets.get(name)
        if target is None:
            problems.append(f"{name!r} is no weight of this model")
        elif problem := unlike(name, tensor, target.shape, target.dtype):
            problems.append(problem)
        else:
            twin = first.setdefault(target.data_ptr(), name)
            if twin != name and not torch.equal(tensor, tensors[twin]):
                problems.append(f"{name!r} differs from {twin!r}, to which it is tied")
    covered = {targets[name].data_ptr() for name in tensors if name in targets}
    for name, target in targets.items():
        if target.data_ptr() not in covered:
            covered.add(target.data_ptr())
            problems.append(f"{name!r} is missing")
    return problems


def _check_attention(config: Any, context: int) -> None:
    """Refuse a model that one mask over the context, or rotary frequencies that never change, don't serve."""
    layer_types = getattr(config, "layer_types", None) or ()
    window = getattr(config, "sliding_window", None)
    kinds = sorted(set(layer_types) - {"full_attention", "indexed_attention"})
    if window and not layer_types and context > window:
        kinds = [f"a sliding window of {window}"]
    if kinds:
        raise ValueError(f"this engine needs full attention; {config.model_type!r} has {', '.join(kinds)}")
    rope = getattr(config, "rope_parameters", None) or {}
    limit = getattr(config, "max_position_embeddings", None)
    if rope.get("rope_type") == "longrope":  # beyond this length all rows' frequencies would change at once
        limit = rope.get("original_max_position_embeddings", limit)
    if limit is not None and context > limit:
        raise ValueError(f"a context of {context} exceeds the {limit} positions of this model")
