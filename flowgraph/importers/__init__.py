"""Graphs of what other systems ship, written from their own options: the system that people have, ready to audit."""

from flowgraph.importers.result import Imported
from flowgraph.importers.slime import import_slime
from flowgraph.importers.verl import import_verl

__all__ = ["Imported", "import_slime", "import_verl"]
