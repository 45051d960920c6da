"""The forward pass of Llama-shaped models, without what transformers does around it: prompts, and steps over slots.

A layer is four matrix products (q, k and v in one, gate and up in one). A step computes the first rows that are in
use, and reads the columns of the cache that one of them has reached; which numbers of rows and columns give the same
bits as all of them is found at the start, by comparing.

Whether a model is of this shape is not taken from its name: `is_llama` looks at its modules, and whoever makes a
`Llama` compares what it computes with what transformers does.

Where bfloat16 is slow (`multiplies_copies`), the products are float32, with copies of the matrices that take twice the
memory of the model; `refresh` copies them anew. Keys, values and attention stay in the model's dtype.

Shapes: N tokens, S slots, R rows of a step; L layers, D hidden size, I inner size; H key/value heads, G query heads of
each, A = H·G, W head width; P tokens of a prompt, T columns of the cache, C of them read; V vocabulary.
"""

from __future__ import annotations

import math
import os
import platform
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowgraph.engines.caches import SlotCache

SIZES = (
    8  # numbers of rows, and of columns, that a step may have: a new shape of a product costs milliseconds
)
COLUMNS = 64  # the unit of the latter
PIECE = 1024  # rows transposed at once: a head as a whole takes four times as long
SHARE = 1 / 8  # of the machine's memory that copies may take


class Matrix:
    """x_NK → x·Wᵀ + bias, for the weights of some linear layers below each other: [sum of outputs, K].

    The layers' own parameters become views of it, so that weights are written in place as before. copied: compute in
    float32, with a copy that `refresh` makes.
    """

    def __init__(self, layers: Sequence[nn.Linear], copied: bool) -> None:
        weights = [layer.weight for layer in layers]
        self._weight_MK = _stacked(weights)
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self._bias_M = _stacked(biases) if biases else None
        # Transposed: the product reads it row by row, at 1.1 to 1.3 times the speed of the other order.
        self._copy_KM = torch.empty(self._weight_MK.shape[::-1], dtype=torch.float32) if copied else None

    def refresh(self) -> None:
        if self._copy_KM is not None:
            pieces = zip(
                torch.split(self._copy_KM, PIECE, dim=1), torch.split(self._weight_MK, PIECE), strict=True
            )
            for copy_KP, weight_PK in pieces:
                copy_KP.copy_(weight_PK.T)

    def __call__(self, x_NK: Tensor, out: Tensor | None = None) -> Tensor:
        matrix_KM = self._weight_MK.T if self._copy_KM is None else self._copy_KM
        if out is not None:
            torch.mm(x_NK, matrix_KM, out=out)
            return out if self._bias_M is None else out.add_(self._bias_M)
        return (
            x_NK @ matrix_KM
            if self._bias_M is None
            else torch.addmm(self._bias_M.to(x_NK.dtype), x_NK, matrix_KM)
        )


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """All in one block of memory, of which each becomes a view."""
    if len(parts) == 1:
        return parts[0].data
    whole = torch.cat([part.data for part in parts])
    for part, view in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
        part.data = view
    return whole


