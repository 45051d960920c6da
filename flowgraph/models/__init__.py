"""Models: what a name means, fetching and converting, facts for prices, and the tokenizer. No torch anywhere.

Who uses what: the compiler `resolve` and `facts`; engines, learners and `flowgraph pull` `ensure`; hops and
engines `Tokenizer`.
"""

from flowgraph.models.facts import ModelFacts, TensorFact, facts
from flowgraph.models.pull import ModelDir, ensure
from flowgraph.models.sources import ModelSource, resolve
from flowgraph.models.tokenizer import Tokenizer

__all__ = ["ModelDir", "ModelFacts", "ModelSource", "TensorFact", "Tokenizer", "ensure", "facts", "resolve"]
