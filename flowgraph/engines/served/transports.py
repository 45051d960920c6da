"""How weights get into a server. Each is a `replica.Carrier`; which one is the compiler's choice, or the graph's."""

from __future__ import annotations

from typing import Any

from flowgraph.engines.registry import SglangOptions, TransformersOptions, push
from flowgraph.engines.served.client import Client
from flowgraph.engines.served.deltas import DeltaToOurs, DeltaToSglang
from flowgraph.engines.served.replica import Carrier
from flowgraph.engines.served.session import act


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

    async def close(self, client: Client) -> None:
        pass


def carrier(options: TransformersOptions | SglangOptions) -> Carrier:
    """The transport that the options name, for one of their servers."""
    way = push(options)
    if isinstance(options, TransformersOptions):
        return DeltaToOurs(FromDisk()) if way == "delta" else FromDisk()
    if way == "tensor":
        from flowgraph.engines.served.handover import FromTensors

        return FromTensors(options.tp)
    if way == "distributed":
        from flowgraph.engines.served.group import FromGroup

        return FromGroup(options.tp, options.device)
    return DeltaToSglang(options.tp) if way == "delta" else FromDisk()