class Norm(NamedTuple):
    """Root mean square norm over the last dimension."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Layer(NamedTuple):
    before_attention: Norm
    qkv: Matrix
    query: Norm | None
    key: Norm | None
    out: Matrix
    scale: float
    before_mlp: Norm
    gate_up: Matrix
    activation: Callable[[Tensor], Tensor]
    down: Matrix


class Llama:
    """model: a Hugging Face causal model for which `is_llama` holds; copied: multiply in float32, with copies."""

    def __init__(self, model: Any, cache: SlotCache, copied: bool) -> None:
        base, config = model.base_model, model.config
        self._cache = cache
        self._embedding_VD: Tensor = base.embed_tokens.weight.data
        self._head = Matrix([model.lm_head], copied)
        self._layers = [_layer(layer, copied) for layer in base.layers]
        self._norm = _norm(base.norm)
        self._width: int = base.layers[0].self_attn.head_dim
        self._heads: int = config.num_key_value_heads
        self._queries: int = config.num_attention_heads
        self._dtype: torch.dtype = model.dtype
        self._computed = torch.float32 if copied else model.dtype
        slots, columns = cache.parts_LSHTD[0].shape[1], cache.parts_LSHTD[0].shape[3]
        self._rows, self._columns = [slots], [columns]
        self._logits_SV = torch.empty(slots, len(self._embedding_VD), dtype=self._computed)
        example = torch.empty(0, dtype=self._computed)
        cos_1TW, sin_1TW = base.rotary_emb(example, position_ids=torch.arange(columns)[None])
        half = self._width // 2
        self._cos_TW, self._sin_TW = (
            cos_1TW[0],
            torch.cat((-sin_1TW[0, :, :half], sin_1TW[0, :, half:]), dim=1),
        )
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """To be called after the model's weights changed."""
        for layer in self._layers:
            for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down):
                matrix.refresh()
        self._head.refresh()

    def prompt(self, tokens: Sequence[int]) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """One prompt: its keys and values [L, H, P, W], and its hidden states after the last norm [P, D]."""
        shape = (2, len(self._layers), self._heads, len(tokens), self._width)
        keys_LHPW, values_LHPW = torch.empty(shape, dtype=self._dtype)

        def attend(at: int, layer: Layer, q_PAW: Tensor, kv_P2HW: Tensor) -> Tensor:
            for held_HPW, part_PHW in zip((keys_LHPW[at], values_LHPW[at]), kv_P2HW.unbind(1), strict=True):
                held_HPW.copy_(part_PHW.transpose(0, 1))
            mixed_1APW = F.scaled_dot_product_attention(
                q_PAW.transpose(0, 1)[None],
                keys_LHPW[at][None],
                values_LHPW[at][None],
                is_causal=True,
                scale=layer.scale,
                enable_gqa=True,
            )
            return mixed_1APW[0].transpose(0, 1)

        hidden_PD = self._forward(torch.tensor(tokens), torch.arange(len(tokens)), attend, self._layers)
        return (keys_LHPW, values_LHPW), hidden_PD

    def rows(self, count: int) -> int:
        """How many rows a step has that is to compute `count` of them."""
        return self._rows[bisect_left(self._rows, count)]

    def step(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """One token of each of the first slots, as many as `rows` said.

        Returns the logits [R, V], in memory that the next step writes to again.
        """
        columns = self._columns[bisect_left(self._columns, max(positions) + 1)]
        return self._step(torch.tensor(tokens), torch.tensor(positions), columns, self._layers)

    def _step(self, tokens_R: Tensor, positions_R: Tensor, columns: int, layers: list[Layer]) -> Tensor:
        rows, cache = len(tokens_R), self._cache
        cache.at(positions_R)
        seen_RC = torch.arange(columns) <= positions_R[:, None]
        bias_RC = torch.zeros(rows, columns, dtype=self._dtype).masked_fill_(~seen_RC, -math.inf)
        bias_RHGC = bias_RC[:, None, None].expand(-1, self._heads, self._queries // self._heads, -1)

        def attend(at: int, layer: Layer, q_RAW: Tensor, kv_R2HW: Tensor) -> Tensor:
            cache.write(at, *kv_R2HW.unbind(1))
            keys_RHCW, values_RHCW = cache.read(at, rows, columns)
            # The query heads of a key head as if they were positions.
            q_RHGW = q_RAW.reshape(rows, self._heads, -1, self._width)
            return F.scaled_dot_product_attention(
                q_RHGW, keys_RHCW, values_RHCW, bias_RHGC, scale=layer.scale
            )

        hidden_RD = self._forward(tokens_R, positions_R, attend, layers)
        return self._head(hidden_RD, self._logits_SV[:rows])

    def find_sizes(self) -> None:
        """See the module: what the first layer and the head make of random numbers, with fewer rows and columns.

        Leaves random numbers in the cache's first layer.
        """
        random = torch.Generator().manual_seed(0)
        slots, columns = self._rows[-1], self._columns[-1]
        for part_LSHTW in self._cache.parts_LSHTD:
            part_LSHTW[0].normal_(generator=random)
        tokens_S = torch.randint(len(self._embedding_VD), (slots,), generator=random)
        shares_S = torch.rand(slots, generator=random)

        def logits(rows: int, columns: int, reached: int) -> Tensor:
            positions_R = (shares_S * reached).long()[:rows]
            return self._step(tokens_S[:rows], positions_R, columns, self._layers[:1])

        whole_SV = logits(slots, columns, columns).clone()
        fewer = sorted({math.ceil(slots * part / SIZES) for part in range(1, SIZES)} - {slots})
        self._rows[:0] = [
            rows for rows in fewer if torch.equal(logits(rows, columns, columns), whole_SV[:rows])
        ]
        unit = math.ceil(columns / SIZES / COLUMNS) * COLUMNS
        narrow = [
            width
            for width in range(unit, columns, unit)
            if torch.equal(logits(slots, width, width).clone(), logits(slots, columns, width))
        ]
        self._columns[:0] = narrow

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self._head(hidden_ND)

    def _forward(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        attend: Callable[[int, Layer, Tensor, Tensor], Tensor],
        layers: list[Layer],
    ) -> Tensor:
        cos_N1W, sin_N1W = self._cos_TW[positions_N][:, None], self._sin_TW[positions_N][:, None]
        x_ND = self._embedding_VD[tokens_N].to(self._computed)
        rotated = self._queries + self._heads
        for at, layer in enumerate(layers):
            qkv_NHW = layer.qkv(layer.before_attention(x_ND)).view(len(x_ND), -1, self._width)
            qk_NHW = qkv_NHW[:, :rotated]
            if layer.query and layer.key:
                q_NAW, k_NHW = torch.split(qk_NHW, [self._queries, self._heads], dim=1)
                qk_NHW = torch.cat((layer.query(q_NAW), layer.key(k_NHW)), dim=1)
            turned_NHW = qk_NHW.roll(self._width // 2, -1)
            qkv_NHW[:, :rotated] = torch.addcmul(qk_NHW * cos_N1W, turned_NHW, sin_N1W)
            q_NAW, kv_NHW = torch.split(qkv_NHW.to(self._dtype), [self._queries, 2 * self._heads], dim=1)
            kv_N2HW = kv_NHW.reshape(len(x_ND), 2, self._heads, self._width)
            mixed_NA = attend(at, layer, q_NAW, kv_N2HW).reshape(len(x_ND), -1)
            x_ND = x_ND + layer.out(mixed_NA.to(self._computed))
            gate_NI, up_NI = layer.gate_up(layer.before_mlp(x_ND)).chunk(2, dim=-1)
            x_ND += layer.down(layer.activation(gate_NI).mul_(up_NI))
        return self._norm(x_ND)


def _layer(layer: Any, copied: bool) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        _norm(layer.input_layernorm),
        Matrix([attention.q_proj, attention.k_proj, attention.v_proj], copied),
        _norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        _norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        Matrix([attention.o_proj], copied),
        attention.scaling,
        _norm(layer.post_attention_layernorm),
        Matrix([mlp.gate_proj, mlp.up_proj], copied),
        mlp.act_fn,
        Matrix([mlp.down_proj], copied),
    )


def _norm(norm: Any) -> Norm:
    return Norm(norm.weight.data, norm.variance_epsilon)


LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
NORM = {"input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm"}
CHILDREN = {
    "": {"model", "lm_head"},
    "model": {"embed_tokens", "layers", "norm", "rotary_emb"},
    "layers": {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}


def is_llama(model: nn.Module) -> bool:
    """Whether a model has the modules and parameters of a Llama, biases and norms of queries and keys apart."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return False
    for path, module in model.named_modules():
        parent, _, name = path.rpartition(".")
        name = "layers" if parent == "model.layers" else name
        found = {child for child, _ in module.named_children()}
        own = {parameter for parameter, _ in module.named_parameters(recurse=False)}
        if name in LINEAR:
            right = type(module) is nn.Linear
        elif name == "embed_tokens":
            right = type(module) is nn.Embedding
        elif name in NORM:
            right = own == {"weight"} and hasattr(module, "variance_epsilon")
        elif path == "model.layers":
            right = not own
        elif name in CHILDREN:
            norms = {"q_norm", "k_norm"} if name == "self_attn" and "q_norm" in found else set()
            right = found == CHILDREN[name] | norms and not own
        else:
            right = name in ("rotary_emb", "act_fn") and not own and not found
        if not right:
            return False
    first: Any = layers[0].self_attn
    biases = [getattr(first, name).bias is None for name in ("q_proj", "k_proj", "v_proj")]
    norm = getattr(first, "q_norm", None)
    return len(set(biases)) == 1 and (norm is None or norm.weight.shape == (first.head_dim,))


def multiplies_copies(model: Any) -> bool:
    """Whether a model is to be multiplied in float32: one in bfloat16, where that is slow and memory is plenty."""
    if model.dtype != torch.bfloat16 or not slow_bfloat16():
        return False
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return bool(4 * model.num_parameters() <= SHARE * memory)


def slow_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 at half the speed of float32 or less: one of Intel without AMX."""
    if platform.machine() != "x86_64" or torch.cpu._is_amx_tile_supported():
        return False
    return not (torch.cpu._is_avx512_bf16_supported() and "AuthenticAMD" in Path("/proc/cpuinfo").read_text())
