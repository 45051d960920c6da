"""A ring before it is rented: its own dispatch, buffer and batch under a virtual clock, with models of the rest."""
