"""Rows name the trajectories that they are leaves of, and a micro-batch holds whole trajectories."""

from __future__ import annotations

import numpy as np
import pytest

from flowgraph.learners.pack import check_rows
from tests.unit.packed import make_rows


def test_rows_name_their_trajectories_one_integer_each() -> None:
    rows = make_rows([[1, 2], [3, 4], [1, 2]], [[0, 1]] * 3)
    check_rows(rows._replace(trajectory=np.array([7, 7, -3])), vocabulary=10, context=4)
    for wrong in (np.array([1, 2]), np.array([[1, 2, 3]]), np.array([1.0, 2.0, 3.0])):
        with pytest.raises(ValueError, match=r"trajectory must be integers \[3\], one a row, not"):
            check_rows(rows._replace(trajectory=wrong), vocabulary=10, context=4)
