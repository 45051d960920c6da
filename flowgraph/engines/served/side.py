"""Side channels of a reply: what the engine chose in every layer while it sampled, narrowed where it is written.

SGLang 0.5.23 answers `return_routed_experts` and `return_indexer_topk` with base64 of little-endian int32
[tokens - 1 - start, layers, k] in `meta_info`; the last token was sampled and never computed, so it has no row. A field
of a msgspec Struct that is declared `bytes` decodes the base64 while the reply is parsed, which makes no string of it.

What a row says was measured on a server:
- Rows of a cached prefix are there, and are those that were recorded when its KV was computed.
- A retracted request's tokens are computed and recorded anew. When the weights changed meanwhile (pause mode
  `retract`), rows of tokens that were sampled before say what the new weights chose: `since` leaves them out.
- An aborted request has the rows of its partial response; one that was aborted while it waited has no field at all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from flowgraph.engines.protocol import Side
from flowgraph.models.facts import ModelFacts, layers_with_experts

Rows = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


class Channels(msgspec.Struct, frozen=True):
    """What side channels hold: `top_k` of `experts` in `moe_layers`, `index_top_k` positions in `index_layers`.

    layers: all hidden layers; those without experts have a place in `routed_experts` too, which is 0
    index_layers: how many layers have a place in `indexer_topk`
    """

    layers: int
    experts: int = 0
    top_k: int = 0
    moe_layers: tuple[int, ...] = ()
    index_layers: int = 0
    index_top_k: int = 0


def channels(facts: ModelFacts) -> Channels:
    """The side channels of a model, from its numbers and the names of its tensors."""
    return Channels(
        layers=facts.layers,
        experts=facts.experts or 0,
        top_k=facts.top_k or 0,
        moe_layers=layers_with_experts(tensor.name for tensor in facts.tensors),
        index_layers=facts.layers if facts.index_top_k else 0,
        index_top_k=facts.index_top_k or 0,
    )


def routed(
    raw: bytes | None, model: Channels, *, rid: str, tokens: int, start: int = 0, since: int = 0
) -> Side:
    """The experts that each token was routed to: u8 for at most 256 experts, else u16, [tokens, layers, top_k].

    raw: `meta_info.routed_experts`, without its base64; tokens: of prompt and response together
    start: the request's `routed_experts_start_len`; since: rows of earlier tokens are not taken

    A row that is 0 in every layer with experts was not recorded. Of a token's experts no two are the same, so where
    top_k is 2 or more, 0 in one layer alone is no choice, and neither is 0 in all rows.

    Raises ValueError, naming request, layer and row, for another number of rows, an id that is no expert's, a layer
    that was not recorded, and experts in a layer that has none.
    """
    if not model.moe_layers:
        raise ValueError(f"{rid}: no layer of the model has experts; don't ask for routed_experts")
    wide = _rows("routed_experts", raw, rid, tokens, start, model.layers, model.top_k)
    at = partial(_at, rid, "routed_experts")
    moe = list(model.moe_layers)
    dense = [layer for layer in range(model.layers) if layer not in model.moe_layers]
    unsigned = wide.view(np.uint32)  # so that one test finds negative ids too
    if unsigned.max(initial=0) >= model.experts:
        row, layer, k = _first(unsigned >= model.experts)
        raise ValueError(f"{at(row, layer)}: expert {wide[row, layer, k]}, expected 0 to {model.experts - 1}")
    if dense and (some := np.any(wide[:, dense], axis=2)).any():
        row, place = _first(some)
        raise ValueError(
            f"{at(row, dense[place])}: experts {wide[row, dense[place]].tolist()}, expected 0, as this layer of the "
            "model has none; the server gives it some (SGLang's Qwen2-MoE and Qwen3-MoE ignore mlp_only_layers)"
        )
    alike = _alike(wide)[:, moe]
    lost = ~np.any(wide[:, moe], axis=2) if alike.any() else alike
    there = _there(wide, alike, lost, moe, at) if model.top_k > 1 else ~np.all(lost, axis=1)
    dtype = np.dtype(np.uint8 if model.experts <= 256 else np.uint16)
    before, behind = _nothing(start, wide, dtype), _nothing(tokens - start - len(wide), wide, dtype)
    return _without(before.then(Side((wide,), there, dtype)).then(behind), since)


def indexed(raw: bytes | None, model: Channels, *, rid: str, tokens: int, since: int = 0) -> Side:
    """The positions that sparse attention let each token attend to, at the smallest dtype for `tokens`.

    raw: `meta_info.indexer_topk`, without its base64, [tokens - 1, index_layers, index_top_k]; always from token 0 on
    since: rows of earlier tokens are not taken

    A token that has fewer positions than index_top_k is given -1 in the rest, which becomes its own position.

    Raises ValueError as `routed` does, and for a position behind the token's own. Such is a slot of the server's KV
    cache: it gives positions only when started with SGLANG_DSA_FUSE_TOPK=0, and for every row only with
    SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD=0.
    """
    if not model.index_top_k:
        raise ValueError(f"{rid}: the model has no indexer; don't ask for indexer_topk")
    wide = _rows("indexer_topk", raw, rid, tokens, 0, model.index_layers, model.index_top_k)
    at = partial(_at, rid, "indexer_topk")
    own = np.arange(len(wide), dtype=np.int32)
    largest, smallest = wide.max(axis=2), wide.min(axis=2)
    if (wrong := (largest > own[:, None]) | (smallest < -1)).any():
        row, layer = _first(wrong)
        value = smallest[row, layer] if smallest[row, layer] < -1 else largest[row, layer]
        raise ValueError(
            f"{at(row, layer)}: position {value}, expected 0 to {row} or -1; the server gives slots of its "
            "cache instead of positions unless it is started with SGLANG_DSA_FUSE_TOPK=0"
        )
    alike = _alike(wide) & (wide[..., 0] >= 0) & (model.index_top_k > 1)
    lost = (largest < 0) | (alike & (largest == 0))
    there = _there(wide, alike | lost, lost, list(range(model.index_layers)), at)
    dtype = np.dtype(np.min_scalar_type(max(tokens - 1, 0)))
    rows = wide.astype(dtype)
    np.copyto(rows, own[:, None, None], where=wide < 0, casting="unsafe")
    rows[~there] = 0
    return _without(Side((rows,), there, dtype).then(_nothing(tokens - len(wide), wide, dtype)), since)


def joined(first: Side, second: Side, *, rid: str) -> Side:
    """A trajectory that went on: `second` adds the row of its last token and those that followed.

    second: of the same tokens and those that followed, from a request whose prompt begins with all tokens of `first`.
    Raises ValueError when it has fewer tokens, or other layers.
    """
    before, tokens = len(first.recorded), len(second.recorded)
    if tokens < before or first.shape[1:] != second.shape[1:]:
        raise ValueError(
            f"{rid}: a side channel of {list(second.shape)} can't go on from one of {list(first.shape)}: "
            "expected as many tokens or more, and the same layers"
        )
    last = before - 1  # what else `first` lacks was computed anew, maybe by other weights
    turn = last if before and not first.recorded[last] and second.recorded[last] else before
    return first.rows(0, turn).then(second.rows(turn, tokens))


def _rows(name: str, raw: bytes | None, rid: str, tokens: int, start: int, layers: int, k: int) -> Rows:
    """int32 [tokens - 1 - start, layers, k], a view of what was sent."""
    if raw is None:
        flag = name.replace("_", "-")
        raise ValueError(
            f"{rid}: the reply has no {name}, expected in meta_info; start the server with --enable-return-{flag}, and "
            f"ask with return_{name}"
        )
    rows = max(0, tokens - 1 - start)
    if len(raw) != rows * layers * k * 4:
        raise ValueError(
            f"{rid}: {name} has {len(raw)} bytes, {len(raw) / (layers * k * 4):g} rows; expected {rows} rows (of "
            f"{tokens} tokens, from {start} on, all but the last), {layers} layers, {k} int32 each"
        )
    return np.frombuffer(raw, "<i4").reshape(rows, layers, k)


def _alike(wide: Rows) -> Bools:
    """Where the first two choices are the same, as distinct choices never are. Of one choice: where it is 0."""
    return np.equal(wide[..., 0], wide[..., 1] if wide.shape[2] > 1 else 0)


def _there(wide: Rows, wrong: Bools, lost: Bools, layers: list[int], at: Callable[[int, int], str]) -> Bools:
    """Which rows were recorded: bool[rows]. wrong, lost: bool[rows, layers], no choice; and nothing at all.

    A row that is lost in every layer was not recorded, as long as others were.
    """
    absent: Bools = np.all(lost, axis=1)
    wrong = wrong & ~absent[:, None]
    if wrong.any():
        row, place = _first(wrong)
        chosen = wide[row, layers[place]].tolist()
        raise ValueError(f"{at(row, layers[place])}: {chosen} was not recorded, expected distinct choices")
    if len(absent) and absent.all():
        raise ValueError(
            f"{at(0, layers[0])}: nothing, nor in any other; expected choices, the server recorded none"
        )
    return ~absent


def _nothing(tokens: int, like: npt.NDArray[Any], dtype: np.dtype[Any]) -> Side:
    """Rows that were not recorded, of the layers of another array; they take no memory."""
    rows = np.broadcast_to(np.zeros((), dtype), (tokens, *like.shape[1:]))
    return Side((rows,), np.zeros(tokens, np.bool_), dtype)


def _without(side: Side, since: int) -> Side:
    """The same, of which the tokens before `since` were not recorded."""
    if not since:
        return side
    tokens = len(side.recorded)
    return _nothing(min(since, tokens), side.parts[0], side.dtype).then(side.rows(min(since, tokens), tokens))


def _first(mask: Bools) -> tuple[int, ...]:
    return tuple(int(at) for at in np.unravel_index(int(mask.argmax()), mask.shape))


def _at(rid: str, name: str, row: int, layer: int) -> str:
    return f"{rid}: {name} of layer {layer}, row {row}"
