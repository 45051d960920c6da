"""Commands that say something of a graph and change nothing."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import click

from flowgraph import api
from flowgraph.cli.shared import (
    FINDINGS,
    GRAPH,
    JSON,
    MODEL,
    NO_PASS,
    SET,
    checked,
    color,
    fail_at_the_end,
    graph_of,
    print_findings,
    refuse_resized,
    show_findings,
    width,
    write_file,
)
from flowgraph.ir.graph import Graph
from flowgraph.ir.text import graph_text
from flowgraph.passes.ranks import priced_only
from flowgraph.passes.rates import rates
from flowgraph.passes.rewrite import PASSES, rewrite
from flowgraph.plan.compile import compile_graph
from flowgraph.plan.plan import to_json
from flowgraph.plan.text import plan_text
from flowgraph.report.draw import Format
from flowgraph.spec.revision import at_revision

SUFFIXES = {".svg": "svg", ".png": "png", ".html": "html", ".mmd": "mermaid", ".dot": "dot", ".txt": "table"}


@click.command()
@GRAPH
@SET
@MODEL
@NO_PASS
@click.option("--state", "with_state", is_flag=True, help="List every state, and what it takes to keep it.")
@JSON
def check(
    graph: str, overrides: tuple[str, ...], no_pass: tuple[str, ...], with_state: bool, as_json: bool
) -> None:
    """Check every seam of GRAPH before anything runs. Exit code 1 when there are findings."""
    loaded = checked(graph, overrides, as_json=as_json, no_pass=no_pass, report=with_state)
    if with_state:
        from flowgraph.report import census as counting

        found = counting.census(api.compile(loaded, no_pass=no_pass))
        click.echo(counting.to_json(found) if as_json else counting.render_table(found, width()), nl=as_json)
        return
    seams = sum(len({b.via for b in node.bindings}) for node in graph_of(loaded).nodes.values())
    if as_json:
        click.echo(json.dumps({"diagnostics": []}))
    else:
        from flowgraph.passes.staleness import staleness

        lag = staleness(graph_of(loaded))
        proved = f"; lag at most {lag.bound}" if lag is not None else ""
        proved += f" ({lag.parts})" if lag is not None and lag.bound else ""
        priced = f"; priced only: {', '.join(names)}" if (names := priced_only(graph_of(loaded))) else ""
        click.echo(f"{graph}: {len(graph_of(loaded).nodes)} hops, {seams} seams, no findings{proved}{priced}")


@click.command()
@click.argument("graph", metavar="GRAPH|CODE")
@SET
@MODEL
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
    if re.fullmatch(r"[Ff][Gg]\d\w*", graph):
        _explain_code(graph.upper(), as_json)
        return
    if stage and place:
        raise click.UsageError("give --stage or --place")
    loaded = checked(graph, overrides, as_json=as_json, no_pass=no_pass, report=True, fails=False)
    if stage:
        click.echo(_stage(graph_of(loaded), stage, no_pass, as_json), nl=as_json)
    elif place:
        from flowgraph.report import placement as placing

        found = placing.placement(graph_of(loaded), api.passes_off(no_pass))
        click.echo(placing.to_json(found) if as_json else placing.render(found), nl=as_json)
    else:
        from flowgraph.report import explain as explaining

        made = api.explain(loaded, no_pass=no_pass)
        click.echo(explaining.to_json(made) if as_json else explaining.render(made, width()), nl=as_json)


def _stage(graph: Graph, stage: str, no_pass: tuple[str, ...], as_json: bool) -> str | bytes:
    """The graph as written, or after the passes, or the plan; as JSON always the plan of that stage."""
    off = list(PASSES) if stage == "source" else api.passes_off(no_pass)
    if as_json:
        return to_json(compile_graph(graph, off=off))
    if stage == "lowered":
        return plan_text(compile_graph(graph, off=off))
    after = rewrite(graph, off)
    return graph_text(after, rates(after))


def _explain_code(code: str, as_json: bool) -> None:
    from flowgraph.spec.codes import CODES, page
    from flowgraph.spec.reader import near

    if code not in CODES:
        raise click.UsageError(f"there is no code {code}; {near(code, CODES)}codes: {', '.join(CODES)}")
    if as_json:
        found = {"code": code, "title": CODES[code], "page": page(code)}
        click.echo(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        _show(page(code))


def _show(text: str) -> None:
    """Markdown: set for reading on a terminal, as it is for anything else."""
    if not sys.stdout.isatty():
        click.echo(text, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text, code_theme="ansi_dark"))  # in the colours of the terminal


@click.command()
@GRAPH
@SET
@MODEL
@NO_PASS
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), help="The file; its suffix says what is drawn."
)
@click.option(
    "--format", "kind", type=click.Choice([*SUFFIXES.values()]), help="What to draw; default: by the suffix."
)
@click.option(
    "--run", "run_dir", type=click.Path(exists=True, file_okay=False), help="Show what this run measured too."
)
def draw(
    graph: str,
    overrides: tuple[str, ...],
    no_pass: tuple[str, ...],
    output: str | None,
    kind: str | None,
    run_dir: str | None,
) -> None:
    """Draw GRAPH: every hop with its owner, every seam with shape, bytes and lifetime.

    FILE.svg, .png, .html for a page with tables and toggles, .mmd for Mermaid, .dot for Graphviz, .txt for a plain
    table. Without -o, or with `-o -`, a table goes to stdout, or what --format says.
    """
    to_file = output not in (None, "-")
    if to_file and kind is None and Path(output or "").suffix.lower() not in SUFFIXES:
        raise click.UsageError(f"{output!r} is none of {', '.join(SUFFIXES)}; name it so, or give --format")
    kind = kind or (SUFFIXES[Path(output or "").suffix.lower()] if to_file else "table")
    if run_dir:
        refuse_resized(overrides, no_pass)
    loaded = checked(graph, overrides, no_pass=no_pass, report=True, fails=False)
    format: Format = "svg" if kind == "png" else kind  # type: ignore[assignment]  # one of SUFFIXES
    try:
        made = api.draw(loaded, format, measured=run_dir, no_pass=no_pass)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    content = made.png() if kind == "png" else made
    if output is not None and to_file:
        write_file(Path(output), content)
        click.echo(f"wrote {output}")
    else:
        click.echo(content, nl=False)


@click.command()
@GRAPH
@SET
@MODEL
@NO_PASS
@click.option("--naive", is_flag=True, help="What a single controller would carry of every field, beside it.")
@click.option(
    "--run",
    "run_dir",
    type=click.Path(exists=True, file_okay=False),
    help="Put what this run measured beside it; the plan that ran is priced.",
)
@JSON
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, a row a field.")
@click.option(
    "--fail-over",
    is_flag=True,
    help="Exit code 1 when a budget is exceeded; with --run also by what it measured.",
)
def audit(
    graph: str,
    overrides: tuple[str, ...],
    no_pass: tuple[str, ...],
    naive: bool,
    run_dir: str | None,
    as_json: bool,
    as_csv: bool,
    fail_over: bool,
) -> None:
    """Price every seam of GRAPH in bytes a step, largest first.

    A budget may be given here as well: --set 'budgets.driver=16 KB/step'.
    """
    from flowgraph.report import audit as auditing

    if as_json + as_csv + naive > 1:
        raise click.UsageError(
            "give one of --naive, --json and --csv; the last two hold all that --naive shows"
        )
    if run_dir:
        refuse_resized(overrides, no_pass)
    loaded = checked(graph, overrides, as_json=as_json, no_pass=no_pass, report=True, fails=fail_over)
    try:
        result = api.audit(loaded, run_dir, no_pass=no_pass)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if as_json or as_csv:
        click.echo(auditing.to_json(result) if as_json else auditing.to_csv(result), nl=as_json)
    elif naive and result.naive is None:
        raise click.UsageError(
            f"the hops of {run_dir} have changed since it ran, so what would be carried is not known; "
            f"give --naive without --run"
        )
    else:
        text = auditing.render_naive if naive else auditing.render_table
        click.echo(text(result, width(), color=color()), nl=False)
    budgets = graph_of(loaded).file.budgets
    if fail_over and not budgets:
        click.echo(f"{graph} has no budgets, so nothing can be over one", err=True)
    if fail_over and (found := list(auditing.measured_over(result, budgets))):
        print_findings(found, loaded.sources)
        fail_at_the_end()


@click.command()
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
    show_findings(before, after, as_json=as_json, report=True)
    difference = api.diff(before, after)
    click.echo(as_text(difference) if as_json else f"{graphs[0]} → {graphs[1]}\n\n{difference}", nl=as_json)
    if difference.worse:
        raise SystemExit(FINDINGS)


@click.command()
def schema() -> None:
    """Print the JSON Schema of a graph file, so that an editor completes it.

    Write it to a file, and name that in the first line of a graph:

    \b
    # yaml-language-server: $schema=graph.schema.json
    """
    from flowgraph.spec.schema import graph_schema

    click.echo(json.dumps(graph_schema(), indent=1, ensure_ascii=False))
