"""Rows: where prompts and ground truths come from. Sources hide no state: an index is always the same row.

`reasoning_gym` and `table` are factories: a dataset hop builds its source with one, and an evaluation takes
one as `rows: {use: hops.rows.table, path: …}`.
"""

from hops.rows.example import Example, RowSource, pack, prompt_ids, unpack
from hops.rows.gym import reasoning_gym
from hops.rows.table import table

__all__ = ["Example", "RowSource", "pack", "prompt_ids", "reasoning_gym", "table", "unpack"]
