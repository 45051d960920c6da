"""The embedded engine records the experts of every token: which rows there are, and that nothing else changes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asking import SLOTS, Ask, alone, engine_of, is_idle, neighbours, same_bits, same_side, together, until
from experts import routing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowgraph.engines import routing as computed
from flowgraph.engines.protocol import Generation, Side
from flowgraph.engines.served.side import joined
from flowgraph.engines.transformers import TransformersEngine
from flowgraph.models import ensure, facts

RECORD: dict[str, Any] = {"record": ("routed_experts",)}
SUBJECT = Ask([9, 8, 7, 6, 5], 10, key=42, **RECORD)


@pytest.fixture(scope="module", params=["tiny-moe", "tiny-moe-300"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def directory(name: str) -> Path:
    return Path(ensure(name, progress=False).path)


@pytest.fixture(scope="module")
def engine(name: str) -> TransformersEngine:
    """In float32, where plain transformers chooses the same experts."""
    return engine_of(directory(name))


@pytest.fixture(scope="module")
def either(name: str) -> TransformersEngine:
    """One model in each dtype."""
    return engine_of(directory(name), dtype="bfloat16" if name == "tiny-moe" else "float32")


def side_of(out: Generation) -> Side:
    return out.side["routed_experts"]


def tokens_of(ask: Ask, out: Generation) -> list[int]:
    return [*ask.prompt.tolist(), *out.ids.tolist()]


def same_sets(side: Side, chosen: Any, rows: slice = slice(None)) -> None:
    """Recorded rows have the same experts as another forward chose, in every layer."""
    at = side.recorded & np.isin(np.arange(len(side.recorded)), np.arange(len(side.recorded))[rows])
    np.testing.assert_array_equal(np.sort(side.values, axis=2)[at], chosen[at])


# Which rows there are


def test_every_token_but_the_last_has_the_experts_of_every_layer(
    engine: TransformersEngine, name: str
) -> None:
    """X1, X5. More requests than slots, of which some share a prompt; at the end slots are free, and computed too."""
    known = facts(name)
    assert known is not None
    assert known.experts
    asks = [*neighbours(5, seed=1, **RECORD), *(Ask(SUBJECT.prompt, 6, key=k, **RECORD) for k in range(3))]
    for ask, out in zip(asks, together(engine, asks), strict=True):
        side, tokens = side_of(out), tokens_of(ask, out)
        assert side.values.dtype == (np.uint8 if name == "tiny-moe" else np.uint16)
        assert side.values.shape == (len(tokens), known.layers, known.top_k)
        assert side.recorded.tolist() == [True] * (len(tokens) - 1) + [False]
        assert side.values.max() < known.experts
        assert (np.diff(np.sort(side.values[:-1], axis=2), axis=2) > 0).all()
        same_sets(side, routing(directory(name), tokens))


def test_what_was_not_recorded_is_marked(engine: TransformersEngine) -> None:
    """X2. The last token, rows that whoever asks has already, and a request that came to no token."""
    whole = alone(engine, SUBJECT)
    assert not side_of(whole).values[-1].any()
    later = asyncio.run(engine.generate(SUBJECT.prompt, SUBJECT.sampling, key=42, rid="r", recorded=3))
    side = side_of(later)
    assert side.start == 0
    assert side.recorded.tolist() == [False] * 3 + [True] * (len(side.recorded) - 4) + [False]
    assert not side.values[~side.recorded].any()
    np.testing.assert_array_equal(side.values[3:], side_of(whole).values[3:])

    async def aborted() -> Generation:
        task = asyncio.ensure_future(SUBJECT.of(engine))
        await asyncio.sleep(0)
        engine.abort("r")
        return await task

    assert asyncio.run(aborted()).side == {}


@pytest.mark.parametrize("cut", [1, 4, 9])
def test_a_request_that_was_aborted_goes_on_and_adds_the_rows_that_it_lacks(
    engine: TransformersEngine, cut: int
) -> None:
    """X3. The parts are the whole, bit for bit."""
    whole = alone(engine, SUBJECT)
    first = alone(engine, Ask(SUBJECT.prompt, cut, key=42, **RECORD))
    prompt = np.concatenate([SUBJECT.prompt, first.ids])
    rest = Ask(prompt, 10 - cut, **RECORD)
    known = side_of(first).start
    assert known == len(prompt) - 1
    more = asyncio.run(engine.generate(prompt, rest.sampling, key=42, rid="r", drawn=cut, recorded=known))
    assert [*first.ids, *more.ids] == whole.ids.tolist()
    same_side(joined(side_of(first), side_of(more), rid="r"), side_of(whole))


def test_a_second_turn_begins_where_the_first_ended(engine: TransformersEngine, name: str) -> None:
    """X3, multi-turn: what an observation added is recorded with the second turn."""
    first = alone(engine, SUBJECT)
    prompt = [*tokens_of(SUBJECT, first), 11, 12, 13]
    ask = Ask(prompt, 6, key=7, **RECORD)
    second = asyncio.run(
        engine.generate(ask.prompt, ask.sampling, key=7, rid="r", recorded=side_of(first).start)
    )
    both = joined(side_of(first), side_of(second), rid="r")
    assert both.recorded.tolist() == [True] * (len(prompt) + 5) + [False]
    same_sets(both, routing(directory(name), tokens_of(ask, second)))


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_rows_are_those_of_the_weights_that_each_token_was_sampled_under(name: str, pause: Any) -> None:
    """X3. After a retraction all tokens are computed anew, and what was recorded stays."""
    engine = engine_of(directory(name))
    old = alone(engine, SUBJECT)
    changed = {n: t + 0.1 * torch.randn_like(t) for n, t in engine.weights().items()}

    async def main() -> Generation:
        task = asyncio.ensure_future(SUBJECT.of(engine))
        await until(lambda: engine.load().running == 1)
        for _ in range(3):
            await asyncio.sleep(0)
        engine.pause(pause)
        engine.update_weights(changed, 1)
        engine.proceed()
        return await task

    out = asyncio.run(main())
    under_old = int((out.versions == 0).sum())
    assert 0 < under_old < len(out.ids)
    side, kept = side_of(out), len(SUBJECT.prompt) + under_old - 1
    assert side.recorded.tolist() == [True] * (len(side.recorded) - 1) + [False]
    np.testing.assert_array_equal(side.values[:kept], side_of(old).values[:kept])
    if pause == "retract":  # in place the KV is of both, and no plain forward has that
        fresh = Ask(tokens_of(SUBJECT, out)[:-1], 1, **RECORD)
        np.testing.assert_array_equal(side.values[kept:-1], side_of(alone(engine, fresh)).values[kept:-1])


def test_a_prefix_that_was_computed_without_rows_is_computed_again() -> None:
    engine = engine_of(directory("tiny-moe"))
    plain = alone(engine, Ask(SUBJECT.prompt, 10, key=42))
    assert not plain.side
    out = alone(engine, SUBJECT)
    assert out.ids.tolist() == plain.ids.tolist()
    same_bits(alone(engine, SUBJECT), out)  # from the cache this time


# What may not change


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=2, max_size=7),
    seed=st.integers(0, 99),
    who=st.sets(st.integers(0, 4)),
)
def test_bits_and_rows_of_a_request_are_its_own(
    either: TransformersEngine, arrivals: list[tuple[int, int]], seed: int, who: set[int]
) -> None:
    """Any mix of requests, of which some record, admitted at any step while others decode."""
    plain, recording = neighbours(5, seed), neighbours(5, seed, **RECORD)
    kinds = [recording[at] if at in who else plain[at] for at in range(5)]

    async def main() -> list[Generation]:
        running = []
        for i, (kind, wait) in enumerate(arrivals):
            running.append(asyncio.ensure_future(kinds[kind].of(either, f"r{i}")))
            for _ in range(wait):
                await asyncio.sleep(0)
        return await asyncio.gather(*running)

    for (kind, _), got in zip(arrivals, asyncio.run(main()), strict=True):
        same_bits(got, alone(either, kinds[kind]))
        assert bool(got.side) == (kind in who)
        assert got.ids.tolist() == alone(either, plain[kind]).ids.tolist()
    assert is_idle(either)


def test_every_slot_gives_the_same_bits_and_rows(engine: TransformersEngine) -> None:
    asks = [Ask(ask.prompt, 10, key=ask.key, **RECORD) for ask in neighbours(SLOTS, seed=3)]
    straight = together(engine, asks)
    for shift in range(1, SLOTS):
        rotated = together(engine, asks[shift:] + asks[:shift])
        for one, other in zip(straight, rotated[-shift:] + rotated[:-shift], strict=True):
            same_bits(one, other)


def test_experts_of_a_few_tokens_at_a_time_are_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = alone(engine_of(directory("tiny-moe")), SUBJECT)
    monkeypatch.setattr(computed, "GATHERED", 1)
    same_bits(alone(engine_of(directory("tiny-moe")), SUBJECT), whole)


def test_who_does_not_ask_pays_nothing_and_a_score_records_nothing() -> None:
    engine = engine_of(directory("tiny-moe"))
    alone(engine, Ask(SUBJECT.prompt, 4))
    assert not engine._open()._recorders
    alone(engine, SUBJECT)
    assert list(engine._open()._recorders) == ["routed_experts"]
    engine._open().recorder("routed_experts").capture = None  # type: ignore[method-assign,assignment]
    assert len(engine.logprobs(SUBJECT.prompt)) == len(SUBJECT.prompt)
    alone(engine, Ask(SUBJECT.prompt, 4))


def test_what_can_not_be_recorded_is_refused_by_name(tiny: Path, engine: TransformersEngine) -> None:
    with pytest.raises(
        ValueError, match=r"^r: .* record routed_experts: LlamaForCausalLM has no layer with exp"
    ):
        alone(engine_of(tiny), SUBJECT)
    with pytest.raises(ValueError, match=r"^r: .* record indexer_topk: Qwen3MoeForCausalLM has 0 indexers"):
        alone(engine, Ask([1], 2, record=("routed_experts", "indexer_topk")))
    with pytest.raises(ValueError, match=r"^r: rows of 6 tokens can't be known of a prompt of 5"):
        asyncio.run(engine.generate(SUBJECT.prompt, SUBJECT.sampling, key=1, rid="r", recorded=6))
    assert is_idle(engine)
