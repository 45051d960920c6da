"""How weights get into a server. Each is a `replica.Carrier`; which one is the compiler's choice, or the graph's."""

from __future__ import annotations

from typing import Any

from flowgraph.engines.registry import SglangOptions, TransformersOptions, push
from flowgraph.engines.served.client import Client, Refused
from flowgraph.engines.served.deltas import DeltaToOurs, DeltaToSglang
from flowgraph.engines.served.replica import Carrier
from flowgraph.engines.served.session import FOREVER, act


class FromDisk:
    """The server reads a safetensors file by its path. Works everywhere that both see one file system.

    A paused SGLang (0.5.23) that is asked for a second such update while the first is under way takes the answer of the
    one for the other's, and ends. So when it is not known whether one has ended, because its caller was cancelled or
    its connection cut, the scheduler is asked something that it answers in turn.
    """

    def __init__(self) -> None:
        self._unsure = False

    async def push(self, client: Client, weights: Any, version: int, *, flush: bool) -> int:
        if self._unsure:
            await client.ask("/server_info", seconds=FOREVER, form=None)
        body = {
            "model_path": str(weights.directory),
            "load_format": "safetensors",
            "flush_cache": flush,
            "abort_all_requests": False,
            "weight_version": str(version),
        }
        self._unsure = True
        try:
            await act(client, "/update_weights_from_disk", body)
        except Refused:
            self._unsure = False
            raise
        self._unsure = False
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
