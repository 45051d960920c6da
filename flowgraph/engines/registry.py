"""Which engines `owners.X.engine.use` may name, and the options of each. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from flowgraph.engines.fleet import Fleet
    from flowgraph.engines.sync import Journal

Transport = Literal["disk", "tensor", "distributed", "delta"]
Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]


class TransformersOptions(msgspec.Struct, forbid_unknown_fields=True, tag_field="use", tag="transformers"):
    """The embedded engine. slots: requests decoded at once, a fixed number, because bits depend on it.

    processes: servers that it runs in; 0 for the owner's own process
    weights: how they get into a server (disk or delta)
    """

    model: str
    slots: Positive = 64
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    processes: Count = 0
    weights: Literal["disk", "delta"] = "disk"


class SglangOptions(msgspec.Struct, forbid_unknown_fields=True, tag_field="use", tag="sglang"):
    """SGLang, in servers that we launch, or that somebody else runs at `urls`.

    slots: requests decoded at once by each server; processes: servers; tp, dp: tensor and data parallel ranks of each
    python: the interpreter of the environment that has SGLang; else ours
    kv_tokens: of each server's KV cache; on a CPU all slots with a full context, on a GPU what SGLang finds free
    weights: how they get into a server
    flags: any option of the server by its name, such as {mem-fraction-static: 0.7}; true for one without a value
    """

    model: str
    slots: Positive = 64
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    processes: Positive = 1
    tp: Positive = 1
    dp: Positive = 1
    device: Literal["cuda", "cpu"] = "cuda"
    python: str | None = None
    urls: tuple[str, ...] = ()
    kv_tokens: Positive | None = None
    weights: Transport = "disk"
    flags: dict[str, bool | int | float | str] = {}

    def __post_init__(self) -> None:
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"urls: {url!r} does not begin with http://")
        if self.urls and (self.python or self.flags):
            given = "python" if self.python else "flags"
            raise ValueError(f"{given} is for servers that are launched here; those at urls run already")
        if self.dp > 1 and self.weights != "disk":
            raise ValueError(
                f"weights: {self.weights} goes to servers of dp 1; use processes, or weights: disk"
            )
        if self.urls and self.weights == "delta":
            raise ValueError(
                "weights: delta needs a loader of ours in the server; those at urls run without it"
            )
        if self.weights != "distributed":
            for url in self.urls:
                if not _here(url):
                    raise ValueError(
                        f"weights: {self.weights} goes through this host's memory, and {url} is another host; take "
                        "weights: distributed, or for this very host http://127.0.0.1"
                    )
        if self.device == "cpu" and self.tp > 1:
            raise ValueError("tp: this CPU setting serves with one rank; use processes for more servers")


def _here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


EngineOptions = TransformersOptions | SglangOptions
ENGINES: dict[str, type[EngineOptions]] = {"transformers": TransformersOptions, "sglang": SglangOptions}


def servers(options: EngineOptions) -> int:
    """Server processes of an engine that hold a copy of the model each; 0 when it is in its owner's process."""
    if isinstance(options, SglangOptions):
        return 0 if options.urls else options.processes
    return options.processes


async def start_engine(
    options: EngineOptions,
    model_dir: str,
    *,
    context: int,
    threads: int,
    logs: str,
    journal: Journal,
    patience: float,
) -> Fleet:
    """Load or launch the engine, and return when it serves version 0.

    context: the longest prompt plus the longest response, in tokens; logs: a directory for what servers say
    patience: seconds that a start, a request that waits for a replica, and a replacement may take

    Raises EngineFailed when a server does not start, ValueError for a model or options that don't fit.
    """
    make: Callable[..., Any]
    if isinstance(options, SglangOptions):
        from flowgraph.engines.served.launch import sglang_fleet as make
    elif options.processes:
        from flowgraph.engines.served.launch import transformers_fleet as make
    else:
        from flowgraph.engines.embedded import embedded_fleet as make
    fleet: Fleet = await make(
        options, model_dir, context=context, threads=threads, logs=logs, journal=journal, patience=patience
    )
    return fleet
