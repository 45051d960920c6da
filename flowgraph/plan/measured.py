"""What a run measured: bytes as they were read and written, not as they were predicted."""

from __future__ import annotations

import msgspec


class Measured(msgspec.Struct, frozen=True):
    """Totals over `steps` steps.

    read: `reader.port` → bytes; wrote: `hop.column` → bytes; control_bytes: messages
    driver_bytes: payload that passed through the driver's memory
    lengths: reader → writer → sizes of a block, joined by commas → how many such blocks it read
    """

    steps: int
    read: dict[str, int]
    wrote: dict[str, int]
    control_bytes: int
    driver_bytes: int = 0
    lengths: dict[str, dict[str, dict[str, int]]] = {}
