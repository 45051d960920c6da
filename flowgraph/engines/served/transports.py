"""How weights get into a server. Each is a `replica.Carrier`; which one is the compiler's choice, or the graph's."""

from __future__ import annotations

from typing import Any

from flowgraph.engines.registry import Push
from flowgraph.engines.served import wire
from flowgraph.engines.served.client import Client, Refused
from flowgraph.engines.served.replica import Carrier

FOREVER = 3600.0  # the sync has the deadline


async def act(client: Client, path: str, body: dict[str, Any]) -> None:
    """Raises Refused also for an answer that says it was not done."""
    done: wire.Done | None = await client.ask(path, body, seconds=FOREVER, form=wire.Done)
    if done is not None and not done.success:
        raise Refused(f"{client.url}{path}", 200, done.message)


class FromDisk:
    """The server reads a safetensors file by its path. Works everywhere that both see one file system."""

    async def push(self, client: Client, weights: Any, version: int, *, flush: bool) -> int:
        body = {
            "model_path": str(weights.directory),
            "load_format": "safetensors",
            "flush_cache": flush,
            "abort_all_requests": False,
            "weight_version": str(version),
        }
        await act(client, "/update_weights_from_disk", body)
        return int(weights.nbytes)

    def forget(self) -> None:
        pass


def carrier(kind: Push | None, ranks: int) -> Carrier:
    """The transport of that name, for a server of so many tensor-parallel ranks."""
    return FromDisk()
