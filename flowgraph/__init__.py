"""flowgraph: a compiler and runtime for the asynchronous reinforcement-learning ring of language models.

These names are the whole public surface: what a hop's signature needs, and the errors. Importing them imports
no torch.
"""

from flowgraph.engines.protocol import Engine, Generation, Sampling
from flowgraph.errors import CheckError, Diagnostic, FlowgraphError, ModelError, RunError
from flowgraph.learners.protocol import Learner, TokenLoss
from flowgraph.learners.protocol import Rows as TrainRows
from flowgraph.models.tokenizer import Tokenizer
from flowgraph.spec.hop import effect, fold, hop
from flowgraph.spec.types import (
    Array,
    Below,
    Derivable,
    Dim,
    Dropped,
    Event,
    Json,
    LastToken,
    Latest,
    Mask,
    Row,
    Rows,
    Run,
    Scalars,
    Seam,
    Shared,
    Tensors,
    Text,
    TiledOver,
)

__all__ = [
    "Array",
    "Below",
    "CheckError",
    "Derivable",
    "Diagnostic",
    "Dim",
    "Dropped",
    "Engine",
    "Event",
    "FlowgraphError",
    "Generation",
    "Json",
    "LastToken",
    "Latest",
    "Learner",
    "Mask",
    "ModelError",
    "Row",
    "Rows",
    "Run",
    "RunError",
    "Sampling",
    "Scalars",
    "Seam",
    "Shared",
    "Tensors",
    "Text",
    "TiledOver",
    "TokenLoss",
    "Tokenizer",
    "TrainRows",
    "effect",
    "fold",
    "hop",
]
