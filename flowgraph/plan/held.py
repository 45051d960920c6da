"""What a process holds beside its arena: the tensors of its engine and its learner, in bytes.

Activations, scratch and libraries are not counted: they depend on what runs. Nor are the copies that the engine
`transformers` multiplies instead of its weights, which depend on the processor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import msgspec

from flowgraph.engines.registry import ROOM, SglangOptions, launched, push, servers
from flowgraph.learners.registry import LoraOptions
from flowgraph.models import ModelFacts, facts
from flowgraph.plan.plan import Owner, Plan
from flowgraph.spec.types import dtype_of

HeldKind = Literal[
    "engine weights",
    "staged weights",
    "weights in /dev/shm",
    "KV cache",
    "cached prefixes",
    "recorded choices",
    "learner weights",
    "given weights",
    "gradients",
    "master weights",
    "moments",
]


NOTHING = ModelFacts(0, 0, 0, 0, 1, 0, 0, None, None, ())  # in place of a model that is unknown


class Held(msgspec.Struct, frozen=True):
    """One set of tensors of a process. nbytes: None while the model is unknown, because it is not pulled."""

    kind: HeldKind
    nbytes: int | None


def held(plan: Plan, owner: Owner) -> Iterator[Held]:
    """Engine and learner of one owner, as `flowgraph.engines` and `flowgraph.learners` allocate them."""
    for options, tensors in ((owner.engine, _engine), (owner.learner, _learner)):
        if options is not None:
            model = facts(options.model)
            for kind, nbytes in tensors(plan, owner, model or NOTHING):
                yield Held(kind, None if model is None else nbytes)


def host_bytes(plan: Plan) -> int:
    """Bytes of this machine's memory that all processes are sure to hold beside their arenas.

    What lies on a GPU is not counted, and a model that is unknown isn't either.
    """
    return sum(one.nbytes or 0 for o in plan.owners.values() for one in held(plan, o) if not _on_gpu(o, one))


def shm_bytes(plan: Plan) -> int:
    """Of these, what lies in files of /dev/shm, which may be smaller than memory is."""
    owners = plan.owners.values()
    return sum(one.nbytes or 0 for o in owners for one in held(plan, o) if one.kind == "weights in /dev/shm")


def _on_gpu(owner: Owner, one: Held) -> bool:
    return (
        isinstance(owner.engine, SglangOptions)
        and owner.engine.device == "cuda"
        and one.kind in ("engine weights", "KV cache")
    )


def _engine(plan: Plan, owner: Owner, model: ModelFacts) -> Iterator[tuple[HeldKind, int]]:
    """In its process and in its servers here. SGLang's cache on a GPU takes what is free there: at least a full context
    for every slot is what serves them all.
    """
    options = owner.engine
    assert options is not None
    size, slots = dtype_of(options.dtype).itemsize, options.slots
    copies = launched(options) if servers(options) else 1
    if isinstance(options, SglangOptions):
        copies *= options.dp
        tokens = options.kv_tokens or slots * (owner.context + ROOM)
    else:
        tokens = slots * _columns(model, owner.context, size)
    if copies:
        yield "engine weights", copies * model.parameters * size
    if servers(options):
        ranks = launched(options) * options.tp if isinstance(options, SglangOptions) else 0
        own = ranks if push(options) == "delta" else 0  # each rank keeps the set that a delta is from
        yield "staged weights", (1 + own) * model.parameters * size
    if push(options) == "tensor":
        yield "weights in /dev/shm", model.parameters * size
    if copies:
        yield "KV cache", copies * tokens * _column(model, size)
    if copies and not isinstance(options, SglangOptions):  # SGLang keeps prefixes in the cache itself
        prompt = plan.dims["prompt"].max if "prompt" in plan.dims else 0
        yield "cached prefixes", copies * slots * (prompt * _column(model, size) + model.vocab * size)
    if copies and (choices := _choices(plan, owner, model)):
        yield "recorded choices", copies * _recorded(plan, owner, tokens) * choices


def _recorded(plan: Plan, owner: Owner, tokens: int) -> int:
    """Tokens of which an engine holds what it chose, before a hop has written it.

    SGLang has a row for every token of its KV cache. Here each slot has those that it samples, and its prompt's, which
    are the cached prefix's as long as that is cached; so a prompt may be there twice.
    """
    if isinstance(owner.engine, SglangOptions):
        return tokens
    assert owner.engine is not None
    prompt, response = (plan.dims[d].max if d in plan.dims else 0 for d in ("prompt", "response"))
    return owner.engine.slots * (2 * int(prompt) + int(response))


def _choices(plan: Plan, owner: Owner, model: ModelFacts) -> int:
    """Bytes of what an engine records of a token for the hops that give it on, 0 where none does."""
    wanted = {
        dim
        for hop in plan.hops.values()
        if hop.owner == owner.name and hop.uses == "engine"
        for column in hop.columns
        for dim in column.shape
    }
    wide = 4 if isinstance(owner.engine, SglangOptions) else 1 if (model.experts or 0) <= 256 else 2
    each = {"top_k": (model.top_k, wide), "index_top_k": (model.index_top_k, 4)}
    return model.layers * sum((count or 0) * size for dim, (count, size) in each.items() if dim in wanted)


def _learner(plan: Plan, owner: Owner, model: ModelFacts) -> Iterator[tuple[HeldKind, int]]:
    """In all its processes together. Each of several holds a shard of what the optimiser works on, in float32, and the
    first gathers the weights that it gives away.
    """
    options, several = owner.learner, owner.processes > 1
    assert options is not None
    size = 4 if several else dtype_of(options.dtype).itemsize
    yield "learner weights", model.parameters * size
    if options.frozen:
        return
    if several or options.given != options.dtype:  # a copy of them, made for the engine
        yield "given weights", model.parameters * dtype_of(options.given).itemsize
    elif options.lora:  # a copy of those to which an update is added
        yield "given weights", _adapted(model, options.lora) * size
    if options.lora:  # which trains next to nothing of them
        return
    yield "gradients", model.parameters * size
    if size != 4:  # else the weights are their own masters
        yield "master weights", model.parameters * 4
    if options.optimizer != "sgd":
        yield "moments", model.parameters * 8


def _adapted(model: ModelFacts, lora: LoraOptions) -> int:
    """Parameters of the matrices that have an adapter, as peft chooses them: those of modules whose names end with a
    target; without targets all but embedding and head.
    """

    def chosen(name: str) -> bool:
        module = "." + name.removesuffix(".weight")
        if lora.targets is None:
            return not module.endswith((".embed_tokens", ".lm_head"))
        return module.endswith(tuple(f".{target}" for target in lora.targets))

    return sum(math.prod(one.shape) for one in model.tensors if len(one.shape) == 2 and chosen(one.name))


def _column(model: ModelFacts, size: int) -> int:
    """Keys and values of one token, in all layers."""
    return model.layers * 2 * model.kv_heads * model.head_dim * size


def _columns(model: ModelFacts, context: int, size: int) -> int:
    """The context, rounded up as the engine does so that the rows of each head start on a cache line."""
    multiple = 64 // math.gcd(64, model.head_dim * size)
    return math.ceil(context / multiple) * multiple
