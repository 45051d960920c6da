"""A difference as text: a line a change, `+` for what came, `-` for what went, `~` for what is otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from flowgraph.report.diff.diff import Change, Crossing, Difference, HopFacts, PortFacts, Spent
from flowgraph.spec.units import percent_text, size_text

T = TypeVar("T")
SAME = "no difference"


def render_text(difference: Difference) -> str:
    """Plain text; sections without a change are left out."""
    sections = [
        ("settings", _rows(difference.settings, _value, lambda a, b: [_arrow(_value(a), _value(b))])),
        ("hops", _rows(difference.hops, _hop, _hops)),
        ("ports", _rows(difference.ports, _port, _ports)),
        ("seams, mean bytes a step", _rows(difference.seams, _crossing, _crossings)),
        ("memory of owners", _rows(difference.memory, size_text, lambda a, b: [_sizes(a, b)])),
        ("budgets", _rows(difference.budgets, _budget, _budgets)),
    ]
    parts = ["\n".join([title, *_aligned(list(rows))]) for title, rows in sections]
    shown = [part for part in parts if "\n" in part]
    return "\n\n".join(shown) + "\n" if shown else f"{SAME}\n"


Row = tuple[str, str, str]  # its sign, its name, what is said of it


def _rows(
    changes: Iterable[Change[T]], one: Callable[[T], str], both: Callable[[T, T], list[str]]
) -> Iterator[Row]:
    """one: what is said of a part that came or went. both: a line for each thing that is otherwise."""
    for change in changes:
        if change.before is None or change.after is None:
            there = change.after if change.before is None else change.before
            assert there is not None
            yield "+" if change.before is None else "-", change.name, one(there)
            continue
        for i, line in enumerate(both(change.before, change.after)):
            yield ("~", change.name, line) if i == 0 else ("", "", line)


def _aligned(rows: list[Row]) -> list[str]:
    width = max((len(name) for _, name, _ in rows), default=0)
    return [f"  {sign:1} {name:{width}}  {said}".rstrip() for sign, name, said in rows]


def _arrow(before: str, after: str) -> str:
    return f"{before} → {after}"


def _value(value: object) -> str:
    """As a graph file would have it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, float) and value.is_integer():
        return f"{value:.15g}"
    return json.dumps(value, ensure_ascii=False)


# --- hops and ports ----------------------------------------------------------------------------------------


def _hop(hop: HopFacts) -> str:
    return f"{hop.use}, owner {hop.owner}"


def _hops(before: HopFacts, after: HopFacts) -> list[str]:
    lines = [
        f"{name} {_arrow(str(a), str(b))}"
        for name in ("use", "owner", "queue", "every")
        if (a := getattr(before, name)) != (b := getattr(after, name))
    ]
    for path in dict.fromkeys((*before.options, *after.options)):
        a, b = (_option(hop.options, path) for hop in (before, after))
        lines += [f"{path} {_arrow(a, b)}"] if a != b else []
    return lines


def _option(options: dict[str, Any], path: str) -> str:
    return _value(options[path]) if path in options else "(not set)"


def _port(port: PortFacts) -> str:
    said = " ".join([port.type, *port.facts])
    return f"{said} from {port.source}" if port.source else said


def _ports(before: PortFacts, after: PortFacts) -> list[str]:
    return [_arrow(_port(before), _port(after))]


# --- bytes -------------------------------------------------------------------------------------------------


def _crossing(seam: Crossing) -> str:
    price = [] if seam.transport == "control" else [_price(seam)]
    delay = [f"delay {seam.delay}"] if seam.delay else []
    return ", ".join([*price, seam.transport, f"until {seam.lifetime}", *delay])


def _price(seam: Crossing) -> str:
    if seam.priced:
        return size_text(seam.mean)
    return f"{size_text(seam.mean)} + unpriced" if seam.mean else "unpriced"


def _crossings(before: Crossing, after: Crossing) -> list[str]:
    """All on one line, the bytes first: at the mean where that differs, else at most."""
    parts = []
    if before.priced != after.priced:
        parts.append(_arrow(_price(before), _price(after)))
    elif before.mean != after.mean:
        parts.append(_sizes(before.mean, after.mean))
    elif before.max != after.max:
        parts.append(f"at most {_sizes(before.max, after.max)}")
    for name in ("transport", "lifetime", "delay", "max_lag", "every"):
        a, b = getattr(before, name), getattr(after, name)
        word = "" if name == "transport" else f"{name} "
        parts += [f"{word}{_arrow(str(a), str(b))}"] if a != b else []
    return [", ".join(parts)]


def _sizes(before: float, after: float) -> str:
    a, b = size_text(before), size_text(after)
    if not before:
        return _arrow(a, b)
    more = after - before
    # What rounding to three digits would hide.
    change = (
        f"{'+' if more > 0 else '-'}{size_text(abs(more))}" if a == b else percent_text(more / before * 100)
    )
    return f"{_arrow(a, b)} ({change})"


def _budget(spent: Spent) -> str:
    return "none" if spent.budget is None else size_text(spent.budget)


def _budgets(before: Spent, after: Spent) -> list[str]:
    parts = [_sizes(before.nbytes, after.nbytes)] if before.nbytes != after.nbytes else []
    parts += [f"budget {_arrow(_budget(before), _budget(after))}"] if before.budget != after.budget else []
    return [", ".join(parts)]
