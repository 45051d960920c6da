"""flowgraph: a compiler and runtime for the asynchronous reinforcement-learning ring of language models.

These names are the whole public surface: what a hop's signature needs, the errors, and the library, which is imported
when it is first used: a hop's own import stays light. Importing any of them imports no torch.
"""

from typing import TYPE_CHECKING

from flowgraph.engines.protocol import (
    Engine,
    EngineLoad,
    Generation,
    PauseMode,
    Sampling,
    Side,
    SideChannel,
    Synced,
)
from flowgraph.errors import CheckError, Diagnostic, FlowgraphError, ModelError, Rejected, RunError
from flowgraph.learners.protocol import (
    Aggregation,
    Critic,
    Learner,
    Losses,
    TokenLoss,
    Tokens,
    check_aggregation,
    token_loss,
)
from flowgraph.learners.protocol import Rows as TrainRows
from flowgraph.models.tokenizer import Tokenizer
from flowgraph.spec.hop import effect, fold, hop
from flowgraph.spec.outputs import outputs
from flowgraph.spec.types import (
    Array,
    Backlog,
    Below,
    Credit,
    Derivable,
    Dim,
    Dropped,
    Event,
    Held,
    Json,
    LastToken,
    Latest,
    Mask,
    Room,
    Row,
    Rows,
    Run,
    Scalars,
    Seam,
    Shared,
    Short,
    Tensors,
    Text,
    TiledOver,
    Version,
)

# Name → the module that has it.
_LIBRARY = {
    "Audit": "flowgraph.report.audit",
    "Diagram": "flowgraph.report.draw",
    "Difference": "flowgraph.report.diff",
    "Explanation": "flowgraph.report.explain",
    "Graph": "flowgraph.ir.graph",
    "Loaded": "flowgraph.passes.pipeline",
    "Measured": "flowgraph.plan.measured",
    "Outcome": "flowgraph.runtime.run",
    "Plan": "flowgraph.plan.plan",
    "Simulated": "flowgraph.simulator.outcome",
    "audit": "flowgraph.api",
    "compile": "flowgraph.api",
    "diff": "flowgraph.api",
    "draw": "flowgraph.api",
    "explain": "flowgraph.api",
    "load": "flowgraph.api",
    "run": "flowgraph.api",
    "simulate": "flowgraph.api",
}

if TYPE_CHECKING:
    from flowgraph.api import audit, compile, diff, draw, explain, load, run, simulate
    from flowgraph.ir.graph import Graph
    from flowgraph.passes.pipeline import Loaded
    from flowgraph.plan.measured import Measured
    from flowgraph.plan.plan import Plan
    from flowgraph.report.audit import Audit
    from flowgraph.report.diff import Difference
    from flowgraph.report.draw import Diagram
    from flowgraph.report.explain import Explanation
    from flowgraph.runtime.run import Outcome
    from flowgraph.simulator.outcome import Simulated
else:

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name not in _LIBRARY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_LIBRARY[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "Aggregation",
    "Array",
    "Audit",
    "Backlog",
    "Below",
    "CheckError",
    "Credit",
    "Critic",
    "Derivable",
    "Diagnostic",
    "Diagram",
    "Difference",
    "Dim",
    "Dropped",
    "Engine",
    "EngineLoad",
    "Event",
    "Explanation",
    "FlowgraphError",
    "Generation",
    "Graph",
    "Held",
    "Json",
    "LastToken",
    "Latest",
    "Learner",
    "Loaded",
    "Losses",
    "Mask",
    "Measured",
    "ModelError",
    "Outcome",
    "PauseMode",
    "Plan",
    "Rejected",
    "Room",
    "Row",
    "Rows",
    "Run",
    "RunError",
    "Sampling",
    "Scalars",
    "Seam",
    "Shared",
    "Short",
    "Side",
    "SideChannel",
    "Simulated",
    "Synced",
    "Tensors",
    "Text",
    "TiledOver",
    "TokenLoss",
    "Tokenizer",
    "Tokens",
    "TrainRows",
    "Version",
    "audit",
    "check_aggregation",
    "compile",
    "diff",
    "draw",
    "effect",
    "explain",
    "fold",
    "hop",
    "load",
    "outputs",
    "run",
    "simulate",
    "token_loss",
]
