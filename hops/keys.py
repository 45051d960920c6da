"""Random keys: 64 bits that depend on who somebody is, and on nothing else."""

from __future__ import annotations

from hashlib import blake2b


def key_of(who: str) -> int:
    """64 bits of a text such as `seed/uid/sample`."""
    return int.from_bytes(blake2b(who.encode(), digest_size=8).digest(), "little")
