"""The command line. A command reads its options, calls the library, and shows what comes of it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Literal

import click

from flowgraph import api
from flowgraph.errors import Diagnostic, FlowgraphError
from flowgraph.ir.graph import Graph
from flowgraph.ir.text import graph_text
from flowgraph.passes.pipeline import Loaded
from flowgraph.passes.rewrite import PASSES, rewrite
from flowgraph.plan.compile import compile_graph
from flowgraph.plan.measured import Measured, read_measured
from flowgraph.plan.plan import Plan, to_json
from flowgraph.plan.text import plan_text
from flowgraph.report.draw import Format
from flowgraph.spec.render import render
from flowgraph.spec.revision import at_revision

FINDINGS, INTERRUPTED = 1, 130  # and 2 for wrong usage, which click gives
GRAPH = click.argument("graph", type=click.Path())
SET = click.option(
    "--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Override one value of the graph."
)
NO_PASS = click.option(
    "--no-pass", multiple=True, type=click.Choice([*PASSES, "all"]), help="Leave a pass of the compiler out."
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class Commands(click.Group):
    """Errors that flowgraph raises on purpose are shown as they are, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FlowgraphError as error:
            click.echo(str(error), err=True)
            ctx.exit(FINDINGS)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="flowgraph-rl", prog_name="flowgraph")
def main() -> None:
    """A compiler and runtime for the asynchronous reinforcement-learning ring of language models."""


def _checked(
    path: str, overrides: tuple[str, ...] = (), *, as_json: bool = False, no_pass: tuple[str, ...] = ()
) -> Loaded:
    loaded = api.load(path, overrides, no_pass=no_pass)
    _findings(loaded, as_json=as_json)
    return loaded


def _graph(loaded: Loaded) -> Graph:
    assert loaded.graph is not None, "it has no findings"
    return loaded.graph


def _findings(*graphs: Loaded, as_json: bool) -> None:
    """Show what there is to find in graphs, if anything, and end."""
    found = [d for loaded in graphs for d in loaded.diagnostics]
    if not found:
        return
    if as_json:
        click.echo(json.dumps({"diagnostics": [_as_dict(d) for d in found]}, indent=1))
    else:
        sources = {name: text for loaded in graphs for name, text in loaded.sources.items()}
        click.echo(render(found, sources), err=True)
        click.echo(f"\n{len(found)} finding{'s' if len(found) > 1 else ''}", err=True)
    raise SystemExit(FINDINGS)


def _as_dict(d: Diagnostic) -> Any:
    import msgspec

    return msgspec.to_builtins(d)


@main.command()
@GRAPH
@SET
@NO_PASS
@click.option("--state", "with_state", is_flag=True, help="List every state, and what it takes to keep it.")
@JSON
def check(
    graph: str, overrides: tuple[str, ...], no_pass: tuple[str, ...], with_state: bool, as_json: bool
) -> None:
    """Check every seam of GRAPH before anything runs. Exit code 1 when there are findings."""
    loaded = _checked(graph, overrides, as_json=as_json, no_pass=no_pass)
    if with_state:
        from flowgraph.report import census as counting

        found = counting.census(api.compile(loaded, no_pass=no_pass))
        click.echo(counting.to_json(found) if as_json else counting.render_table(found, _width()), nl=as_json)
        return
    seams = sum(len({b.via for b in node.bindings}) for node in _graph(loaded).nodes.values())
    if as_json:
        click.echo(json.dumps({"diagnostics": []}))
    else:
        from flowgraph.passes.staleness import staleness

        lag = staleness(_graph(loaded))
        proved = f"; lag at most {lag.bound}" if lag is not None else ""
        click.echo(f"{graph}: {len(_graph(loaded).nodes)} hops, {seams} seams, no findings{proved}")


