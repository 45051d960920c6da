"""`tensor`: a server on this host maps our memory, and is sent but where each tensor lies in it.

torch can share a CPU tensor with an unrelated process only by the name of a file in /dev/shm (its `file_system`
strategy; a file descriptor can't be passed, and SGLang's scheduler dies of the attempt). Left to itself torch starts a
`torch_shm_manager` beside us, which outlives our use of it. So the file is made here, as torch would, and a server that
opens it starts a manager of its own, in its session:

    [0, 4)   how many use it, as torch counts; torch removes the file when it falls to 0, which here it never does
    [64, …)  the bytes

What removes the file: `close`, or the end of this process. Killed, it leaves that to the server, whose manager removes
all that was handed to it when the server ends (a server that we started ends with us). A file that was made and never
handed over stays.
"""

from __future__ import annotations

import base64
import mmap
import os
import pickle
import secrets
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_storage_filename, rebuild_tensor, rebuild_typed_storage

from flowgraph.engines.served.client import Client
from flowgraph.engines.served.session import Bucket, act, buckets, fill, nbytes, session
from flowgraph.errors import MemoryShort

SHM = Path("/dev/shm")
HEAD = 64  # bytes before the first one of a tensor
USERS = 1 << 30  # each delivery takes one away for good


class FromTensors:
    """A `replica.Carrier`. One file for as long as its server lives, refilled for each bucket.

    ranks: tensor-parallel ranks of the server, which take an entry each
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._segment: Segment | None = None

    async def push(self, client: Client, weights: Any, version: int, *, flush: bool) -> int:
        pieces = list(buckets(weights.tensors))
        size = max(map(nbytes, pieces))
        segment = self._segment
        if segment is None or segment.nbytes < size or not segment.named():
            self.forget()
            segment = self._segment = Segment(size)
        async with session(client):
            for at, bucket in enumerate(pieces):
                last = at == len(pieces) - 1
                fill(segment.bytes, bucket)
                body = {
                    "serialized_named_tensors": [described(segment, bucket)] * self._ranks,
                    "flush_cache": flush and last,
                    "weight_version": str(version) if last else None,
                }
                await act(client, "/update_weights_from_tensor", body)
        return sum(map(nbytes, pieces))

    def forget(self) -> None:
        """The manager of a server that ended has removed the file, or is about to."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    async def close(self, client: Client) -> None:
        self.forget()


class Segment:
    """nbytes of memory with a name in /dev/shm. bytes: u8[nbytes]. Raises MemoryShort when it can't be had."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.name = f"flowgraph-{os.getpid()}-{secrets.token_hex(4)}"
        path = SHM / self.name
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        self._unlink = weakref.finalize(self, path.unlink, missing_ok=True)  # also when this process ends
        try:
            os.posix_fallocate(fd, 0, HEAD + nbytes)
            memory = mmap.mmap(fd, HEAD + nbytes)
        except OSError as error:
            self._unlink()
            raise MemoryShort(
                f"{SHM} has no room for {nbytes / 1e6:,.0f} MB of weights: {error}",
                "make it larger (docker run --shm-size), or take `weights: disk`, which needs none of it",
            ) from error
        finally:
            os.close(fd)
        memory[:4] = USERS.to_bytes(4, "little")
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8, offset=HEAD, count=nbytes)

    def named(self) -> bool:
        return (SHM / self.name).exists()

    def close(self) -> None:
        """Remove the name; the memory goes with its last user."""
        self._unlink()


class _Storage:
    """Pickled as torch pickles a storage of that file. No manager is named: who opens it takes its own."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def __reduce__(self) -> tuple[Any, ...]:
        name = f"/{self._segment.name}".encode()
        return rebuild_storage_filename, (torch.UntypedStorage, b"", name, self._segment.nbytes)


class _Typed:
    def __init__(self, storage: _Storage, dtype: torch.dtype) -> None:
        self._of = storage, dtype

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_typed_storage, self._of


class _View:
    """Pickled as torch pickles a contiguous tensor. start: its first byte in the storage"""

    def __init__(self, storage: _Storage, start: int, like: Tensor) -> None:
        self._storage, self._start, self._like = storage, start, like

    def __reduce__(self) -> tuple[Any, ...]:
        like = self._like
        stride = torch.empty(like.shape, device="meta").stride()
        where = (self._start // like.dtype.itemsize, tuple(like.shape), stride, False)
        return rebuild_tensor, (torch.Tensor, _Typed(self._storage, like.dtype), where)


def described(segment: Segment, bucket: Bucket) -> str:
    """What SGLang's MultiprocessingSerializer would make of a bucket that lies in the segment: base64 of a pickle."""
    storage, start = _Storage(segment), 0
    views: list[tuple[str, _View]] = []
    for name, tensor in bucket:
        views.append((name, _View(storage, start, tensor)))
        start += tensor.nbytes
    return base64.b64encode(pickle.dumps(views)).decode()
