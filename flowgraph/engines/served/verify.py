"""Whether a server holds the weights that it was sent, by what it says of each of its own tensors.

A server answers with a hash of every parameter under its own name. SGLang fuses some (q, k and v; gate and up), which
are the rows of ours one after the other, and fills the rows of a vocabulary up to a multiple of 64 with zeros. On a CPU
its hash is the first 64 bits of the SHA-256 of the stored bytes; on a GPU it is another, and a rank of several has but
slices: there, only the version that it names is compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from flowgraph.engines.served import wire
from flowgraph.engines.served.client import Client
from flowgraph.engines.served.staging import Staged
from flowgraph.engines.sync import ReplicaError

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
ROWS = 64
SECONDS = 600.0


def digest(*tensors: Any) -> str:
    """The first 64 bits of the SHA-256 of the stored bytes, in hexadecimal."""
    hash = hashlib.sha256()
    for tensor in tensors:
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        hash.update(memoryview(raw))
    return hash.hexdigest()[:16]


def expected(name: str, tensors: Mapping[str, Any]) -> tuple[str, ...]:
    """The hashes that a server's parameter may have; none for one that is no weight of ours (a buffer, say)."""
    if name in tensors:
        tensor = tensors[name]
        more = -len(tensor) % ROWS if name.endswith(VOCABULARY) else 0
        return (digest(tensor), *([digest(tensor, tensor.new_zeros(more, tensor.shape[1]))] if more else []))
    for fused, parts in FUSED.items():
        names = [name.replace(fused, part) for part in parts]
        if fused in name and all(one in tensors for one in names):
            return (digest(*(tensors[one] for one in names)),)
    return ()


class Checksums:
    """Compares every tensor; what is expected is hashed once for all replicas."""

    def __init__(self) -> None:
        self._known: tuple[Staged | None, dict[str, tuple[str, ...]]] = (None, {})

    async def __call__(self, client: Client, staged: Staged) -> None:
        """Raises ReplicaError naming the first tensor that the server holds otherwise, or when none can be compared."""
        body = {"action": "checksum"}
        checked = await client.ask("/weights_checker", body, seconds=SECONDS, form=wire.Checked)
        if not checked.success or not checked.ranks:
            raise ReplicaError(f"{client.url} can't tell its weights: {checked.message}")
        if self._known[0] is not staged:  # a version may be pushed anew with other weights
            self._known = (staged, {})
        known = self._known[1]
        compared = 0
        for name, has in checked.ranks[0].checksums.items():
            if name not in known:
                known[name] = expected(name, staged.tensors)
            compared += bool(known[name])
            if known[name] and has not in known[name]:
                text = f"{client.url} holds {name} otherwise than version {staged.version} has it"
                raise ReplicaError(text)
        if not compared:
            raise ReplicaError(f"{client.url} names none of the weights that it was sent")


async def same_version(client: Client, staged: Staged) -> None:
    """Raises ReplicaError unless the server names the version that it was sent."""
    info = await client.ask("/model_info", seconds=SECONDS, form=dict[str, Any])
    if info.get("weight_version") != str(staged.version):
        named = info.get("weight_version")
        raise ReplicaError(
            f"{client.url} says it holds version {named!r}, after an update to {staged.version}"
        )