@main.command()
@GRAPH
@SET
@NO_PASS
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    help="FILE.svg or FILE.mmd; default: Mermaid on stdout.",
)
@click.option(
    "--run", "run_dir", type=click.Path(exists=True, file_okay=False), help="Show what this run measured too."
)
def draw(
    graph: str, overrides: tuple[str, ...], no_pass: tuple[str, ...], output: str | None, run_dir: str | None
) -> None:
    """Draw GRAPH: every hop with its owner, every seam with shape, bytes and lifetime."""
    formats: dict[str, Format] = {".svg": "svg", ".mmd": "mermaid"}
    suffix = Path(output).suffix if output else ".mmd"
    if suffix not in formats:
        raise click.UsageError(f"{output} is neither .svg nor .mmd")
    plan = api.compile(_checked(graph, overrides, no_pass=no_pass), no_pass=no_pass)
    text = api.draw(plan, formats[suffix], measured=_measured(run_dir, plan))
    if output:
        _write(Path(output), text)
        click.echo(f"wrote {output}")
    else:
        click.echo(text, nl=False)


@main.command()
@GRAPH
@SET
@NO_PASS
@click.option(
    "--run",
    "run_dir",
    type=click.Path(exists=True, file_okay=False),
    help="Put what this run measured beside it.",
)
@JSON
def audit(
    graph: str, overrides: tuple[str, ...], no_pass: tuple[str, ...], run_dir: str | None, as_json: bool
) -> None:
    """Price every seam of GRAPH in bytes a step, largest first."""
    from flowgraph.report import audit as auditing

    plan = api.compile(_checked(graph, overrides, as_json=as_json, no_pass=no_pass), no_pass=no_pass)
    result = api.audit(plan, _measured(run_dir, plan))
    click.echo(auditing.to_json(result) if as_json else auditing.render_table(result, _width()))


def _width() -> int:
    import shutil

    return shutil.get_terminal_size((120, 24)).columns


def _measured(run_dir: str | None, plan: Plan) -> Measured | None:
    try:
        return read_measured(run_dir, plan.graph) if run_dir else None
    except ValueError as error:
        raise click.UsageError(str(error)) from None


@main.command()
@click.argument("graph", metavar="GRAPH|CODE")
@SET
@NO_PASS
@click.option("--stage", type=click.Choice(["source", "optimized", "lowered"]), help="The text of one stage.")
@click.option("--place", is_flag=True, help="Where the hops that nobody placed would cost least.")
@JSON
def explain(
    graph: str,
    overrides: tuple[str, ...],
    no_pass: tuple[str, ...],
    stage: str | None,
    place: bool,
    as_json: bool,
) -> None:
    """Show what every pass makes of GRAPH, in bytes a step of every seam; or what the code of a finding means.

    With FLOWGRAPH_DUMP=DIR in the environment, DIR gets the plan's text after every pass.
    """
    if re.fullmatch(r"[Ff][Gg]\w*", graph):
        click.echo(_page(graph.upper()), nl=False)
        return
    if stage and place:
        raise click.UsageError("give --stage or --place")
    loaded = _checked(graph, overrides, as_json=as_json, no_pass=no_pass)
    if stage:
        click.echo(_stage(_graph(loaded), stage, no_pass, as_json), nl=as_json)
    elif place:
        from flowgraph.report import placement as placing

        found = placing.placement(_graph(loaded), api.passes_off(no_pass))
        click.echo(placing.to_json(found) if as_json else placing.render(found), nl=as_json)
    else:
        from flowgraph.report import explain as explaining

        made = api.explain(loaded, no_pass=no_pass)
        click.echo(explaining.to_json(made) if as_json else explaining.render(made, _width()), nl=as_json)


def _stage(graph: Graph, stage: str, no_pass: tuple[str, ...], as_json: bool) -> str | bytes:
    """The graph as written, or after the passes, or the plan; as JSON always the plan of that stage."""
    off = list(PASSES) if stage == "source" else api.passes_off(no_pass)
    if as_json:
        return to_json(compile_graph(graph, off=off))
    return plan_text(compile_graph(graph, off=off)) if stage == "lowered" else graph_text(rewrite(graph, off))


def _page(code: str) -> str:
    from flowgraph.spec.codes import CODES, page
    from flowgraph.spec.reader import near

    if code not in CODES:
        raise click.UsageError(f"there is no code {code}; {near(code, CODES)}codes: {', '.join(CODES)}")
    return page(code)


