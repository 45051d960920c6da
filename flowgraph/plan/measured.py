"""What a run measured: bytes as they were read and written, not as they were predicted."""

from __future__ import annotations

import msgspec


class Measured(msgspec.Struct, frozen=True):
    """Totals over `steps` steps. read: `reader.port` → bytes; wrote: `hop.column` → bytes; control_bytes: messages."""

    steps: int
    read: dict[str, int]
    wrote: dict[str, int]
    control_bytes: int
