"""Which engines `owners.X.engine.use` may name, and the options of each. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from flowgraph.engines.fleet import Fleet
    from flowgraph.engines.sync import Journal

# How weights get into a server: a file that it reads by path; descriptors of shared memory; a broadcast; what changed.
Push = Literal["disk", "tensor", "distributed", "delta"]
ROOM = 8  # tokens by which SGLang wants a context to be longer than what it is asked to fill
Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]


class TransformersOptions(msgspec.Struct, forbid_unknown_fields=True, tag_field="use", tag="transformers"):
    """The embedded engine. slots: requests decoded at once, a fixed number, because bits depend on it.

    processes: servers that it runs in; 0 for the owner's own process
    weights: how they get into a server; by default from disk
    """

    model: str
    slots: Positive = 64
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    processes: Count = 0
    weights: Literal["disk", "delta"] | None = None

    def __post_init__(self) -> None:
        if self.weights and not self.processes:
            raise ValueError(
                "weights: an engine in its owner's process copies them where they are; set processes"
            )


# Flags of the server that prices, versions and replies depend on, and what sets each. A server takes the beginning of a
# flag for the whole of it.
OURS = {
    **{"model-path": "model", "dtype": "dtype", "device": "device", "max-running-requests": "slots"},
    **{"tp-size": "tp", "tensor-parallel-size": "tp", "dp-size": "dp", "data-parallel-size": "dp"},
    **{"max-total-tokens": "kv_tokens", "context-length": "dims", "custom-weight-loader": "weights: delta"},
    **dict.fromkeys(
        ("host", "port", "weight-version", "load-format", "api-key", "skip-tokenizer-init"), "us"
    ),
}


class SglangOptions(msgspec.Struct, forbid_unknown_fields=True, tag_field="use", tag="sglang"):
    """SGLang, in servers that we launch, or that somebody else runs at `urls`.

    slots: requests decoded at once by each server; processes: servers; tp, dp: tensor and data parallel ranks of each
    python: the interpreter of the environment that has SGLang; else ours
    kv_tokens: of each server's KV cache; on a CPU all slots with a full context, on a GPU what SGLang finds free
    weights: how they get into a server; by default from disk where it is launched here, else by a broadcast
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
    weights: Push | None = None
    flags: dict[str, bool | int | float | str] = {}

    def __post_init__(self) -> None:
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"urls: {url!r} does not begin with http://")
            try:
                whole = urlsplit(url).hostname and urlsplit(url).port != 0
            except ValueError as error:
                raise ValueError(f"urls: {url!r}: {error}") from error
            if not whole or self.urls.count(url) > 1:
                problem = "is there twice" if whole else "names no host"
                raise ValueError(f"urls: {url!r} {problem}")
        if self.python == "":
            raise ValueError("python: name an interpreter, or leave it out for our own")
        for given in ("python", "flags", "processes", "kv_tokens"):
            if self.urls and getattr(self, given) not in (None, {}, 1):
                raise ValueError(f"{given} is for servers that are launched here; those at urls run already")
        for flag in self.flags:
            name = flag.lstrip("-").replace("_", "-")
            if meant := next((ours for ours in OURS if ours.startswith(name)), None):
                raise ValueError(f"flags: {flag} means {meant}, which is set by {OURS[meant]}")
        way = push(self)
        if self.dp > 1 and way != "disk":
            raise ValueError(f"weights: {way} goes to servers of dp 1; use processes, or weights: disk")
        if self.urls and way == "delta":
            raise ValueError("weights: delta needs a loader of ours in the server; those at urls have none")
        for url in self.urls:
            if way != "distributed" and not _here(url):
                raise ValueError(
                    f"weights: {way} goes through memory of this host, and {url} is another; take weights: "
                    "distributed, or write 127.0.0.1 if it is this one"
                )
        if self.device == "cpu" and self.tp > 1:
            raise ValueError("tp: this CPU setting serves with one rank; use processes for more servers")


EngineOptions = TransformersOptions | SglangOptions
ENGINES: dict[str, type[EngineOptions]] = {"transformers": TransformersOptions, "sglang": SglangOptions}


def servers(options: EngineOptions) -> int:
    """Servers that weights are pushed to; 0 when the engine is in its owner's process."""
    if isinstance(options, SglangOptions):
        return len(options.urls) or options.processes
    return options.processes


def launched(options: EngineOptions) -> int:
    """Servers that run here, and hold their copy of the model on this machine."""
    return 0 if isinstance(options, SglangOptions) and options.urls else servers(options)


def push(options: EngineOptions) -> Push | None:
    """How weights get into an engine's servers; None for one in its owner's process."""
    if not servers(options):
        return None
    far = isinstance(options, SglangOptions) and any(not _here(url) for url in options.urls)
    return options.weights or ("distributed" if far else "disk")


def _here(url: str) -> bool:
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


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