@main.command()
@click.argument("graphs", nargs=-1, required=True, metavar="BEFORE AFTER")
@click.option("--rev", metavar="REV", help="Compare one graph with itself at this git revision.")
@JSON
def diff(graphs: tuple[str, ...], rev: str | None, as_json: bool) -> None:
    """Print what differs between two graphs: hops, ports, bytes of seams, memory of owners, budgets.

    A graph is a file, or REV:PATH for one at a git revision: `diff HEAD~1:graphs/x.yaml graphs/x.yaml` says the same as
    `diff --rev HEAD~1 graphs/x.yaml`. Only the graph is that of the revision; its hops are those of the working tree.

    Exit code 1 when a budget got worse (more is spent, or it is raised or gone) or a graph has findings.
    """
    from flowgraph.report.diff import to_json as as_text

    if rev is not None and len(graphs) == 1:
        graphs = (at_revision(rev, graphs[0]), graphs[0])
    elif rev is not None or len(graphs) != 2:
        raise click.UsageError("give two graphs, or one and --rev")
    before, after = (api.load(name) for name in graphs)
    _findings(before, after, as_json=as_json)
    difference = api.diff(before, after)
    click.echo(as_text(difference) if as_json else f"{graphs[0]} → {graphs[1]}\n\n{difference}", nl=as_json)
    raise SystemExit(FINDINGS if difference.worse else 0)


@main.command()
@GRAPH
@SET
@NO_PASS
@click.option(
    "--executor", type=click.Choice(["processes", "inproc"]), default="processes", show_default=True
)
@click.option("--steps", type=int, help="Short for --set run.steps=N.")
@click.option(
    "--runs",
    type=click.Path(file_okay=False),
    default="runs",
    show_default=True,
    help="Where run directories go.",
)
@click.option(
    "--verify", is_flag=True, help="Check every promise and every hop's purity while it runs; slower."
)
@click.option("--live/--plain", default=None, help="A live table or plain lines; default: by the terminal.")
def run(
    graph: str,
    overrides: tuple[str, ...],
    executor: Literal["processes", "inproc"],
    steps: int | None,
    runs: str,
    live: bool | None,
    no_pass: tuple[str, ...],
    verify: bool,
) -> None:
    """Run GRAPH to its last step. Everything about the run goes to RUNS/<graph>/<id>/."""
    more = () if steps is None else (f"run.steps={steps}",)
    loaded = _checked(graph, (*overrides, *more), no_pass=no_pass)
    try:
        done = api.run(loaded, executor=executor, runs=runs, live=live, no_pass=no_pass, verify=verify)
    except KeyboardInterrupt:
        click.echo("interrupted; the workers are gone and the metrics are written", err=True)
        raise SystemExit(INTERRUPTED) from None
    click.echo(f"{done.steps} steps in {done.seconds:.0f} s; everything is in {done.directory}")


@main.command()
def schema() -> None:
    """Print the JSON Schema of a graph file, so that an editor completes it.

    Write it to a file, and name that in the first line of a graph:

    \b
    # yaml-language-server: $schema=graph.schema.json
    """
    from flowgraph.spec.schema import graph_schema

    click.echo(json.dumps(graph_schema(), indent=1, ensure_ascii=False))


@main.command()
@click.argument("model")
def pull(model: str) -> None:
    """Fetch MODEL (smollm2-135m, a directory or a hub id) and print where it lies."""
    from flowgraph.models import ensure

    done = ensure(model)
    click.echo(f"{done.path}\n  source {done.source}\n  sha256 {done.sha256}")


@main.command()
@click.argument("file", type=click.Path(dir_okay=False), default="graph.yaml")
def init(file: str) -> None:
    """Write a starter graph to FILE (default graph.yaml)."""
    path = Path(file)
    if path.exists():
        raise click.UsageError(f"{file} exists; give another name")
    starter = Path(__file__).parent / "starter.yaml"
    _write(path, starter.read_text(encoding="utf-8"))
    click.echo(
        f"wrote {file}; try: flowgraph check {file}; flowgraph draw {file} -o ring.svg; flowgraph run {file}"
    )


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise click.UsageError(f"can't write {path}: {error.strerror}") from None


if __name__ == "__main__":
    main()
