"""What every engine does with requests, whatever it is made of: seen through the `Engine` protocol alone.

`embedded`, `one server` and `two servers` are the transformers engine; `sglang` is a real server. Log-probabilities are
compared with teacher-forced forwards by plain transformers, in float32, to within `running.NEAR`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from running import NEAR, SLOTS, Running
from served_model import CONTEXT, EOS, TRIPLE, WORD, Ids, ServedModel

from flowgraph.engines.protocol import Generation

RANDOM = np.random.default_rng(3)
PROMPTS = [RANDOM.integers(0, 256, n).astype(np.int32) for n in (1, 3, 17, 40)]
LONG = 200  # more than any default of a server's, and long enough to be met under way


def same(one: Generation, other: Generation) -> None:
    assert one.ids.tolist() == other.ids.tolist()
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=NEAR)
    assert one.finish_reason == other.finish_reason


# What is sampled


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_a_teacher_forced_forward(running: Running, temperature: float) -> None:
    running.serve("base")
    asked = [
        running.ask(prompt, 12, key=at, temperature=temperature) for at, prompt in enumerate(PROMPTS * 2)
    ]
    for prompt, out in zip(PROMPTS * 2, running.answers(asked), strict=True):
        assert (len(out.ids), out.finish_reason) == (12, "length")
        assert set(out.versions.tolist()) == {running.engine.version}
        running.check(prompt, out, temperature=temperature)


def test_temperature_zero_takes_the_likeliest_token(running: Running) -> None:
    running.serve("base")
    expected = [(prompt, ids) for prompt, ids in running.model.greedy("base") if len(ids) > 5][:20]
    outs = running.answers(running.ask(prompt, len(ids), temperature=0) for prompt, ids in expected)
    assert [out.ids.tolist() for out in outs] == [ids for _, ids in expected]


def test_tokens_are_distributed_as_the_model_says(running: Running) -> None:
    """200 keys, one prompt: χ² over the tokens that are expected at least 5 times, and the rest together."""
    running.serve("base")
    prompt = PROMPTS[2]
    first = running.model.distribution("base", prompt)
    outs = running.answers(running.ask(prompt, 1, key=key) for key in range(200))
    counts = np.bincount([int(out.ids[0]) for out in outs], minlength=len(first))
    often = first * 200 >= 5
    assert 3 <= often.sum() < 20, "the prompt is neither peaked nor flat"
    expected = np.append(first[often], first[~often].sum()) * 200
    observed = np.append(counts[often], counts[~often].sum())
    statistic, freedom = float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1
    # Wilson and Hilferty's approximation of the value that is exceeded once in a million runs.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 4.75 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_the_key_decides(running: Running) -> None:
    if running.name == "sglang":
        pytest.skip("SGLang draws by key only with deterministic inference, which its CPU setting has not")
    running.serve("base")
    first, again, other = (running.answer(PROMPTS[1], 16, key=key) for key in (1, 1, 2))
    same(first, again)
    assert first.ids.tolist() != other.ids.tolist()
    crowd = [running.ask(PROMPTS[at % 4], 5 + at, key=at + 7) for at in range(30)]
    same(running.answers([*crowd, running.ask(PROMPTS[1], 16, key=1)])[-1], first)


@pytest.mark.parametrize("kind", ["base", "other"])
def test_logprobs_of_given_tokens(running: Running, kind: str) -> None:
    running.serve(kind)
    for tokens in (*PROMPTS, RANDOM.integers(0, 256, CONTEXT)):
        got = running.do(running.engine.logprobs(tokens))
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, running.model.logprobs(kind, tokens), atol=NEAR, rtol=0)


def test_a_second_turn_goes_on_from_the_tokens_of_the_first(running: Running) -> None:
    """Ids that are no text, too: nothing is decoded and encoded again."""
    running.serve("base")
    prompt = np.array([200, 255, WORD, TRIPLE, 30, 199], np.int32)
    for out in running.answers(running.ask(prompt, 20, key=key) for key in range(4)):
        second = np.concatenate([prompt, out.ids, np.array([TRIPLE, 150, 7], np.int32)])
        answer = running.answer(second, 20, key=9)
        running.check(second, answer)
        whole = np.concatenate([second, answer.ids])
        scored = running.do(running.engine.logprobs(whole))
        np.testing.assert_allclose(scored[6:26], out.logprobs, atol=NEAR)
        np.testing.assert_allclose(scored[len(second) :], answer.logprobs, atol=NEAR)


# How responses end


def inside_a_token(model: ServedModel) -> tuple[Ids, list[int], str]:
    prompt, ids, at = next(model.found(lambda ids, at: at > 0 and ids[at] in (TRIPLE, WORD), "base"))
    return prompt, ids, model.text([ids[at]])[1:-1].decode()


def across_tokens(model: ServedModel) -> tuple[Ids, list[int], str]:
    """Three tokens that the tokenizer itself would write as one."""
    found = model.found(lambda ids, at: ids[at] < 256 and model.text(ids[at : at + 3]) == model.word, "base")
    prompt, ids, _ = next(found)
    return prompt, ids, model.word.decode()


def in_the_first_token(model: ServedModel) -> tuple[Ids, list[int], str]:
    found = model.found(lambda ids, at: at == 0 and ids[0] < 256 and model.text(ids[:1]).isalnum(), "base")
    prompt, ids, _ = next(found)
    return prompt, ids, model.text(ids[:1]).decode()


def of_a_split_character(model: ServedModel) -> tuple[Ids, list[int], str]:
    def is_split(ids: list[int], at: int) -> bool:
        text = model.text(ids[at : at + 2]).decode(errors="replace")
        return at > 0 and len(text) == 1 and text != "\ufffd"

    prompt, ids, at = next(model.found(is_split, "base"))
    return prompt, ids, model.text(ids[at : at + 2]).decode()


Stop = Callable[[ServedModel], tuple[Ids, list[int], str]]
STOPS: list[Stop] = [inside_a_token, across_tokens, in_the_first_token, of_a_split_character]


@pytest.mark.parametrize("stop", STOPS)
def test_a_stop_string_ends_with_the_token_that_completes_it(running: Running, stop: Stop) -> None:
    running.serve("base")
    prompt, ids, text = stop(running.model)
    end = next(n for n in range(1, len(ids) + 1) if text.encode() in running.model.text(ids[:n]))
    # Alone or not, and where it is completed by the last token allowed.
    for new, stops in ((end + 30, (text,)), (end, ("never", text))):
        out = running.answer(prompt, new, temperature=0, stop=stops)
        assert out.ids.tolist() == ids[:end]
        assert out.finish_reason == "stop"
        running.check(prompt, out, temperature=0)


def test_a_stop_string_does_not_begin_in_the_prompt(running: Running) -> None:
    running.serve("base")
    model = running.model

    def joins(prompt: Ids, ids: list[int]) -> bool:
        return model.text([*prompt[-1:], *ids[:1]]).isalnum() and len(ids) > 4

    prompt, ids = next((p, ids) for p, ids in model.greedy("base") if joins(p, ids))
    text = model.text([prompt[-1], ids[0]]).decode()
    assert text.encode() not in model.text(ids)
    out = running.answer(prompt, len(ids), temperature=0, stop=(text,))
    assert (out.ids.tolist(), out.finish_reason) == (ids, "length")


def test_eos_is_kept_and_is_a_stop_even_as_the_last_token_allowed(running: Running) -> None:
    """Case R4: the finish reason decides what is truncated, not the length."""
    running.serve("ends")
    found = running.model.found(lambda ids, at: at > 2 and ids[at] == EOS and EOS not in ids[:at], "ends")
    prompt, ids, at = next(found)
    for new, expected in ((at + 50, "stop"), (at + 1, "stop"), (at, "length")):
        out = running.answer(prompt, new, temperature=0)
        assert (out.ids.tolist(), out.finish_reason) == (ids[: min(at + 1, new)], expected)
        running.check(prompt, out, temperature=0)


def test_the_budget_is_what_was_asked_for(running: Running) -> None:
    running.serve("base")
    for new in (1, 2, LONG):
        out = running.answer(PROMPTS[1], new)
        assert (len(out.ids), out.finish_reason) == (new, "length")
        running.check(PROMPTS[1], out)


@pytest.mark.parametrize(
    ("length", "new", "fits", "reason"),
    [
        (CONTEXT - 10, 10, 10, "length"),
        (CONTEXT - 10, 50, 10, "context"),
        (CONTEXT - 1, 5, 1, "context"),
        (CONTEXT, 5, 0, "context"),
        (CONTEXT + 100, 1, 0, "context"),
    ],
)
def test_the_context_ends_a_response(running: Running, length: int, new: int, fits: int, reason: str) -> None:
    running.serve("base")
    prompt = np.random.default_rng(length).integers(0, 256, length)
    out = running.answer(prompt, new)
    assert (len(out.ids), out.finish_reason) == (fits, reason)
    running.check(prompt, out)


@pytest.mark.parametrize(
    ("prompt", "key", "says"),
    [
        ([], 1, "non-empty"),
        ([1, 260], 1, "260 at position 1, outside the vocabulary of 260"),
        ([1, 300], 1, "outside the vocabulary"),
        ([-1], 1, "outside the vocabulary"),
        ([1], -1, "64 bits"),
        ([1], 1 << 64, "64 bits"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_name(
    running: Running, prompt: list[int], key: int, says: str
) -> None:
    with pytest.raises(ValueError, match=rf"mine: .*{says}"):
        running.answer(prompt, 4, key=key, rid="mine")
    assert len(running.answer([1], 4).ids) == 4


@pytest.mark.parametrize(
    ("tokens", "says"), [([], "non-empty"), ([5, 260], "vocabulary"), ([1] * (CONTEXT + 1), "context of 512")]
)
def test_tokens_that_have_no_logprobs_are_refused(running: Running, tokens: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        running.do(running.engine.logprobs(np.array(tokens, np.int32)))


# Many at once, and their end


def test_64_at_once(running: Running) -> None:
    running.serve("base")
    random = np.random.default_rng(64)
    asked = [
        (random.integers(0, 256, random.integers(1, 60)), int(random.integers(1, 40)), float(temperature))
        for temperature in random.choice([0.0, 0.7, 1.0], 64)
    ]
    outs = running.answers(
        running.ask(prompt, new, key=at, temperature=temperature)
        for at, (prompt, new, temperature) in enumerate(asked)
    )
    for (prompt, new, temperature), out in zip(asked, outs, strict=True):
        assert (len(out.ids), out.finish_reason) == (new, "length")
        running.check(prompt, out, temperature=temperature)


def prompt(at: int) -> list[int]:
    """One of its own for each request, so that they go to the replica that has the fewest."""
    return [at, *PROMPTS[1].tolist()]


def test_the_load_tells_what_is_under_way(running: Running) -> None:
    async def work() -> None:
        slots = running.engine.load().slots
        assert slots == SLOTS * len(running.engine.members)
        tasks = [asyncio.ensure_future(running.ask(prompt(k), 400, rid=f"r{k}")) for k in range(slots + 9)]
        load = await running.until(lambda load: load.running == slots and load.waiting > 0)
        assert load.waiting <= 9
        assert 0 < load.kv_used <= 1
        assert all(running.engine.abort(f"r{k}") for k in range(slots + 9))
        await asyncio.gather(*tasks)
        load = await running.until(lambda load: not load.running)
        assert (load.waiting, load.slots) == (0, slots)
        assert load.kv_used == 0

    running.do(work())


def test_abort_returns_what_there_is(running: Running) -> None:
    running.serve("base")

    async def work() -> tuple[Generation, Generation]:
        slots = running.engine.load().slots
        tasks = [asyncio.ensure_future(running.ask(prompt(k), 400, rid=f"r{k}")) for k in range(slots + 1)]
        await running.until(lambda load: load.running == slots and load.waiting == 1)
        await asyncio.sleep(0.05)
        assert running.engine.abort(f"r{slots}")  # the one that waits
        assert running.engine.abort("r0")
        assert not running.engine.abort("unknown")
        ended = await asyncio.gather(tasks[0], tasks[slots])
        assert not running.engine.abort("r0")
        assert not any(task.done() for task in tasks[1:slots])
        for k in range(1, slots):
            running.engine.abort(f"r{k}")
        await asyncio.gather(*tasks)
        return ended[0], ended[1]

    begun, waited = running.do(work())
    assert 0 < len(begun.ids) < 400
    assert begun.finish_reason == "abort"
    running.check(prompt(0), begun)
    assert (len(waited.ids), waited.finish_reason) == (0, "abort")
    running.fits(waited)


def test_a_name_in_use_is_refused(running: Running) -> None:
    async def work() -> None:
        first = asyncio.ensure_future(running.ask(PROMPTS[1], 20, rid="same"))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="same: a request of this name is under way"):
            await running.ask(PROMPTS[1], 4, rid="same")
        assert len((await first).ids) == 20
        assert len((await running.ask(PROMPTS[1], 4, rid="same")).ids) == 4

    running.do(work())
