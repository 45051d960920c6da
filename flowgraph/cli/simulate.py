"""`flowgraph simulate`: a ring under a virtual clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from flowgraph import api
from flowgraph.cli.shared import GRAPH, JSON, MODEL, SET, show_findings, width, write_file

Seconds = click.FloatRange(min=0)
Above = click.FloatRange(min=0, min_open=True)


@click.command()
@GRAPH
@SET
@MODEL
@click.option(
    "--steps", type=click.IntRange(min=1), default=200, show_default=True, help="Steps to simulate."
)
@click.option(
    "--warmup", type=click.IntRange(min=0), help="Steps before anything is measured; default: a tenth."
)
@click.option("--engines", type=click.IntRange(min=1), help="Replicas; default: as the graph's engine says.")
@click.option(
    "--slots",
    type=click.IntRange(min=1),
    help="Requests that each decodes at once; default: as the graph says.",
)
@click.option(
    "--lengths",
    metavar="DIST",
    help="Of responses in tokens: lognormal:2000,1.2 (mean, sigma of the log), "
    "exponential:mean, uniform:low,high, fixed:n, pareto:mean,alpha, trace:FILE; default: the mean of the dim.",
)
@click.option("--prompts", metavar="DIST", help="Of prompts; default: the mean of the dim.")
@click.option(
    "--max",
    "most",
    type=click.IntRange(min=1),
    help="Tokens of the longest response; default: as the graph says.",
)
@click.option(
    "--decode",
    metavar="A,B[,C]",
    help="A step of n requests and k cached tokens takes A + B·n + C·k seconds.  [default: 0.012,4e-5,0]",
)
@click.option(
    "--prefill", type=Above, help="Tokens/s of prompts, while decoding stands still.  [default: 20000]"
)
@click.option("--kv", type=Above, help="Tokens of each engine's KV cache; default: enough.")
@click.option("--train-seconds", type=Seconds, help="Of a batch, whatever its size.  [default: 0]")
@click.option(
    "--train-rate", type=Above, help="Tokens/s on top of that; default: 50,000, or none with --train-seconds."
)
@click.option(
    "--sync-seconds",
    type=Seconds,
    default=0.0,
    show_default=True,
    help="That engines stand still for weights.",
)
@click.option(
    "--seconds", "others", multiple=True, metavar="HOP=S", help="Of a firing of another hop; default: 0."
)
@click.option(
    "--solve",
    metavar="DIST",
    help="How often groups solve their task (beta:a,b, uniform:low,high, fixed:p), where a batch reads scores.",
)
@click.option(
    "--failures",
    type=click.FloatRange(min=0, max=1, max_open=True),
    default=0.0,
    show_default=True,
    help="Share of trajectories that come to nothing halfway.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of all chance.")
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    metavar="PATH=V,V,…",
    help="A row a value; several: each with each. PATH: as of --set, hop.option, seconds.HOP, or an option above "
    "from warmup to seed. Where values have commas, as lognormal:20,1.2 and those of decode, write V;V;…",
)
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Draw it over time, as SVG.")
@JSON
def simulate(
    graph: str, overrides: tuple[str, ...], steps: int, sweeps: tuple[str, ...], output: str | None,
    as_json: bool, **given: Any,
) -> None:  # fmt: skip
    """Drive GRAPH's own dispatch, buffer and batch under a virtual clock, with models of engines and trainer.

    No engine, learner or model is needed, and no hop body runs but those of folds. All times are of the virtual clock.
    """
    from flowgraph.simulator import outcome, plot, sweep

    if output and Path(output).suffix.lower() != ".svg":
        raise click.UsageError(f"-o {output}: a simulation is drawn as SVG; give a name that ends in .svg")
    if output and sweeps:
        raise click.UsageError("-o draws one simulation, and --sweep makes many; leave one out")
    model = click.get_current_context().meta.get("model")
    try:
        options = _options(given)
        if sweeps:
            found = api.sweep(graph, sweeps, steps=steps, overrides=overrides, model=model, **options)
            _warn(sweep.cuts(found))
            click.echo(sweep.to_json(found) if as_json else sweep.render(found, width()), nl=as_json)
            return
        loaded = api.load(graph, overrides, model=model)
        if not loaded.compiles:  # a budget of bytes says nothing of time
            show_findings(loaded, as_json=as_json)
        one = api.simulate(loaded, steps=steps, **options)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    _warn([str(cut) for cut in one.cut])
    if output:
        write_file(Path(output), plot.to_svg(one))
    click.echo(outcome.to_json(one) if as_json else outcome.render(one, width()), nl=as_json)


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """What was given, as settings."""
    from flowgraph.simulator.settings import decode

    options = {name: value for name, value in given.items() if value is not None}
    speed = decode(options.pop("decode")) if "decode" in options else {}
    if "prefill" in options:
        speed["prefill"] = options.pop("prefill")
    options["speed"] = speed
    options["seconds"] = dict(_second(text) for text in options.pop("others"))
    return options


def _warn(cuts: list[str]) -> None:
    for cut in cuts:
        click.echo(f"warning: {cut}", err=True)


def _second(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        if name:
            return name, float(value)
    except ValueError:
        pass
    raise ValueError(f"--seconds {text}: give hop=seconds, such as reward=1.5")
