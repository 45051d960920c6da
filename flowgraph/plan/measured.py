"""What a run measured: bytes as they were read and written, not as they were predicted."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec


class Copied(msgspec.Struct, frozen=True):
    """Payload bytes that were copied, each a mapping to bytes; see `copies.Copies`.

    writer, driver: of `hop.column`, into its block, and from there into the driver's memory
    reader: of `reader.port`, out of blocks, because they were joined, decoded or kept
    """

    writer: dict[str, int]
    driver: dict[str, int]
    reader: dict[str, int]


class Measured(msgspec.Struct, frozen=True):
    """Totals over `steps` steps.

    read: `reader.port` → bytes; wrote: `hop.column` → bytes; control_bytes: messages, without the start
    driver_bytes: payload that passed through the driver's memory
    lengths: reader → writer → sizes of a block, joined by commas → how many such blocks it read,
    one that several rows share once where it is read once
    copied: None of a run that did not count it
    """

    steps: int
    read: dict[str, int]
    wrote: dict[str, int]
    control_bytes: int
    driver_bytes: int = 0
    lengths: dict[str, dict[str, dict[str, int]]] = {}
    copied: Copied | None = None


def read_measured(run_dir: str | Path, graph: str) -> Measured:
    """What a run of this graph measured. Raises ValueError when it is of another, or did not get that far."""
    path = Path(run_dir) / "seams.json"
    try:
        ran = json.loads((Path(run_dir) / "plan.json").read_bytes())["graph"]
        found = msgspec.json.decode(path.read_bytes(), type=Measured)
    except (OSError, ValueError, KeyError, TypeError, msgspec.DecodeError) as error:
        raise ValueError(f"{path} holds no measured seams: {error}") from None
    if ran != graph:
        raise ValueError(f"{run_dir} is a run of the graph {ran}, not of {graph}")
    if not found.steps:
        raise ValueError(
            f"{run_dir} is a run without a step, so it measured nothing; give one that made a step"
        )
    return found
