"""For random graphs: what passes change is bytes, never a bit, and the bytes are those that were predicted."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowgraph.passes.rewrite import PASSES
from flowgraph.plan.measured import Measured
from flowgraph.plan.plan import Plan, from_json
from flowgraph.runtime.run import run_graph
from tests.graphs.random_graphs import rings
from tests.graphs.rings import Ring, graph_of
from tests.runtime.harness import steps, summary


def run(ring: Ring, directory: Path, off: Collection[str] = (), verify: bool = False) -> str:
    graph, content = graph_of(ring, directory)
    done = run_graph(graph, content, executor="inproc", runs=str(directory / "runs"), live=False, off=off, verify=verify)
    assert done.steps == ring.steps
    return done.directory
