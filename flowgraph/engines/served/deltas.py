"""`delta`: a server that holds the version before is sent what changed of it, any other one the whole set."""

from __future__ import annotations

import base64
import os
import pickle
from abc import ABC, abstractmethod
from typing import Any

import msgspec
import torch

from flowgraph.engines.served.client import Client, Refused
from flowgraph.engines.served.session import act, session
from flowgraph.engines.sync import ReplicaError

LOADER = "flowgraph_delta.load"  # by which SGLang's server finds sglang_loader/flowgraph_delta.py
MISMATCH = 409


class Deltas(ABC):
    """A `replica.Carrier` but for how either is sent. holds: the version that the server has for certain, else None."""

    def __init__(self) -> None:
        self._holds: int | None = None

    async def push(self, client: Client, weights: Any, version: int, *, flush: bool) -> int:
        holds, self._holds, wasted = self._holds, None, 0
        if weights.delta is not None and weights.delta.base == holds:
            if await self.changes(client, weights, version, flush):
                self._holds = version
                return len(weights.packed)
            wasted = len(weights.packed)
        sent = await self.whole(client, weights, version, flush)
        self._holds = version
        return sent + wasted

    @abstractmethod
    async def changes(self, client: Client, weights: Any, version: int, flush: bool) -> bool:
        """False when what the server has isn't the delta's base; its weights may then be half changed."""

    @abstractmethod
    async def whole(self, client: Client, weights: Any, version: int, flush: bool) -> int:
        """→ bytes sent"""

    def forget(self) -> None:
        self._holds = None

    async def close(self, client: Client) -> None:
        self.forget()


class DeltaToOurs(Deltas):
    """To the embedded engine in a server: in the body of a request. full: how the whole set gets there"""

    def __init__(self, full: Any) -> None:
        super().__init__()
        self._full = full

    async def changes(self, client: Client, weights: Any, version: int, flush: bool) -> bool:
        try:
            await act(client, "/update_weights_from_delta", weights.packed)
        except Refused as error:
            if error.status != MISMATCH:
                raise
            return False
        return True

    async def whole(self, client: Client, weights: Any, version: int, flush: bool) -> int:
        sent: int = await self._full.push(client, weights, version, flush=flush)
        return sent


class DeltaToSglang(Deltas):
    """To SGLang, with a loader of ours in the server; see sglang_loader/flowgraph_delta.py.

    The server is on this host: it is sent the paths of files in memory, one an answer that each rank writes when the
    weights are loaded. Only then is it told their version.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks

    async def changes(self, client: Client, weights: Any, version: int, flush: bool) -> bool:
        with _MemoryFile("flowgraph-delta", weights.packed) as delta:
            return await self._order(client, {"delta": delta.path}, version, flush)

    async def whole(self, client: Client, weights: Any, version: int, flush: bool) -> int:
        if not await self._order(client, {"directory": weights.directory}, version, flush):
            raise ReplicaError(f"{client.url} did not load version {version}; its log says why")
        return int(weights.nbytes)

    async def _order(self, client: Client, order: dict[str, str], version: int, flush: bool) -> bool:
        with _MemoryFile("flowgraph-answer", bytes(self._ranks)) as answer:
            # A rank that is late must not take another file, which has the same number by then, for this one.
            common = {**order, "version": version, "answer": answer.path, "inode": answer.inode}
            body = {
                "serialized_named_tensors": [_by_value(common | {"rank": r}) for r in range(self._ranks)],
                "load_format": LOADER,
                "selector": "target",
                "flush_cache": flush,
            }
            async with session(client, "target"):
                await act(client, "/update_weights_from_tensor", body)
            if answer.read() != b"\1" * self._ranks:
                return False
        named = {"new_version": str(version), "abort_all_requests": False}
        await act(client, "/update_weight_version", named)
        return True


class _MemoryFile:
    """Bytes without a name, which another process of this user opens by a path for as long as this is open."""

    def __init__(self, name: str, content: bytes | bytearray) -> None:
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.inode = os.fstat(self._fd).st_ino
        self._size = len(content)
        with open(self._fd, "wb", closefd=False) as file:
            file.write(content)

    def read(self) -> bytes:
        return os.pread(self._fd, self._size, 0)

    def __enter__(self) -> _MemoryFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _by_value(order: dict[str, Any]) -> str:
    """An order as the one tensor that SGLang hands to the loader."""
    text = torch.frombuffer(bytearray(msgspec.json.encode(order)), dtype=torch.uint8)
    return base64.b64encode(pickle.dumps([("order", text)])).decode()
