"""What a run measured, under the name by which the audit speaks of it."""

from flowgraph.plan.measured import Measured

__all__ = ["Measured"]
