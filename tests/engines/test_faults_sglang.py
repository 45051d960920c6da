"""The fault matrix on a real SGLang server. On a CPU it frees no memory, so release and resume are never sent to it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from faults import KINDS, PROBE, Faulty
from proxy import Moment
from served_model import ServedModel

from flowgraph.engines.protocol import PauseMode
from flowgraph.engines.registry import SglangOptions

SECONDS = 480.0  # of a sync in which a server is started
PYTHON = os.environ.get("FLOWGRAPH_SGLANG_PYTHON")
CUTS: list[tuple[str, Moment, PauseMode]] = [
    ("pause", "before", "retract"),
    ("pause", "after", "retract"),
    ("update", "before", "retract"),
    ("update", "inside", "retract"),
    ("update", "after", "retract"),
    ("continue", "before", "retract"),
    ("continue", "after", "retract"),
    ("pause", "after", "abort"),
    ("update", "inside", "abort"),
    ("continue", "after", "abort"),
    ("update", "inside", "in_place"),
    ("continue", "after", "in_place"),
]
KILLS: list[tuple[str, Moment]] = [
    ("pause", "before"),
    ("update", "before"),
    ("update", "inside"),
    ("update", "after"),
    ("continue", "before"),
]

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def one(served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    options = SglangOptions(
        str(served_model.directory),
        slots=4,
        dtype="float32",
        device="cpu",
        python=PYTHON,
        weights="disk",
        kv_tokens=4096,
    )
    reference = {kind: served_model.logprobs(kind, PROBE) for kind in KINDS}
    one = Faulty(options, served_model, tmp_path_factory.mktemp("logs"), reference, bits=False)
    yield one
    one.close()


@pytest.mark.parametrize(("action", "moment", "pause"), CUTS)
def test_the_connection_is_cut(one: Faulty, action: str, moment: Moment, pause: PauseMode) -> None:
    one.play("cut", action, moment, pause)


@pytest.mark.slow
@pytest.mark.parametrize(("action", "moment"), KILLS)
def test_the_server_is_killed(one: Faulty, action: str, moment: Moment) -> None:
    one.play("killed", action, moment, "retract", SECONDS)
