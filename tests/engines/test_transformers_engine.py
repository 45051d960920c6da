"""The embedded engine: what it samples, what may not change a request's bits, and how requests end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asking import SLOTS, Ask, alone, engine_of, is_idle, neighbours, same_bits, together, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    OlmoConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from flowgraph.engines.protocol import Generation
from flowgraph.engines.sampling import uniform
from flowgraph.engines.transformers import TransformersEngine

Save = Callable[..., Path]
MakeWithEos = Callable[[int | list[int]], Path]
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest, tiny: Path) -> TransformersEngine:
    """One engine per dtype, shared: its requests leave nothing behind, which is part of what is tested."""
    return engine_of(tiny, dtype=request.param)


def weights_of(where: Path, scale: float = 1.0) -> Weights:
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)
    return {name: tensor * scale for name, tensor in model.named_parameters()}


def expected(where: Path, ask: Ask) -> tuple[list[int], list[float]]:
    """The response by a plain loop: the whole sequence anew for each token, no cache, fp64 sampling."""
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)
    ids, logprobs = ask.prompt.tolist(), []
    for position in range(ask.sampling.max_new_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].double()
        temperature = ask.sampling.temperature
        scaled = torch.log_softmax(logits / (temperature or 1), 0).numpy()
        draw = np.searchsorted(np.cumsum(np.exp(scaled)), uniform(ask.key, position), side="right")
        token = int(draw) if temperature else int(logits.argmax())
        ids.append(token)
        logprobs.append(float(scaled[token]))
    return ids[len(ask.prompt) :], logprobs


# What is sampled


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
def test_tokens_and_logprobs_equal_a_plain_loop(tiny: Path, temperature: float) -> None:
    asks = [Ask(range(5, 5 + n), 12, key=n, temperature=temperature) for n in (1, 3, 9, 16, 2)]
    for ask, got in zip(asks, together(engine_of(tiny), asks), strict=True):
        ids, logprobs = expected(tiny, ask)
        assert got.ids.tolist() == ids
        np.testing.assert_allclose(got.logprobs, logprobs, atol=1e-4)
        assert got.finish_reason == "length"
        assert [str(a.dtype) for a in (got.ids, got.logprobs, got.versions)] == ["int32", "float32", "int32"]


@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, OlmoConfig])
@pytest.mark.parametrize("heads", [1, 4])
def test_dense_models_of_other_kinds_work(save: Save, kind: type[PreTrainedConfig], heads: int) -> None:
    where = save(kind, num_key_value_heads=heads, tie_word_embeddings=False)
    asks = [Ask([7, 8, 9], 8, key=1), Ask([250], 8, key=2)]
    for ask, got in zip(asks, together(engine_of(where), asks), strict=True):
        ids, logprobs = expected(where, ask)
        assert got.ids.tolist() == ids
        np.testing.assert_allclose(got.logprobs, logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        (Gemma2Config, {}, "'gemma2' needs an attention"),
        (Gemma3TextConfig, {}, "'gemma3_text' has sliding_attention"),
        (MistralConfig, {"sliding_window": 16}, "'mistral' has a sliding window of 16"),
        (LlamaConfig, {"max_position_embeddings": 39}, "a context of 40 exceeds the 39 positions"),
    ],
)
def test_a_model_that_one_mask_does_not_serve_is_refused(
    save: Save, kind: type[PreTrainedConfig], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine_of(save(kind, **more))


def test_the_key_decides(engine: TransformersEngine) -> None:
    first, again, other = (alone(engine, Ask([3, 4], 16, key=key)) for key in (1, 1, 2))
    same_bits(first, again)
    assert first.ids.tolist() != other.ids.tolist()


# What may not change a request's bits

SUBJECT = Ask([9, 8, 7, 6, 5], 10, key=42)


@pytest.mark.parametrize("at", [0, 1, 3, 5, 9])
def test_other_requests_and_the_slot_change_nothing(engine: TransformersEngine, at: int) -> None:
    asks = neighbours(9, seed=at)
    asks.insert(at, SUBJECT)
    same_bits(together(engine, asks)[at], alone(engine, SUBJECT))


def test_every_slot_gives_the_same_bits(engine: TransformersEngine) -> None:
    asks = [Ask(ask.prompt, 10, key=ask.key) for ask in neighbours(SLOTS, seed=3)]
    straight = together(engine, asks)
    for shift in range(1, SLOTS):
        rotated = together(engine, asks[shift:] + asks[:shift])
        for one, other in zip(straight, rotated[-shift:] + rotated[:-shift], strict=True):
            same_bits(one, other)


def test_a_shared_prefill_gives_the_bits_of_a_fresh_one(tiny: Path) -> None:
    group = [Ask(SUBJECT.prompt, 10, key=key) for key in range(6)]
    for dtype in ("float32", "bfloat16"):
        engine = engine_of(tiny, dtype=dtype)
        prefills = count_prefills(engine)
        shared = together(engine, group)
        assert len(prefills) == 1
        for ask, sample in zip(group, shared, strict=True):
            same_bits(sample, alone(engine_of(tiny, dtype=dtype), ask))


def count_prefills(engine: TransformersEngine) -> list[Any]:
    model, calls = engine._open(), []
    prefill = model.prefill
    model.prefill = lambda prompt, record: calls.append(prompt) or prefill(prompt, record)  # type: ignore[method-assign,func-returns-value]
    return calls


def test_prefixes_are_bounded_and_the_latest_used_stay(tiny: Path) -> None:
    engine = engine_of(tiny, slots=2)
    prefills = count_prefills(engine)
    for first in (1, 2, 1, 3, 1, 2):
        alone(engine, Ask([first], 2))
    assert prefills == [[1], [2], [3], [2]]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=9),
    seed=st.integers(0, 99),
    aborted=st.sets(st.integers(0, 8)),
)
def test_the_bits_of_a_request_are_its_own(
    engine: TransformersEngine, arrivals: list[tuple[int, int]], seed: int, aborted: set[int]
) -> None:
    """Any mix of requests, admitted at any step while others decode, some of them aborted on the way."""
    kinds = neighbours(6, seed)

    async def main() -> list[Generation]:
        running = []
        for i, (kind, wait) in enumerate(arrivals):
            running.append(asyncio.ensure_future(kinds[kind].of(engine, f"r{i}")))
            for _ in range(wait):
                await asyncio.sleep(0)
            if i in aborted:
                engine.abort(f"r{i}")
        return await asyncio.gather(*running)

    for (kind, _), got in zip(arrivals, asyncio.run(main()), strict=True):
        whole = alone(engine, kinds[kind])
        if got.finish_reason == "abort":
            length = len(got.ids)
            whole = Generation(whole.ids[:length], whole.logprobs[:length], whole.versions[:length], "abort")
        same_bits(got, whole)
    assert is_idle(engine)


def test_what_a_slot_held_before_changes_nothing(tiny: Path) -> None:
    """Not even infinities: a diverged policy must not outlive its weights."""
    engine, fresh = engine_of(tiny), engine_of(tiny)
    engine._open()._cache.all_N.fill_(torch.nan)
    asks = neighbours(SLOTS, seed=8)  # all slots are filled, so no free one holds the NaN
    asks = [Ask(ask.prompt, 10, key=ask.key) for ask in asks]
    for one, other in zip(together(engine, asks), together(fresh, asks), strict=True):
        same_bits(one, other)


# Admission


def test_more_requests_than_slots_are_served_in_order(engine: TransformersEngine) -> None:
    async def main() -> list[str]:
        order: list[str] = []

        async def ask(rid: str) -> None:
            await Ask([1, 2], 5).of(engine, rid)
            order.append(rid)

        tasks = [asyncio.create_task(ask(f"r{i}")) for i in range(11)]
        await until(lambda: engine.load().running == SLOTS)
        load = engine.load()
        assert (load.running, load.waiting, load.slots) == (SLOTS, 11 - SLOTS, SLOTS)
        await asyncio.gather(*tasks)
        return order

    assert asyncio.run(main()) == [f"r{i}" for i in range(11)]
    assert is_idle(engine)


def test_a_request_is_admitted_while_others_decode(engine: TransformersEngine) -> None:
    async def main() -> None:
        long = asyncio.create_task(Ask([1], 30).of(engine, "long"))
        await until(lambda: engine.load().running == 1)
        short = await Ask([2], 3).of(engine, "short")
        assert len(short.ids) == 3
        assert not long.done()
        assert len((await long).ids) == 30

    asyncio.run(main())


def test_one_engine_serves_one_event_loop_after_another(engine: TransformersEngine) -> None:
    first = alone(engine, SUBJECT)
    loop = asyncio.new_event_loop()
    try:  # ends without the cancelling and cleaning up that asyncio.run does
        same_bits(loop.run_until_complete(SUBJECT.of(engine)), first)
    finally:
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
    same_bits(alone(engine, SUBJECT), first)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (Ask([], 4), "non-empty"),
        (Ask([1] * 33, 8), "exceed the context of 40"),
        (Ask([300], 4), "outside the vocabulary of 260"),
        (Ask([-1], 4), "outside the vocabulary"),
        (Ask([1], 4, key=1 << 64), "64 bits"),
        (Ask([1], 4, key=-1), "64 bits"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(
    engine: TransformersEngine, ask: Ask, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        alone(engine, ask)
    assert is_idle(engine)


def test_a_request_may_fill_the_context(engine: TransformersEngine) -> None:
    assert len(alone(engine, Ask([1] * 30, 10)).ids) == 10


def test_a_name_in_use_is_refused_and_free_again_afterwards(engine: TransformersEngine) -> None:
    async def main() -> None:
        first = asyncio.create_task(Ask([1], 4).of(engine, "same"))
        await until(lambda: engine.load().running == 1)
        with pytest.raises(ValueError, match="same: a request of this name is under way"):
            await Ask([2], 4).of(engine, "same")
        assert len((await first).ids) == 4
        assert len((await Ask([2], 4).of(engine, "same")).ids) == 4

    asyncio.run(main())


# How responses end


def test_eos_is_kept_and_ends_with_stop(tiny: Path, tiny_with_eos: MakeWithEos) -> None:
    ask = Ask([4, 5, 6], 12, key=3)
    whole = alone(engine_of(tiny), ask)
    eos = int(whole.ids[5])
    first = whole.ids.tolist().index(eos)
    for ids in (eos, [259, eos]):
        got = alone(engine_of(tiny_with_eos(ids)), ask)
        assert got.ids.tolist() == whole.ids[: first + 1].tolist()
        assert got.finish_reason == "stop"


def test_eos_as_the_last_token_allowed_is_a_stop(tiny: Path, tiny_with_eos: MakeWithEos) -> None:
    whole = alone(engine_of(tiny), Ask([4, 5, 6], 12, key=3))
    engine = engine_of(tiny_with_eos(int(whole.ids[0])))
    got = alone(engine, Ask([4, 5, 6], 1, key=3))
    assert (got.ids.tolist(), got.finish_reason) == ([whole.ids[0]], "stop")
    second = Ask([4, 5, 6], 2, key=3)
    engine = engine_of(tiny_with_eos(int(whole.ids[1])))
    assert alone(engine, second).finish_reason == "stop"


def test_a_stop_string_ends_with_the_token_that_completes_it(tiny: Path) -> None:
    engine = engine_of(tiny)
    ask = Ask([4, 5, 6], 20, key=3)
    whole = alone(engine, ask)
    tokenizer = engine._tokenizer
    assert tokenizer is not None
    texts = [tokenizer.decode(whole.ids[: i + 1].tolist()) for i in range(20)]
    starts = [i for i in range(2, 16) if "\ufffd" not in texts[i + 2][len(texts[i - 1]) :]]
    assert starts, "the response has no three characters in a row"
    for start in starts:
        stop = texts[start + 2][len(texts[start - 1]) :]
        end = next(i for i, text in enumerate(texts) if stop in text)
        for new in (20, end + 1):  # also where it is completed by the last token allowed
            got = alone(engine, Ask([4, 5, 6], new, key=3, stop=("never", stop)))
            assert got.ids.tolist() == whole.ids[: end + 1].tolist()
            assert got.finish_reason == "stop"


def test_stop_strings_are_seen_in_split_characters_and_across_tokens(tiny: Path) -> None:
    from flowgraph.engines.transformers import StopStrings

    tokenizer = engine_of(tiny)._tokenizer
    assert tokenizer is not None
    alphabet = tokenizer.get_vocab()
    from tokenizers.pre_tokenizers import ByteLevel

    def ends(text: str, *stops: str) -> int | None:
        symbols = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
        ids = [alphabet[symbol] for symbol in symbols]
        watch = StopStrings(tokenizer, stops)
        return next((n for n in range(1, len(ids) + 1) if watch.completed(ids[:n])), None)

    assert ends("one\n\ntwo", "\n\n") == 5
    assert ends("ab→cd", "→c") == 6  # an arrow is three bytes, here three tokens
    assert ends("aab", "ab", "b") == 3
    assert ends("aaaab", "aab") == 5
    assert ends("nothing", "x") is None


def test_stop_strings_need_a_tokenizer(tiny: Path, tiny_with_eos: MakeWithEos) -> None:
    where = tiny_with_eos(0)
    (where / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        alone(engine_of(where), Ask([1], 4, stop=("x",)))


# Abort, cancel, pause, failure, close


def test_abort_returns_what_there_is_and_frees_the_slot(engine: TransformersEngine) -> None:
    async def main() -> None:
        asks = [Ask([7, i], 30, key=i) for i in range(SLOTS + 1)]
        tasks = [asyncio.create_task(ask.of(engine, f"r{i}")) for i, ask in enumerate(asks)]
        await until(lambda: engine.load().running == SLOTS)
        await asyncio.sleep(0)
        assert engine.abort(f"r{SLOTS}")  # still waiting
        assert engine.abort("r1")
        assert not engine.abort("r1")
        assert not engine.abort("unknown")
        assert engine.load().running == SLOTS - 1
        early, cut = await tasks[SLOTS], await tasks[1]
        assert (len(early.ids), early.finish_reason) == (0, "abort")
        assert 0 < len(cut.ids) < 30
        assert cut.finish_reason == "abort"
        assert len(cut.ids) == len(cut.logprobs) == len(cut.versions)
        await tasks[0]

    asyncio.run(main())
    assert is_idle(engine)


def test_a_cancelled_caller_frees_its_slot(engine: TransformersEngine) -> None:
    async def main() -> None:
        tasks = [asyncio.create_task(Ask([7, i], 30).of(engine, f"r{i}")) for i in range(SLOTS + 2)]
        await until(lambda: engine.load().running == SLOTS)
        for task in tasks[1], tasks[-1]:  # one decoding, one waiting
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert not engine.abort("r1")
        rest = await asyncio.gather(*(task for task in tasks if not task.done()))
        assert [len(generation.ids) for generation in rest] == [30] * SLOTS

    asyncio.run(main())
    assert is_idle(engine)


def test_nothing_is_computed_while_paused(tiny: Path) -> None:
    engine = engine_of(tiny)
    unpaused = alone(engine, Ask([5], 12))
    passes: list[int] = []
    decode = engine._open().decode
    engine._open().decode = lambda *a: passes.append(1) or decode(*a)  # type: ignore[method-assign,func-returns-value]

    async def main() -> None:
        task = asyncio.create_task(Ask([5], 12).of(engine))
        await until(lambda: len(passes) == 4)
        engine.pause("in_place")
        engine.pause("in_place")
        before = len(passes)
        late = asyncio.create_task(Ask([6], 2).of(engine, "late"))
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(passes) == before
        load = engine.load()
        assert (load.running, load.waiting, load.slots) == (1, 1, SLOTS)
        engine.proceed()
        engine.proceed()
        same_bits(await task, unpaused)
        assert len((await late).ids) == 2

    asyncio.run(main())


def test_an_abort_is_served_while_paused(engine: TransformersEngine) -> None:
    async def main() -> None:
        engine.pause("in_place")
        task = asyncio.create_task(Ask([5], 12).of(engine))
        await until(lambda: engine.load().waiting == 1)
        assert engine.abort("r")
        assert (await task).finish_reason == "abort"
        engine.proceed()

    asyncio.run(main())


@pytest.mark.parametrize("where_it_fails", ["decode", "prefill"])
def test_a_failure_reaches_every_caller_and_frees_every_slot(tiny: Path, where_it_fails: str) -> None:
    engine = engine_of(tiny)
    model = engine._open()
    works = getattr(model, where_it_fails)
    calls: list[int] = []

    def fails(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("no more")
        return works(*arguments)

    setattr(model, where_it_fails, fails)

    async def main() -> list[Generation | BaseException]:
        requests = [Ask([1, i], 20).of(engine, f"r{i}") for i in range(SLOTS + 2)]
        return await asyncio.gather(*requests, return_exceptions=True)

    assert [repr(result) for result in asyncio.run(main())] == ["MemoryError('no more')"] * (SLOTS + 2)
    assert is_idle(engine)
    same_bits(alone(engine, SUBJECT), alone(engine_of(tiny), SUBJECT))


def test_logits_that_are_not_finite_are_an_error(tiny: Path) -> None:
    engine = engine_of(tiny)
    engine.pause("in_place")
    engine.update_weights({name: tensor * torch.nan for name, tensor in weights_of(tiny).items()}, 3)
    engine.proceed()
    with pytest.raises(FloatingPointError, match="r: the logits of version 3 are not finite"):
        alone(engine, SUBJECT)


def test_close_ends_everything_and_may_be_repeated(tiny: Path) -> None:
    engine = engine_of(tiny)

    async def main() -> None:
        tasks = [asyncio.create_task(Ask([1, i], 30).of(engine, f"r{i}")) for i in range(SLOTS + 1)]
        await until(lambda: engine.load().running == SLOTS)
        engine.close()
        engine.close()
        assert [(await task).finish_reason for task in tasks] == ["abort"] * (SLOTS + 1)
        with pytest.raises(RuntimeError, match="closed"):
            await SUBJECT.of(engine)
        engine.pause("in_place")
        with pytest.raises(RuntimeError, match="closed"):
            engine.update_weights({}, 1)
        assert not engine.abort("r1")

    asyncio.run(main())
    assert is_idle(engine)


def test_an_engine_that_is_not_one_is_refused(tiny: Path) -> None:
    for bad in ({"slots": 0}, {"context": 1}, {"dtype": "int8"}, {"context": 257}):
        with pytest.raises(ValueError, match=str(next(iter(bad.values())))):
            TransformersEngine(str(tiny), **({"slots": 2, "context": 16} | bad))


# Weights


def test_versions_tell_the_weights_of_each_token(tiny: Path) -> None:
    engine = engine_of(tiny)
    old = alone(engine, Ask([5, 6], 12))
    changed = weights_of(tiny, scale=0.7)

    async def main() -> tuple[Generation, Generation]:
        crossing = asyncio.create_task(Ask([5, 6], 12).of(engine, "crossing"))
        await until(lambda: engine.load().running == 1)
        await asyncio.sleep(0)
        engine.pause("in_place")
        engine.update_weights(changed, 7)
        assert engine.version == 7
        fresh = asyncio.create_task(Ask([5, 6], 12).of(engine, "fresh"))
        engine.proceed()
        return await crossing, await fresh

    crossing, fresh = asyncio.run(main())
    cut = crossing.versions.tolist().index(7)
    assert crossing.versions.tolist() == [0] * cut + [7] * (12 - cut)
    assert 0 < cut < 12
    assert crossing.ids[:cut].tolist() == old.ids[:cut].tolist()
    assert crossing.logprobs[cut] != old.logprobs[cut]
    # The prefix of version 0 is gone, and the new weights are those of an engine that started with them.
    other = engine_of(tiny)
    other.pause("in_place")
    other.update_weights(changed, 7)
    other.proceed()
    same_bits(fresh, alone(other, Ask([5, 6], 12)))
    assert fresh.logprobs[0] != old.logprobs[0]


def without(weights: Weights, name: str) -> Weights:
    return {n: tensor for n, tensor in weights.items() if n != name}


EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: without(w, NORM), "'model.norm.weight' is missing"),
        (lambda w: without(w, EMBED), "'model.embed_tokens.weight' is missing"),
        (lambda w: w | {"extra": torch.ones(1)}, "'extra' is no weight"),
        (lambda w: w | {NORM: torch.ones(65)}, r"'model.norm.weight' is torch.float32 \[65\], .* \[64\]"),
        (lambda w: w | {NORM: torch.ones(64).bfloat16()}, "'model.norm.weight' is torch.bfloat16"),
        (lambda w: w | {NORM: np.ones(64)}, "'model.norm.weight' is a ndarray"),
        (lambda w: w | {"lm_head.weight": w[EMBED] + 1}, "'lm_head.weight' differs from 'model.embed_tokens"),
        (lambda w: w | {"lm_head.weight": w[EMBED][1:]}, "'lm_head.weight' is torch.float32"),
    ],
)
def test_wrong_weights_are_refused_and_change_nothing(
    tiny: Path, change: Callable[[Weights], Weights], message: str
) -> None:
    engine = engine_of(tiny)
    before = alone(engine, SUBJECT)
    engine.pause("in_place")
    with pytest.raises(ValueError, match=message):
        engine.update_weights(change(weights_of(tiny, scale=0.5)), 1)
    assert engine.version == 0
    engine.proceed()
    engine._prefixes.clear()
    same_bits(alone(engine, SUBJECT), before)


def test_a_tied_head_may_be_named_either_way(tiny: Path) -> None:
    changed = weights_of(tiny, scale=0.5)
    head = {"lm_head.weight": changed[EMBED]}
    results = []
    for weights in (changed, changed | head, without(changed, EMBED) | head):
        engine = engine_of(tiny)
        engine.pause("in_place")
        engine.update_weights(weights, 1)
        engine.proceed()
        results.append(alone(engine, SUBJECT))
    same_bits(results[0], results[1])
    same_bits(results[0], results[2])


def test_weights_change_only_while_paused(tiny: Path) -> None:
    engine = engine_of(tiny)
    with pytest.raises(RuntimeError, match="paused"):
        engine.update_weights(weights_of(tiny), 1)
    engine.pause("in_place")
    for version in (-1, 1 << 31):
        with pytest.raises(ValueError, match="version"):
            engine.update_weights(weights_of(tiny), version)
    assert engine.version == 0
