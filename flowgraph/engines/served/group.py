"""`distributed`: we broadcast into a group of this process and the server's ranks, on this host or another.

The group is made without the process-wide registry of torch.distributed, which a worker has no part in; its store is
named as SGLang's side names it. It lives until the server is started anew, or a push fails: its connections are then
closed, by which the server's side ends whatever it waits for, and the next push makes another.

Everything that may block does so in a thread that nobody waits for, and ends by the group's own timeout at the latest.
So a push that is cancelled is over at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import uuid
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed
from torch import Tensor

from flowgraph.engines.served.client import Client
from flowgraph.engines.served.session import act, buckets, dtype_name, fill, nbytes, session
from flowgraph.engines.sync import ReplicaError

BLOCKED = timedelta(seconds=60)  # that a rendezvous or the broadcast of one bucket may take
PARTING = 5.0  # seconds for the server to leave a group

T = TypeVar("T")
dist: Any = torch.distributed  # its stubs leave out the stores


class FromGroup:
    """A `replica.Carrier`. ranks: tensor-parallel ranks of the server; device: that it computes on."""

    def __init__(self, ranks: int, device: str) -> None:
        self._ranks = ranks
        self._backend = "nccl" if device == "cuda" and torch.cuda.is_available() else "gloo"
        self._group: Group | None = None
        self._left = ""  # a group that the server may still be in
        self._flat = torch.empty(
            0, dtype=torch.uint8
        )  # what is broadcast; its pages are there after the first push

    async def push(self, client: Client, weights: Any, version: int, *, flush: bool) -> int:
        pieces = list(buckets(weights.tensors))
        try:
            if self._group is None:
                await self._leave(client)
                self._group = await self._join(client)
            group = self._group
            size = max(map(nbytes, pieces))
            if len(self._flat) < size or self._flat.device != group.device:
                self._flat = torch.empty(size, dtype=torch.uint8, device=group.device)
            flat = self._flat
            async with session(client):
                for at, bucket in enumerate(pieces):
                    last = at == len(pieces) - 1
                    fill(flat, bucket)
                    body = {
                        "names": [name for name, _ in bucket],
                        "dtypes": [dtype_name(tensor) for _, tensor in bucket],
                        "shapes": [list(tensor.shape) for _, tensor in bucket],
                        "group_name": group.name,
                        "load_format": "flattened_bucket",
                        "flush_cache": flush and last,
                        "weight_version": str(version) if last else None,
                    }
                    told = act(client, "/update_weights_from_distributed", body)
                    await _both(told, in_thread(partial(group.broadcast, flat[: nbytes(bucket)])))
        except BaseException:
            self.forget()
            raise
        return self._ranks * sum(map(nbytes, pieces))

    async def _join(self, client: Client) -> Group:
        """The store listens before the server is told of it."""
        group = Group(self._ranks + 1, self._backend, address_towards(client.url))
        self._left = group.name
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": self._ranks + 1,
            "group_name": group.name,
            "backend": self._backend,
        }
        try:
            await _both(act(client, "/init_weights_update_group", body), in_thread(group.join))
        except BaseException:
            group.leave()
            raise
        return group

    async def _leave(self, client: Client) -> None:
        """Have the server forget the group before; one that was started anew has none."""
        if self._left:
            with contextlib.suppress(ReplicaError):
                body = {"group_name": self._left}
                await client.ask("/destroy_weights_update_group", body, seconds=PARTING, form=None)
        self._left = ""

    def forget(self) -> None:
        if self._group is not None:
            self._group.leave()
            self._group = None

    async def close(self, client: Client) -> None:
        self.forget()
        await self._leave(client)


class Group:
    """Rank 0 of `world`. address, port: of its store; device: of what it broadcasts."""

    def __init__(self, world: int, backend: str, address: str) -> None:
        self.name, self.address = f"flowgraph-{uuid.uuid4().hex}", address
        self._world, self._backend = world, backend
        listening = socket.create_server((address, 0))
        self.port = int(listening.getsockname()[1])
        store = dist.TCPStore(
            address,
            self.port,
            world,
            is_master=True,
            timeout=BLOCKED,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        self._held: list[Any] = [store]
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        )

    def join(self) -> None:
        """Blocks until every rank is there. The prefixes are those that SGLang's `init_custom_process_group` gives."""
        kind = "cuda" if self._backend == "nccl" else "cpu"
        store = dist.PrefixStore(self.name, self._held[0])
        store = dist.PrefixStore(f"{kind}/", dist.PrefixStore(f"{self.name}/", store))
        if self._backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = BLOCKED
            group = dist.ProcessGroupNCCL(store, 0, self._world, options)
        else:
            group = dist.ProcessGroupGloo(store, 0, self._world, timeout=BLOCKED)
        self._held.append(group)

    def broadcast(self, flat: Tensor) -> None:
        """Blocks until every rank has it."""
        work = self._held[1].broadcast([flat], dist.BroadcastOptions())
        work.wait()
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)

    def leave(self) -> None:
        """Close store and connections; in a thread, because that waits for a broadcast that is under way."""
        threading.Thread(target=self._held.clear, daemon=True).start()


def in_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """What it gives, from a thread of its own. Unlike an executor's, it does not hold up the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(result)

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = call()
        except RuntimeError as failed:  # torch's own errors of stores and groups are among these
            error = ReplicaError(f"the group for weights: {failed}")
        except BaseException as failed:
            error = failed
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True).start()
    return future


async def _both(*these: Any) -> None:
    """Wait for all, or for the first that fails; the others are then cancelled."""
    tasks = [asyncio.ensure_future(one) for one in these]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def address_towards(url: str) -> str:
    """Of this host, as the server sees it."""
    parts = urlsplit(url)
    assert parts.hostname
    family, kind, _, _, where = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[
        0
    ]
    with socket.socket(family, kind) as one:
        one.connect(where)  # sends nothing
        return str(one.getsockname()[0])
