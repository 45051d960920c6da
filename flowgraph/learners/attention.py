"""Attention over a packed prefix tree: each run of queries reads exactly the keys on its path.

A dense mask over the packed positions would price every pair of them, related or not; here scores exist
only between a run and its path (plus the padding of a bucket). The grouped query heads of a key head are
folded into the query rows, so keys and values are never repeated per query head.

Shapes: T packed positions; H query heads, G key heads; D head size; R runs, Q queries and K keys of a bucket;
B = R·G; M = H/G·Q folded query rows of one run and key head; S key slots of all buckets together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .pack import Bucket, Micro

NAME = "flowgraph_tree"

# Probabilities kept for the backward pass, of one layer (8 MB in bfloat16). Above it they are computed again:
# keeping them is what grows with the square of the length.
_KEPT = 1 << 22


class _Plan(NamedTuple):
    """A bucket as index tensors. `pad_RQ` is None where no query is padding."""

    query_I: Tensor  # i64[R·Q], padding reads position 0
    key_I: Tensor  # i64[R·K], padding reads position 0
    bias_RQK: Tensor  # 0 where the query sees the key, -inf elsewhere
    pad_RQ: Tensor | None
    runs: int


class TreePlan:
    """How one micro-batch attends; made once per forward pass, read by every layer.

    Every position is a query of exactly one run, so outputs are gathered back with `slot_T`. A key may serve
    many runs; its gradient is the sum over its slots, listed per position in `slots_S`, `slots_from_T1`.
    """

    def __init__(self, micro: Micro, dtype: torch.dtype) -> None:
        depth_T = torch.from_numpy(micro.depth_T)
        self.buckets = [_plan(bucket, depth_T, dtype) for bucket in micro.buckets]
        self.scores = sum(plan.bias_RQK.numel() for plan in self.buckets)  # of one head
        total = len(micro.token_T)
        query_I = torch.cat([torch.from_numpy(bucket.query_RQ).reshape(-1) for bucket in micro.buckets])
        slots_I = torch.arange(len(query_I))
        self.slot_T = torch.empty(total, dtype=torch.int64)
        self.slot_T[query_I[query_I >= 0]] = slots_I[query_I >= 0]
        key_S = torch.cat([torch.from_numpy(bucket.key_RK).reshape(-1) for bucket in micro.buckets])
        slots_S = torch.argsort(key_S, stable=True)
        self.slots_S = slots_S[int((key_S < 0).sum()) :].to(torch.int32)
        counts_T = torch.bincount(key_S[key_S >= 0], minlength=total)
        self.slots_from_T1 = F.pad(counts_T.cumsum(0), (1, 0)).to(torch.int32)


def _plan(bucket: Bucket, depth_T: Tensor, dtype: torch.dtype) -> _Plan:
    query_RQ, key_RK = torch.from_numpy(bucket.query_RQ), torch.from_numpy(bucket.key_RK)
    padded = query_RQ < 0
    query_RQ = query_RQ.clamp(min=0)
    # Key j of a path has depth j; padding keys lie beyond every real query's depth. A padding query must see
    # one key at least (its softmax would be NaN); its output is never read.
    depth_RQ = depth_T[query_RQ].masked_fill(padded, 0)
    seen_RQK = torch.arange(key_RK.shape[1]) <= depth_RQ[:, :, None]
    bias_RQK = torch.zeros(seen_RQK.shape, dtype=dtype).masked_fill_(~seen_RQK, float("-inf"))
    return _Plan(
        query_RQ.reshape(-1),
        key_RK.clamp(min=0).reshape(-1),
        bias_RQK,
        padded if bool(padded.any()) else None,
        len(query_RQ),
    )


class _TreeAttention(torch.autograd.Function):
    """softmax(q·kᵀ·scale + bias)·v per run, and its gradient written out (no graph inside)."""

    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, plan: TreePlan, scale: float
    ) -> Tensor:
        heads = q_THD.shape[1]
        ctx.plan, ctx.scale, ctx.kept = plan, scale, plan.scores * heads <= _KEPT
        outputs, saved = [], [q_THD, k_TGD, v_TGD]
        for bucket in plan.buckets:
            parts = _probabilities(q_THD, k_TGD, v_TGD, bucket, scale)
            outputs.append(_unfold(torch.bmm(parts.p_BMK, parts.v_BKD), bucket, heads))
            if ctx.kept:
                saved += parts
        ctx.save_for_backward(*saved)
        return torch.cat(outputs).index_select(0, plan.slot_T).view_as(q_THD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (do_THD,) = grads
        plan: TreePlan = ctx.plan
        q_THD, k_TGD, v_TGD, *saved = ctx.saved_tensors
        heads, groups = q_THD.shape[1], k_TGD.shape[1]
        dq, dk, dv = [], [], []
        for i, bucket in enumerate(plan.buckets):
            if ctx.kept:
                parts = _Parts(*saved[4 * i : 4 * i + 4])
            else:
                parts = _probabilities(q_THD, k_TGD, v_TGD, bucket, ctx.scale)
            do_BMD = _fold(do_THD, bucket, groups, zero_padding=True)
            dv.append(_unfold(torch.bmm(parts.p_BMK.transpose(1, 2), do_BMD), bucket, groups))
            dp_BMK = torch.bmm(do_BMD, parts.v_BKD.transpose(1, 2))
            ds_BMK = torch._softmax_backward_data(dp_BMK, parts.p_BMK, -1, dp_BMK.dtype)
            dq.append(_unfold(torch.bmm(ds_BMK, parts.k_BKD).mul_(ctx.scale), bucket, heads))
            dk.append(_unfold(torch.bmm(ds_BMK.transpose(1, 2), parts.q_BMD), bucket, groups))
        dq_THD = torch.cat(dq).index_select(0, plan.slot_T).view_as(q_THD)
        return dq_THD, _sum_slots(dk, plan).view_as(k_TGD), _sum_slots(dv, plan).view_as(v_TGD), None, None


class _Parts(NamedTuple):
    """One bucket's scaled queries, keys, values and attention probabilities."""

    q_BMD: Tensor
    k_BKD: Tensor
    v_BKD: Tensor
    p_BMK: Tensor


