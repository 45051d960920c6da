"""Contracts of other systems: what their rows carry, so that a graph can price a run of theirs."""
