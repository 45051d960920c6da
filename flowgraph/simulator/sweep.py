"""A sweep: one simulation for every combination of values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from flowgraph.errors import CheckError, RunError
from flowgraph.ir.graph import Node
from flowgraph.plan.plan import Plan
from flowgraph.simulator.outcome import Cut, Simulated, time_text, unmeasured
from flowgraph.simulator.run import simulate_plan
from flowgraph.simulator.settings import NAMES, Settings, decode, make
from flowgraph.spec.form import GraphForm, HopForm, kinds
from flowgraph.spec.reader import near

# What a value may be set of, beside `seconds.HOP`: settings by name, and by that of their option.
SETTINGS = (*(name for name in NAMES if name not in ("speed", "seconds")), "max", "decode", "prefill")
DISTRIBUTIONS = "lengths", "prompts", "solve"


class Swept(msgspec.Struct, frozen=True):
    """One combination: what was set, and what came of it.

    refused: why it doesn't begin, findings of the compiler by their codes; failed: why it didn't end. The first line
    says what, those below more
    """

    set: dict[str, str]
    result: Simulated | None = None
    refused: str = ""
    failed: str = ""


def sweep(
    planned: Callable[[list[str]], Plan],
    nodes: Mapping[str, Node],
    sweeps: Sequence[str],
    steps: int,
    settings: Mapping[str, Any],
) -> list[Swept]:
    """One for each combination. planned: the plan of the graph with overrides `path=value`; nodes: its hops.

    sweeps: `path=value,value,…` each, or `path=value;value;…`; path is that of an override, `hop.option`, or a setting.
    Raises ValueError for another form; when nothing came of any combination, what the first one raised.
    """
    found: list[Swept] = []
    errors: list[Exception] = []
    combinations = _combinations(sweeps)
    paths = {name: _path(name, nodes) for name in combinations[0] if setting(name) is None}
    made = [
        _make(settings, at) for at in combinations
    ]  # what is no setting is told before minutes have passed
    for at, changed in zip(combinations, made, strict=True):
        overrides = [f"{path}={at[name]}" for name, path in paths.items()]
        try:
            found.append(Swept(at, simulate_plan(planned(overrides), steps, changed)))
            continue
        except CheckError as error:
            errors.append(error)
            why = "\n".join(f"{d.code}: {d.message}\n  help: {d.help}" for d in error.diagnostics)
        except (ValueError, RunError) as error:
            errors.append(error)
            why = str(error)
        failed = isinstance(errors[-1], RunError)
        found.append(Swept(at, failed=why) if failed else Swept(at, refused=why))
    if len(errors) == len(found):
        raise errors[0]
    return found


def setting(name: str) -> str | None:
    """The setting of this name or option, `decode`, `prefill` or `seconds.HOP`; None for the path of anything else.

    Raises ValueError for what is neither, such as another option.
    """
    plain = name.replace("-", "_")
    if plain in SETTINGS:
        return "most" if plain == "max" else plain
    if name.startswith("seconds.") and name != "seconds.":
        return name
    if name == "seconds." or ("." not in name and name not in kinds(GraphForm)):
        names = ", ".join(one.replace("_", "-") for one in SETTINGS)
        raise ValueError(
            f"{name!r} can't be swept; give a path such as dims.group, hop.option, or one of {names}, seconds.HOP"
        )
    return None


def _make(settings: Mapping[str, Any], at: Mapping[str, str]) -> Settings:
    """Settings, with those of one combination."""
    out = dict(settings)
    for written, value in at.items():
        name = setting(written)
        if name in ("decode", "prefill"):
            speed = decode(value) if name == "decode" else {name: value}
            out["speed"] = {**msgspec.to_builtins(out.get("speed", {})), **speed}
        elif name is not None and name.startswith("seconds."):
            out["seconds"] = {**out.get("seconds", {}), name.removeprefix("seconds."): value}
        elif name is not None:
            out[name] = value
    return make(out)


def _path(name: str, nodes: Mapping[str, Node]) -> str:
    """`hop.option` as the path of an override; any other path as it is. Raises ValueError for no option of the hop."""
    hop, _, rest = name.partition(".")
    if hop not in nodes or not rest:
        return name
    first = rest.partition(".")[0]
    options = [param.name for param in nodes[hop].spec.params if param.origin == "with"]
    if first in options:
        return f"hops.{hop}.with.{rest}"
    if nodes[hop].binding(first) is not None:
        return f"hops.{hop}.in.{rest}"
    if first in kinds(HopForm):
        return f"hops.{name}"
    known = [*options, *(one.port.name for one in nodes[hop].bindings)]
    told = _told(first, nodes[hop], options)
    hint = near(first, known) or (f"did you mean {told}? " if told else "")
    raise ValueError(
        f"{name!r} can't be swept: hop {hop} ({nodes[hop].spec.use}) has no option {first!r}; "
        f"{hint}options: {', '.join(options) or 'none'}"
    )


def _told(word: str, node: Node, options: Sequence[str]) -> str | None:
    """The option whose line in the hop's docstring begins by this word, as in `target: the watermark (…)`."""
    lines = (line.strip().partition(": ") for line in node.spec.doc.splitlines())
    return next((name for name, _, said in lines if name in options and word in said.split()[:2]), None)