def _probabilities(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, bucket: _Plan, scale: float) -> _Parts:
    q_BMD = _fold(q_THD, bucket, k_TGD.shape[1]).mul_(scale)
    k_BKD, v_BKD = _keys(k_TGD, bucket), _keys(v_TGD, bucket)
    s_BMK = torch.bmm(q_BMD, k_BKD.transpose(1, 2))
    s_RHQK = s_BMK.view(bucket.runs, -1, *bucket.bias_RQK.shape[1:])
    s_RHQK += bucket.bias_RQK[:, None]
    return _Parts(q_BMD, k_BKD, v_BKD, torch.softmax(s_BMK, -1))


def _fold(x_THD: Tensor, bucket: _Plan, groups: int, zero_padding: bool = False) -> Tensor:
    """[T,H,D] → [R·G, H/G·Q, D]: the queries of each run, query heads of one key head below each other."""
    total, heads, size = x_THD.shape
    x_IHD = x_THD.reshape(total, -1).index_select(0, bucket.query_I)
    if zero_padding and bucket.pad_RQ is not None:
        x_IHD.masked_fill_(bucket.pad_RQ.reshape(-1, 1), 0)
    x_RQGAD = x_IHD.view(bucket.runs, -1, groups, heads // groups, size)
    return x_RQGAD.permute(0, 2, 3, 1, 4).reshape(bucket.runs * groups, -1, size)


def _keys(x_TGD: Tensor, bucket: _Plan) -> Tensor:
    """[T,G,D] → [R·G, K, D]."""
    total, groups, size = x_TGD.shape
    x_RKGD = x_TGD.reshape(total, -1).index_select(0, bucket.key_I).view(bucket.runs, -1, groups, size)
    return x_RKGD.transpose(1, 2).reshape(bucket.runs * groups, -1, size)


def _unfold(x_BMD: Tensor, bucket: _Plan, heads: int) -> Tensor:
    """[R·G, A·Q, D] → [R·Q, G·A·D], where G·A = heads; for keys A is 1."""
    size = x_BMD.shape[-1]
    x_RHQD = x_BMD.reshape(bucket.runs, heads, -1, size)
    return x_RHQD.transpose(1, 2).reshape(-1, heads * size)


def _sum_slots(parts: list[Tensor], plan: TreePlan) -> Tensor:
    # A bag is the sum of its rows in listed order, accumulated in float32: deterministic, and it loses
    # nothing to bfloat16 where many samples add to the gradient of one prompt key.
    return F.embedding_bag(
        plan.slots_S, torch.cat(parts), plan.slots_from_T1, mode="sum", include_last_offset=True
    )


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tree: TreePlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1,H,T,D], [1,G,T,D] → [1,T,H,D]; the model hands on `tree`.

    Raises NotImplementedError for what plain causal attention is not (windows, caps, sinks, biases).
    """
    if tree is None:
        raise RuntimeError("tree attention was called without its plan: the model drops keyword arguments")
    unknown = [name for name in _PLAIN_ONLY if kwargs.get(name) is not None]
    if unknown:
        raise NotImplementedError(
            f"tree packing knows no attention with {', '.join(unknown)}; use pack='padded'"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q_THD, k_TGD, v_TGD = (x[0].transpose(0, 1) for x in (query, key, value))
    out_THD: Tensor = _TreeAttention.apply(q_THD, k_TGD, v_TGD, tree, scale)  # type: ignore[no-untyped-call]
    return out_THD[None], None


_PLAIN_ONLY = ("sliding_window", "softcap", "s_aux", "position_bias")


def register() -> str:
    """Make tree attention known to transformers; returns the name to load a model with."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, tree_attention)
    return NAME
