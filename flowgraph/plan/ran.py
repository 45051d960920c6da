"""The plan that a run ran, which is what its bytes are held against, whatever has become of the graph since."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from flowgraph.plan.plan import Plan, from_json


def read_ran(run_dir: str | Path, graph: str) -> Plan:
    """DIR/plan.json. Raises ValueError when there is none that can be read, or the run is of another graph."""
    path = Path(run_dir) / "plan.json"
    try:
        plan = from_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}; give the directory of a run") from None
    except msgspec.DecodeError as error:
        message = f"{path} is no plan of this version of flowgraph: {error}; run the graph again"
        raise ValueError(message) from None
    if plan.graph != graph:
        raise ValueError(f"{run_dir} is a run of the graph {plan.graph}, not of {graph}")
    return plan


def read_busy(run_dir: str | Path) -> dict[str, float]:
    """Owner → the share of the run's time that it was busy; nothing where DIR/summary.json does not say."""
    try:
        said = json.loads((Path(run_dir) / "summary.json").read_bytes())
        return {owner: seconds / said["seconds"] for owner, seconds in said["busy_seconds"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return {}


def differences(ran: Plan, plan: Plan) -> list[str]:
    """What two plans of one graph price differently, by name; where a hop is written, and its doc, price nothing."""
    out = [] if ran.passes == plan.passes else ["passes"]
    names = dict.fromkeys([*ran.dims, *plan.dims])
    out += [f"dims.{name}" for name in names if ran.dims.get(name) != plan.dims.get(name)]
    hops = dict.fromkeys([*ran.hops, *plan.hops])
    # A column's bytes follow from its dims, and a hop's reads and homes from the passes.
    out += [f"hops.{name}" for name in hops if not out and _priced(ran, name) != _priced(plan, name)]
    return out or ([] if (ran.seams, ran.unread) == (plan.seams, plan.unread) else ["seams"])


def _priced(plan: Plan, name: str) -> object:
    hop = plan.hops.get(name)
    return hop and (hop.use, hop.owner, hop.home, hop.rows, hop.columns, hop.reads, hop.every)
