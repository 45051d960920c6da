"""A server process of ours: what it is started with, and how it comes back."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from running import Running
from served_model import ServedModel

from flowgraph.engines.registry import TransformersOptions
from flowgraph.engines.served.process import ServerProcess


def test_a_server_has_the_variables_that_it_was_given_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = dict(os.environ)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    says = "import os; print(os.environ.get('SGLANG_USE_CPU_ENGINE'))"
    process = ServerProcess(sys.executable, lambda port: ["-c", says], variables=given, log=tmp_path / "log")
    process.launch()
    end = time.monotonic() + 30
    while process.alive():
        assert time.monotonic() < end
        time.sleep(0.01)
    process.end()
    assert (tmp_path / "log").read_text() == f"{given.get('SGLANG_USE_CPU_ENGINE')}\n"


def test_a_server_that_is_killed_before_the_first_sync_comes_back_in_another_dtype_than_that_of_its_files(
    served_model: ServedModel, tmp_path: Path
) -> None:
    options = TransformersOptions(str(served_model.directory), slots=2, dtype="bfloat16", processes=1)
    running = Running("killed", options, served_model, tmp_path)
    try:
        before = running.answer(range(9), 4, temperature=0)
        os.kill(running.processes()[0], signal.SIGKILL)
        after = running.answer(range(9), 4, temperature=0)
        assert set(after.versions.tolist()) == {0}
        np.testing.assert_array_equal(after.ids, before.ids)
    finally:
        running.close()
