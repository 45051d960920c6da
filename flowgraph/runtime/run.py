"""One run from a checked graph to a run directory: pull models, lower, start workers, turn the ring, save."""

from __future__ import annotations

import signal
import time
import traceback
import typing
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

from flowgraph.engines.registry import launched
from flowgraph.errors import FlowgraphError, ModelError
from flowgraph.ir.graph import Graph
from flowgraph.models import ModelDir, ensure
from flowgraph.plan.compile import compile_graph
from flowgraph.plan.plan import Plan
from flowgraph.runtime.executors import Executor, InProcess, Processes, refuse_processes, refuse_within_loop
from flowgraph.runtime.firing import error_of
from flowgraph.runtime.messages import Failed, Save, Saved
from flowgraph.runtime.ring import Ring
from flowgraph.runtime.rundir import RunDir
from flowgraph.runtime.seats import of_owner
from flowgraph.runtime.shares import idle
from flowgraph.runtime.transport import arenas
from flowgraph.runtime.view import View, make_view
from flowgraph.spec.units import counted

ExecutorName = Literal["processes", "inproc"]
EXECUTORS: tuple[str, ...] = typing.get_args(ExecutorName)


class Outcome(msgspec.Struct, frozen=True):
    """Where a run's files are, and how many steps it made.

    idle: owner → share of the time without work that it might do; lags: lag → trajectories trained on
    """

    directory: str
    steps: int
    seconds: float
    idle: dict[str, float] = {}
    lags: dict[int, int] = {}


class _Observer:
    """Each record goes to metrics.jsonl first, then to the eye."""

    def __init__(self, run_dir: RunDir, view: View) -> None:
        self.run_dir, self.view = run_dir, view

    def step(self, record: dict[str, Any]) -> None:
        self.run_dir.line(record)
        self.view.step(record)

    def event(self, record: dict[str, Any]) -> None:
        self.run_dir.line(record)
        self.view.event(record)


def run_graph(
    graph: Graph,
    resolved: dict[str, Any],
    *,
    executor: ExecutorName = "processes",
    runs: str = "runs",
    live: bool | None = None,
    diagram: Callable[[Plan], str] | None = None,
    off: Collection[str] = (),
    verify: bool = False,
) -> Outcome:
    """Run a graph without findings. `resolved`: its file's content with overrides applied, for the run directory.
    off: passes to leave out; verify: check every promise and every hop's purity while it runs, which is slower.

    Raises RunError by name, ModelError, or KeyboardInterrupt (Ctrl-C or SIGTERM); in every case the workers are gone,
    shared memory is freed, and what was measured is written.
    """
    models = {name: ensure(name) for name in dict.fromkeys(o.model for o in graph.owners.values() if o.model)}
    _check_lock(graph, models)
    plan = compile_graph(graph, off=off, verify=verify)
    resolved["models"] = {name: {"source": m.source, "sha256": m.sha256} for name, m in models.items()}
    began = time.monotonic()
    if executor == "inproc":
        refuse_within_loop()
        refuse_processes(plan)
    with _sigterm_as_interrupt(), arenas(plan, alone=executor == "inproc") as memory:
        run_dir = RunDir(Path(runs), plan.graph)
        run_dir.graph(resolved, plan)
        if diagram is not None:
            run_dir.diagram(diagram(plan))
        workers: Executor = InProcess(run_dir.logs) if executor == "inproc" else Processes(run_dir.logs)
        view = make_view(plan, live=live)
        paths = {name: m.path for name, m in models.items()}
        ring = Ring(plan, workers, paths, memory, _Observer(run_dir, view))
        # Servers that are killed with their worker leave what they had in /dev/shm; a worker that is asked removes it.
        served = any(o.engine is not None and launched(o.engine) for o in plan.owners.values())
        status, error, grace = "failed", "", 5.0 if served else 0.0
        try:
            view.note(f"{plan.graph}: {counted(plan.run.steps, 'step')}, {executor}, in {run_dir.path}")
            workers.start(plan, paths, memory)
            ring.start()
            ring.run()
            _save(plan, workers, str(run_dir.path / "model"))
            status, grace = "finished", 10.0
            if ring.steps_done < plan.run.steps:
                status = "exhausted"
                view.note(
                    f"the dataset ended after step {ring.steps_done} of {plan.run.steps}; the model is saved"
                )
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        except Exception as problem:
            error = (
                str(problem)
                if isinstance(problem, FlowgraphError)
                else f"{type(problem).__name__}: {problem}"
            )
            run_dir.error("\n".join([error, *getattr(problem, "__notes__", [traceback.format_exc()])]))
            raise
        finally:
            workers.stop(grace)
            view.close()
            seconds = time.monotonic() - began
            run_dir.seams(ring.meter.measured(ring.steps_done, workers.control_bytes))
            measured = ring.meter.run(ring)
            run_dir.summary(status, ring.steps_done, seconds, ring.ledger.counts, measured, error)
            run_dir.close()
    return Outcome(str(run_dir.path), ring.steps_done, seconds, idle(measured["shares"]), measured["lags"])


def _save(plan: Plan, workers: Executor, directory: str) -> None:
    """Have every learner that trains write its model, a policy first, each other one beside it.

    All processes of an owner take part.
    """
    learners = {name: spec.learner for name, spec in plan.owners.items() if spec.learner is not None}
    trained = {name: options for name, options in learners.items() if not options.frozen}
    owners = sorted(trained, key=lambda name: trained[name].head == "value")
    for owner in owners:
        waiting = set(of_owner(plan, owner))
        for name in waiting:
            workers.send(name, Save(directory if owner == owners[0] else f"{directory}-{owner}"))
        while waiting:
            for name, message in workers.wait(plan.run.deadline):
                # What else comes is of firings that no step waits for any more.
                if isinstance(message, Failed) and message.id < 0:
                    raise error_of(message)
                waiting -= {name} if isinstance(message, Saved) else set()


def _check_lock(graph: Graph, models: dict[str, ModelDir]) -> None:
    for name, lock in graph.file.models.items():
        if name in models and models[name].sha256 != lock.sha256:
            raise ModelError(
                f"{name} has sha256 {models[name].sha256}, and the graph insists on {lock.sha256}",
                f"fetch {lock.source}, or remove {name} under models:",
            )


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does. Only the main thread may set a handler; elsewhere signals stay as they are."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
