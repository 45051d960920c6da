"""Every error that flowgraph raises, and the form of a finding and of a check.

FlowgraphError
├── CheckError          a graph has findings; carries them all
├── ModelError          a model can't be found, fetched or read
├── Rejected            a trajectory came to nothing; the run goes on without it
└── RunError            a run failed; carries a code FG9xx
    ├── PayloadError    FG901  a payload breaks its port's type or bound
    ├── HopError        FG902  a hop raised
    ├── WorkerDied      FG903  a worker process ended
    ├── DeadlineError   FG904  a wait outlived its deadline
    ├── LedgerError     FG905  trajectories were lost or counted twice
    ├── PromiseBroken   FG906  a hop breaks a promise about the content of a column
    ├── HiddenState     FG907  a hop that declares no state keeps some
    ├── MemoryShort     FG908  the machine can't hold the arenas, or a copy of the weights
    └── EngineFailed    FG909  no replica of an engine can serve
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Place(msgspec.Struct, frozen=True, order=True):
    """A position in a text file; line and column count from 1; `width` characters are underlined."""

    file: str
    line: int
    column: int
    width: int = 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


class Note(msgspec.Struct, frozen=True):
    """A second place that a finding speaks of, with what is there."""

    place: Place
    text: str


class Diagnostic(msgspec.Struct, frozen=True):
    """One finding: a stable code, where, what, and one concrete fix."""

    code: str
    place: Place
    message: str
    help: str
    notes: tuple[Note, ...] = ()


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at on this machine, or in another interpreter.

    found: what is there; affects: what depends on it; fix: one command or change, wherever something is to be done
    """

    name: str
    status: Literal["ok", "warn", "fail", "skip"]
    found: str
    affects: str
    fix: str = ""


class FlowgraphError(Exception):
    """Base of all errors that flowgraph raises on purpose."""


class CheckError(FlowgraphError):
    """A graph has findings. `diagnostics` holds all of them, in file order. shown: its text, else a line each."""

    def __init__(self, diagnostics: list[Diagnostic], shown: str = "") -> None:
        self.diagnostics = sorted(diagnostics, key=lambda d: (d.place, d.code, d.message))
        brief = "\n".join(f"{d.place}: error[{d.code}] {d.message}" for d in self.diagnostics)
        super().__init__(shown or brief)


class ModelError(FlowgraphError):
    """A model can't be found, fetched or read. `help` names one fix."""

    def __init__(self, message: str, help: str = "") -> None:
        self.message, self.help = message, help
        super().__init__(message + (f"\n  help: {help}" if help else ""))


class Rejected(FlowgraphError):
    """Raised by a hop on a trajectory that came to nothing: an environment that hung, a request that was given up.

    The trajectory is dropped for `reason`, which is counted, so keep it short and the same for the same cause; the
    batch decides what becomes of its group. Every other exception ends the run.
    """

    def __init__(self, reason: str) -> None:
        if not reason.strip():
            raise ValueError("a trajectory is rejected for a reason, not for none")
        self.reason = " ".join(reason.split())[:80]  # it is counted by, and shown in a line
        super().__init__(reason)


class RunError(FlowgraphError):
    """A run failed. `code` is stable, `help` names one thing to do."""

    code = "FG900"

    def __init__(self, message: str, help: str = "") -> None:
        self.message, self.help = message, help
        super().__init__(f"error[{self.code}] {message}" + (f"\n  help: {help}" if help else ""))


class PayloadError(RunError):
    code = "FG901"


class HopError(RunError):
    code = "FG902"


class WorkerDied(RunError):
    code = "FG903"


class DeadlineError(RunError):
    code = "FG904"


class LedgerError(RunError):
    code = "FG905"


class PromiseBroken(RunError):
    """at: a dim of the column, and the place along it of the element at fault; member: whose that is, if known."""

    code = "FG906"
    at: tuple[str, int] | None = None
    member: int = -1


class HiddenState(RunError):
    code = "FG907"


class MemoryShort(RunError):
    code = "FG908"


class EngineFailed(RunError):
    code = "FG909"
