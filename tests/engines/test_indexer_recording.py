"""The embedded engine records the positions that each token attended to, in a model with indexers; see also
test_expert_recording.py. Oracles are one forward of plain transformers, and the engine with one request alone.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asking import Ask, alone, engine_of, neighbours, same_bits, together
from transformers import AutoModelForCausalLM

from flowgraph.engines.embedded import embedded_fleet
from flowgraph.engines.protocol import Generation
from flowgraph.engines.registry import TransformersOptions
from flowgraph.engines.served.serve import _positions
from flowgraph.engines.served.side import channels, indexed
from flowgraph.engines.transformers import TransformersEngine
from flowgraph.models import ensure, facts
from flowgraph.models.positions import Positions
from flowgraph.models.quiet import no_progress_bar
from hops.replay import rollout_indexed

RECORD: dict[str, Any] = {"record": ("routed_experts", "indexer_topk")}
SUBJECT = Ask([9, 8, 7, 6, 5], 20, key=42, **RECORD)
LAYERS, K = 4, 8


@pytest.fixture(scope="module")
def model() -> Path:
    return Path(ensure("tiny-dsa", progress=False).path)


@pytest.fixture(scope="module")
def engine(model: Path) -> TransformersEngine:
    return engine_of(model)


def attended(model: Path, tokens: list[int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """i64[tokens, layers, k], own positions in place of those behind; and the log-probability of each token but one."""
    with no_progress_bar():
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad(), Positions(plain).capture() as found:
        logits = plain(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    scores = logits[:-1].log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()
    return np.minimum(found.indices.numpy(), np.arange(len(tokens))[:, None, None]), scores


def tokens_of(ask: Ask, out: Generation) -> list[int]:
    return [*ask.prompt.tolist(), *out.ids.tolist()]


def test_what_is_recorded_is_what_transformers_attends_to(model: Path, engine: TransformersEngine) -> None:
    asks = [Ask(range(3 + 5 * i, 4 + 9 * i), 20, key=i, **RECORD) for i in range(1, 4)]
    for ask, out in zip(asks, together(engine, asks), strict=True):
        tokens, side = tokens_of(ask, out), out.side["indexer_topk"]
        wanted, scores = attended(model, tokens)
        assert side.values.dtype == np.uint8  # of a context of 40
        assert side.shape == (len(tokens), LAYERS, K)
        assert side.recorded.tolist() == [True] * (len(tokens) - 1) + [False]
        for t in range(len(tokens) - 1):
            for layer in range(LAYERS):
                assert set(side.values[t, layer].tolist()) == set(wanted[t, layer].tolist())
        np.testing.assert_allclose(out.logprobs, scores[len(ask.prompt) - 1 :], atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_its_bits_depend_on_no_neighbour_and_on_no_recording(model: Path, dtype: str) -> None:
    engine = engine_of(model, dtype=dtype)
    by_itself = alone(engine, SUBJECT)
    same_bits(
        together(engine, [*neighbours(5, seed=1), SUBJECT, *neighbours(3, seed=2, **RECORD)])[5], by_itself
    )
    plain = alone(engine, Ask(SUBJECT.prompt, 20, key=42))
    assert not plain.side
    assert plain.logprobs.tobytes() == by_itself.logprobs.tobytes()


def test_a_retracted_request_keeps_what_it_had_recorded(engine: TransformersEngine) -> None:
    async def main() -> Generation:
        task = asyncio.ensure_future(SUBJECT.of(engine))
        for _ in range(6):
            await asyncio.sleep(0)
        engine.pause("retract")
        engine.proceed()
        return await task

    out, straight = asyncio.run(main()), alone(engine, SUBJECT)
    assert out.retractions == 1
    assert out.ids.tolist() == straight.ids.tolist()
    for name, side in out.side.items():
        np.testing.assert_array_equal(side.recorded, straight.side[name].recorded)
        np.testing.assert_array_equal(np.sort(side.values), np.sort(straight.side[name].values))


def test_a_server_sends_positions_as_sglang_does(engine: TransformersEngine) -> None:
    """Rows that are not full have -1, and are filled up again where they are read."""
    side = alone(engine, SUBJECT).side["indexer_topk"]
    sent = _positions(side.values[:-1].astype("<i4"))
    assert [int((row[0] >= 0).sum()) for row in sent] == [min(K, t + 1) for t in range(len(sent))]
    model = facts("tiny-dsa")
    assert model is not None
    read = indexed(sent.tobytes(), channels(model), rid="r", tokens=len(side.recorded))
    np.testing.assert_array_equal(read.recorded, side.recorded)
    np.testing.assert_array_equal(np.sort(read.values[:-1]), np.sort(side.values[:-1]))


def test_a_rollout_gives_both_channels(model: Path, engine: TransformersEngine) -> None:
    async def run() -> Any:
        options = TransformersOptions(model="tiny-dsa", slots=4, dtype="float32")
        fleet = await embedded_fleet(options, str(model), context=40, threads=1)
        try:
            return await rollout_indexed(
                SUBJECT.prompt, np.array(42, np.uint64), engine=fleet, max_new_tokens=20, layers=LAYERS, top_k=2,
                index_top_k=K,
            )  # fmt: skip
        finally:
            await fleet.close()

    made, out = asyncio.run(run()), alone(engine, SUBJECT)
    assert made.tokens.tolist() == tokens_of(SUBJECT, out)
    np.testing.assert_array_equal(made.indexer_topk, out.side["indexer_topk"].values)
    np.testing.assert_array_equal(made.routed_experts, out.side["routed_experts"].values)
    np.testing.assert_array_equal(made.recorded, out.side["indexer_topk"].recorded)