def _combinations(sweeps: Sequence[str]) -> list[dict[str, str]]:
    """`path=a,b,c` each: every combination, the last one varying fastest. Raises ValueError for another form."""
    axes = []
    for text in sweeps:
        path, equals, values = text.partition("=")
        parts = _parts(values, ";")
        if len(parts) == 1 and path != "decode":
            parts = _parts(values, ",")
            if path in DISTRIBUTIONS and any(part and ":" not in part for part in parts):
                form = f"{path}=lognormal:20,1.2;lognormal:40,1.2"
                raise ValueError(f"{text!r}: separate values that have commas by ; as in {form}")
        elif not parts[-1]:
            parts.pop()  # one value with commas, and a ; behind it
        if not equals or not path or not all(parts):
            raise ValueError(
                f"{text!r} is not of the form path=value,value,… or, with commas in values, path=value;…"
            )
        axes.append([(path, value) for value in parts])
    names = [setting(axis[0][0]) or axis[0][0] for axis in axes]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"{name} is swept twice; give all its values in one --sweep {name}=value,value,…"
            )
    return [dict(one) for one in itertools.product(*axes)]


def _parts(text: str, mark: str) -> list[str]:
    """Split outside brackets: `{mean: 4, max: 8}` is one value."""
    depth, parts = 0, [""]
    for char in text:
        depth += (char in "[{") - (char in "]}")
        if char == mark and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


# --- as a table ----------------------------------------------------------------------------------------------


def to_json(found: Sequence[Swept]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(found), indent=1)


HEADS = (
    "step", "traj/\nmin", "tokens/\ns", "slots\nempty", "trainer\nidle", "in\nflight", "ready", "lag", "max", "dropped",
)  # fmt: skip


def render(found: Sequence[Swept], width: int = 110) -> str:
    """A row a setting; below, in a line each: what was wrong where nothing came of it, what was cut, and which columns
    the width has no room for. What was set is always whole.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    ran = next(one.result for one in found if one.result is not None)
    title = (
        f"{ran.graph}: {ran.steps:,} {'step' if ran.steps == 1 else 'steps'} each, {unmeasured(ran.warmup)}"
    )
    heads = [*(name.replace(".", ".\n") for name in found[0].set), *HEADS]
    rows = [[*one.set.values(), *(_cells(one.result) if one.result else [_state(one)])] for one in found]
    widths = _widths(heads, rows)
    shown = len(heads)
    while shown > len(found[0].set) + 1 and _wide(widths[:shown]) > width:
        shown -= 1
    table = Table(
        title=title, title_justify="left", title_style="dim", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )  # fmt: skip
    for head, wide in zip(heads[:shown], widths, strict=False):
        table.add_column(head, justify="right", no_wrap=True, min_width=wide)
    for row in rows:
        table.add_row(*row[:shown])
    console = Console(width=max(width, _wide(widths[:shown])), color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().strip().splitlines()]
    for one in found:
        if one.result is None:
            why = (one.refused or one.failed).split("\n")[0]
            lines += ["", f"{', '.join(f'{k}={v}' for k, v in one.set.items())}: {why}"]
    lines += [line for one in cuts(found) for line in ("", one)]
    if shown < len(heads):
        left = ", ".join(head.replace("\n", " ") for head in heads[shown:])
        lines += ["", f"left out for want of width: {left}; --json has all"]
    return "\n".join(lines) + "\n"


def cuts(found: Sequence[Swept]) -> list[str]:
    """What was cut, at its worst among the combinations, a line each."""
    worst: dict[str, Cut] = {}
    for cut in (cut for one in found if one.result is not None for cut in one.result.cut):
        if cut.of not in worst or cut.share > worst[cut.of].share:
            worst[cut.of] = cut
    return [f"up to {cut}" if len(found) > 1 else f"{cut}" for cut in worst.values()]


def _widths(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Characters of each column."""
    cells = [[*head.split("\n"), *(row[i] for row in rows if i < len(row))] for i, head in enumerate(heads)]
    return [max(map(len, column)) for column in cells]


def _wide(widths: Sequence[int]) -> int:
    """Characters of a table of such columns: two between them, and one at each side."""
    return sum(widths) + 2 * len(widths)


def _state(one: Swept) -> str:
    return "refused" if one.refused else "failed"


def _cells(s: Simulated) -> list[str]:
    dropped = sum(s.ledger.dropped.values()) / max(1, s.ledger.dispatched)
    return [
        time_text(s.step_seconds), f"{s.per_minute:,.1f}", f"{s.tokens_per_second:,.0f}", f"{s.slots_empty:.1%}",
        f"{s.trainer_idle:.1%}", f"{s.in_flight:,.1f}", f"{s.ready:,.1f}", f"{s.lag.mean:.2f}", f"{s.lag.max}",
        f"{dropped:.1%}",
    ]  # fmt: skip
