"""doctor: what this machine, or an environment of SGLang, has of what is needed, and what to do about the rest."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Literal

import click

from flowgraph.cli.shared import JSON, color, fail_at_the_end, width

if TYPE_CHECKING:
    from flowgraph.report.doctor import Report


@click.group(invoke_without_command=True)
@JSON
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Check this machine: versions, cores, memory, shared memory, files, ports, CUDA, disk, and what each affects.

    Exit code 1 when something fails; a warning is no failure.
    """
    if context.invoked_subcommand is None:
        from flowgraph.report.doctor import check_machine

        _show(check_machine(), as_json)
    elif as_json:
        raise click.UsageError(f"give --json behind {context.invoked_subcommand}")


@doctor.command()
@click.option(
    "--python", default=sys.executable, metavar="PATH", help="The server's interpreter; default: this one."
)
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), help="Default: cuda where its driver is loaded."
)
@JSON
def sglang(python: str, device: Literal["cpu", "cuda"] | None, as_json: bool) -> None:
    """Check an environment of SGLang, step by step as it is installed, each with the command that makes it hold.

    When every step holds, what a server imports is imported, which takes some seconds.
    """
    from flowgraph.engines.sglang_recipe import driver
    from flowgraph.report.doctor import check_sglang

    _show(check_sglang(python, device or ("cuda" if driver().status == "ok" else "cpu")), as_json)


def _show(report: Report, as_json: bool) -> None:
    from flowgraph.report import doctor as doctoring

    text = doctoring.to_json(report) if as_json else doctoring.render(report, width(), color=color())
    click.echo(text, nl=as_json)
    if report.failed:
        fail_at_the_end()
