"""The JSON Schema of a graph file, so that an editor completes and checks it as it is written.

It is made from the types that the reader itself takes its keys from, and so can't differ from what is read.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import msgspec

from flowgraph.spec.form import GraphForm, HopForm
from flowgraph.spec.hop import Facts

DIALECT = "https://json-schema.org/draft/2020-12/schema"
LIBRARY = "hops"  # the package whose hops are offered; any other import path is as good


def graph_schema() -> dict[str, Any]:
    """The schema of a whole file. `use:` offers the hops that are shipped, and takes any import path."""
    schema = msgspec.json.schema(GraphForm)
    schema["$defs"][HopForm.__name__]["properties"]["use"]["examples"] = list(shipped_hops())
    return {"$schema": DIALECT, "title": "flowgraph graph", **schema}


def shipped_hops() -> Iterator[str]:
    """The import path of every hop of the library, in order; none where it is not installed.

    What a package takes from its own modules goes by the package's name.
    """
    try:
        package = importlib.import_module(LIBRARY)
    except ImportError:
        return
    told = set()
    for module in sorted(m.name for m in pkgutil.walk_packages(package.__path__, f"{LIBRARY}.")):
        for name, value in vars(importlib.import_module(module)).items():
            facts = getattr(value, "__flowgraph__", None)
            if (
                isinstance(facts, Facts)
                and f"{value.__module__}.".startswith(f"{module}.")
                and value not in told
            ):
                told.add(value)
                yield f"{module}.{name}"
