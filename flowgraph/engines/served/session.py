"""What the transports share: an action of a server that must have been done, an update session, and buckets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowgraph.engines.served import wire
from flowgraph.engines.served.client import Client, Refused
from flowgraph.engines.weights.checksum import bits

FOREVER = 3600.0  # the sync has the deadline
BUCKET = 512 << 20  # bytes handed over at once
ALL_RUNNERS = "all"  # of a server: the model and its draft models

Bucket = list[tuple[str, Tensor]]


async def act(client: Client, path: str, body: Any) -> None:
    """Raises Refused also for an answer that says it was not done."""
    done: wire.Done | None = await client.ask(path, body, seconds=FOREVER, form=wire.Done)
    if done is not None and not done.success:
        raise Refused(f"{client.url}{path}", 200, done.message)


@asynccontextmanager
async def session(client: Client, selector: str = ALL_RUNNERS) -> AsyncIterator[None]:
    """SGLang takes tensors only inside a session. One that an interrupted attempt left open is ended first; what its
    attempt had loaded is loaded again. It is not ended after an error: the next attempt does that.
    """
    body = {"selector": selector}
    try:
        await act(client, "/begin_weight_update", body)
    except Refused as error:
        if error.status != 400:
            raise
        await act(client, "/end_weight_update", {})
        await act(client, "/begin_weight_update", body)
    yield
    await act(client, "/end_weight_update", {})


def buckets(tensors: Mapping[str, Tensor], limit: int = BUCKET) -> Iterator[Bucket]:
    """The whole set in pieces of at most `limit` bytes, or of one tensor. Wide dtypes come first, so that tensors laid
    end to end in a bucket are aligned.
    """
    bucket: Bucket = []
    size = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def nbytes(bucket: Bucket) -> int:
    return sum(tensor.nbytes for _, tensor in bucket)


def fill(flat: Tensor, bucket: Bucket) -> None:
    """Lay a bucket end to end into u8[nbytes or more]."""
    at = 0
    for _, tensor in bucket:
        raw = bits(tensor).view(np.uint8)
        target = flat[at : at + len(raw)]
        if flat.is_cuda:
            target.copy_(torch.from_numpy(raw))
        else:
            target.numpy()[...] = raw  # which, unlike torch, waits for no other thread
        at += len(raw)


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
