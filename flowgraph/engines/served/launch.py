"""From options to an engine: which servers run, with which arguments, and how weights get into them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flowgraph.engines.fleet import Fleet
from flowgraph.engines.registry import ROOM, SglangOptions, TransformersOptions, push
from flowgraph.engines.served.deltas import LOADER
from flowgraph.engines.served.process import ServerProcess, interpreter
from flowgraph.engines.served.replica import HttpReplica
from flowgraph.engines.served.side import channels
from flowgraph.engines.served.staging import Staging, initial
from flowgraph.engines.served.transports import carrier
from flowgraph.engines.served.verify import Checksums, same_version
from flowgraph.engines.sglang_recipe import missing, server_environment
from flowgraph.engines.stops import Stops
from flowgraph.engines.sync import Journal
from flowgraph.errors import EngineFailed
from flowgraph.models.facts import directory_facts

# We never ask for more than the model's context; by that name the server takes one that is longer by ROOM.
LONGER = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}  # the model is on this machine already
LOOK = 2.0  # seconds between two looks at a server's load
HUNG = 300.0  # seconds without progress after which one is lost


async def transformers_fleet(
    options: TransformersOptions,
    model_dir: str,
    *,
    context: int,
    threads: int,
    logs: str,
    journal: Journal,
    patience: float,
) -> Fleet:
    """The embedded engine in `processes` servers, which share the owner's threads."""
    each = max(1, threads // options.processes)
    wanted = {
        "--model-path": model_dir,
        "--slots": options.slots,
        "--context": context,
        "--dtype": options.dtype,
        "--threads": each,
    }

    def arguments(port: int) -> list[str]:
        flags = [str(part) for pair in {**wanted, "--port": port}.items() for part in pair]
        return ["-m", "flowgraph.engines.served.serve", *flags]

    variables = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    checks, recordable = Checksums(), channels(directory_facts(Path(model_dir)))
    replicas = [
        HttpReplica(
            f"server {at}",
            carrier(options),
            process=ServerProcess(
                sys.executable, arguments, variables=variables, log=_log(logs, "transformers", at)
            ),
            saver=True,
            repeatable=True,
            verify=checks,
            channels=recordable,
            rerecords=False,
        )
        for at in range(options.processes)
    ]
    return await _started(replicas, options, model_dir, logs, context, journal, patience, fresh=True)


async def sglang_fleet(
    options: SglangOptions,
    model_dir: str,
    *,
    context: int,
    threads: int,
    logs: str,
    journal: Journal,
    patience: float,
) -> Fleet:
    """SGLang servers: launched, or those at `urls`. Raises EngineFailed naming what their environment lacks."""
    ranks = options.tp * options.dp
    verify: Any = Checksums() if options.device == "cpu" and ranks == 1 else same_version
    saver = bool(options.flags.get("enable-memory-saver"))

    recordable = channels(directory_facts(Path(model_dir)))

    if options.urls:
        replicas = [
            HttpReplica(url, carrier(options), url=url, verify=verify, channels=recordable)
            for url in options.urls
        ]
        return await _started(replicas, options, model_dir, logs, context, journal, patience, fresh=False)
    python = interpreter(options.python)
    if lacks := missing(python, options.device):
        mend = (
            "device: cpu where there is no GPU" if options.device == "cuda" else "python: to its interpreter"
        )
        raise EngineFailed(
            f"SGLang can't be started by {python}: {'; '.join(lacks)}",
            f"set {mend}; flowgraph doctor sglang --python {python} --device {options.device} goes through every step",
        )
    each = max(1, threads // options.processes)
    replicas = [
        HttpReplica(
            f"server {at}",
            carrier(options),
            process=ServerProcess(
                python,
                sglang_arguments(options, model_dir, context),
                variables=_environment(options) | OFFLINE | LONGER | {"OMP_NUM_THREADS": str(each)},
                log=_log(logs, "sglang", at),
            ),
            saver=saver,
            verify=verify,
            channels=recordable,
        )
        for at in range(options.processes)
    ]
    return await _started(replicas, options, model_dir, logs, context, journal, patience, fresh=True)


def sglang_arguments(options: SglangOptions, model_dir: str, context: int) -> Callable[[int], list[str]]:
    """Port → what Python runs. The graph's own flags come last, and win."""
    flags: dict[str, Any] = {
        "model-path": model_dir,
        "host": "127.0.0.1",
        "dtype": options.dtype,
        "device": options.device,
        "max-running-requests": options.slots,
        "context-length": context + ROOM,
        "weight-version": 0,
        "skip-server-warmup": True,
        "log-level": "warning",
    }
    if options.tp > 1:
        flags["tp-size"] = options.tp
    if options.dp > 1:
        flags["dp-size"] = options.dp
    tokens = options.kv_tokens
    if options.device == "cpu":
        tokens = tokens or options.slots * (context + ROOM)  # left alone it takes 14 GB for a model of 0.3
        flags["sleep-on-idle"] = True  # else its scheduler spins on a core
    if tokens and tokens < context + ROOM:
        raise ValueError(
            f"kv_tokens: {tokens} hold no request of {context} tokens; at least {context + ROOM} do"
        )
    if tokens:
        flags["max-total-tokens"] = tokens
    if push(options) == "delta":
        flags["custom-weight-loader"] = LOADER
    flags |= options.flags

    def arguments(port: int) -> list[str]:
        out = ["-m", "sglang.launch_server"]
        for name, value in {**flags, "port": port}.items():
            if value is True:
                out.append(f"--{name}")
            elif value is not False:
                out += [f"--{name}", str(value)]
        return out

    return arguments


def _environment(options: SglangOptions) -> dict[str, str]:
    variables = server_environment(options.device)
    if push(options) == "delta":
        ours, theirs = str(Path(__file__).with_name("sglang_loader")), variables.get("PYTHONPATH")
        variables["PYTHONPATH"] = os.pathsep.join([ours, theirs] if theirs else [ours])
    return variables


def _log(logs: str, name: str, at: int) -> Path:
    return Path(logs, f"{name}-{at}.log")


async def _started(
    replicas: Sequence[HttpReplica],
    options: TransformersOptions | SglangOptions,
    model_dir: str,
    logs: str,
    context: int,
    journal: Journal,
    patience: float,
    *,
    fresh: bool,
) -> Fleet:
    staging = Staging(model_dir, options.dtype, logs, deltas=push(options) == "delta")
    fleet = Fleet(
        replicas,
        context=context,
        vocabulary=directory_facts(Path(model_dir)).vocab,
        stage=staging,
        initial=initial(model_dir, options.dtype),
        completed=Stops(model_dir).end,
        journal=journal,
        patience=patience,
        close=staging.close,
    )
    await fleet.start(fresh=fresh)
    fleet.watch(LOOK, HUNG)
    return fleet
