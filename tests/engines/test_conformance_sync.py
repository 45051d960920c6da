"""What every engine does when its weights change, and at its end; see test_conformance.py."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import NEAR, SLOTS, Running
from served_model import CONTEXT, EMBED, HEAD

from flowgraph.engines.protocol import PAUSE_MODES, Generation, PauseMode
from flowgraph.engines.sync import ACTIONS, Entry

PROMPT = np.random.default_rng(4).integers(0, 256, 40)
LONG = 200
NORM = "model.norm.weight"
Weights = dict[str, Any]


def under_way(running: Running, count: int, then: Callable[[], Coroutine[Any, Any, Any]]) -> list[Generation]:
    """Responses of LONG tokens, `then` awaited while all of them are being decoded."""

    async def work() -> list[Generation]:
        asked = (running.ask(PROMPT[: 20 + k], LONG, key=k, rid=f"r{k}") for k in range(count))
        tasks = [asyncio.ensure_future(one) for one in asked]
        await running.running(count)
        await then()
        return list(await asyncio.gather(*tasks))

    return running.do(work())


def other(kind: str) -> str:
    return "base" if kind == "other" else "other"


@pytest.mark.parametrize("pause", PAUSE_MODES)
def test_requests_under_way_cross_a_sync_whole(running: Running, pause: PauseMode) -> None:
    running.serve("base")
    old = running.engine.version

    outs = under_way(running, 8, lambda: running.sync("other", pause))

    assert running.engine.version == old + 1
    crossed = 0
    for k, out in enumerate(outs):
        running.fits(out)
        assert (len(out.ids), out.finish_reason) == (LONG, "length")
        cut = int((out.versions == old).sum())
        assert out.versions.tolist() == [old] * cut + [old + 1] * (LONG - cut)
        crossed += 0 < cut < LONG
        for kind, part in (("base", slice(0, cut)), ("other", slice(cut, LONG))):
            if (
                kind == "base" or pause != "in_place"
            ):  # whose later tokens see keys and values of both weights
                forced = running.forced(PROMPT[: 20 + k], out, kind)
                np.testing.assert_allclose(out.logprobs[part], forced[part], atol=NEAR, rtol=0)
        assert bool(out.retractions) == (pause == "retract")
    assert crossed == len(outs)


@pytest.mark.parametrize("pause", PAUSE_MODES)
def test_a_later_request_sees_nothing_of_the_old_weights(running: Running, pause: PauseMode) -> None:
    """Though the same prompt has just been cached, and requests that began with it still run."""
    kind = running.kind
    new = other(kind) if kind in ("base", "other") else "base"
    late: list[Generation] = []

    async def sync() -> None:
        before = await running.ask(PROMPT, 4)
        running.check(PROMPT, before)
        await running.sync(new, pause)
        late.extend(await asyncio.gather(*(running.ask(PROMPT[:n], 8, key=n) for n in (40, 39, 27, 20))))

    under_way(running, 4, sync)
    for n, out in zip((40, 39, 27, 20), late, strict=True):
        assert set(out.versions.tolist()) == {running.engine.version}
        running.check(PROMPT[:n], out, kind=new)


@pytest.mark.parametrize("pause", PAUSE_MODES)
def test_a_request_is_aborted_while_the_engine_is_paused(running: Running, pause: PauseMode) -> None:
    running.serve("base")
    old, found = running.engine.version, []

    def abort(entry: Entry) -> None:
        if (entry.action, entry.outcome) == ("pause", "done"):
            found.append(running.engine.abort("r1"))

    running.seen = abort
    outs = under_way(running, 4, lambda: running.sync("other", pause))
    running.seen = lambda entry: None
    assert found[0]
    aborted = outs.pop(1)
    assert aborted.finish_reason == "abort"
    assert len(aborted.ids) < LONG
    running.fits(aborted)
    # SGLang ends a request that keeps its slot with the next token that it computes.
    cut = int((aborted.versions == old).sum())
    assert aborted.versions.tolist()[cut:] in ([], [old + 1])
    forced = running.forced(PROMPT[:21], aborted, "base")
    np.testing.assert_allclose(aborted.logprobs[:cut], forced[:cut], atol=NEAR, rtol=0)
    assert [(len(out.ids), out.finish_reason) for out in outs] == [(LONG, "length")] * 3


def without(weights: Weights, name: str) -> Weights:
    return {n: tensor for n, tensor in weights.items() if n != name}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: without(w, NORM), "'model.norm.weight' is missing"),
        (lambda w: without(w, EMBED), "'model.embed_tokens.weight' is missing"),
        (lambda w: w | {"extra": torch.ones(1)}, "'extra' is no weight"),
        (lambda w: w | {NORM: torch.ones(65)}, r"'model.norm.weight' is torch.float32 \[65\], .* \[64\]"),
        (lambda w: w | {NORM: torch.ones(64).bfloat16()}, "'model.norm.weight' is torch.bfloat16"),
        (lambda w: w | {NORM: np.ones(64)}, "'model.norm.weight' is a ndarray"),
        (lambda w: w | {HEAD: w[EMBED] + 1}, "'lm_head.weight' differs from 'model.embed_tokens"),
        (lambda w: w | {HEAD: w[EMBED][1:]}, "'lm_head.weight' is torch.float32"),
    ],
)
def test_weights_of_another_model_are_refused_and_change_nothing(
    running: Running, change: Callable[[Weights], Weights], says: str
) -> None:
    version = running.engine.version
    wrong = change(running.model.weights(other(running.kind)))
    with pytest.raises(ValueError, match=says):
        running.do(running.engine.sync(wrong, version + 1))
    assert running.engine.version == version
    out = running.answer(PROMPT, 4)
    running.check(PROMPT, out)
    assert set(out.versions.tolist()) == {version}


@pytest.mark.parametrize("version", [-1, 1 << 31])
def test_a_version_is_a_count_of_32_bits(running: Running, version: int) -> None:
    with pytest.raises(ValueError, match=f"unlike {version}"):
        running.do(running.engine.sync(running.model.weights(running.kind), version))
    running.check(PROMPT, running.answer(PROMPT, 4))


def test_a_tied_head_may_be_named_either_way(running: Running) -> None:
    for kind in ("other", "base"):
        weights = running.model.weights(kind)
        head = {HEAD: weights[EMBED]}
        for named in (weights, weights | head, without(weights, EMBED) | head):
            running.do(running.engine.sync(named, running.engine.version + 1))
            running.kind = kind
            running.check(PROMPT, running.answer(PROMPT, 4))


def test_a_sync_to_the_same_version_is_harmless(running: Running) -> None:
    synced = running.do(running.sync("other"))
    version = running.engine.version
    assert (synced.version, synced.replicas, synced.retries) == (version, len(running.engine.members), 0)
    again = running.do(running.engine.sync(running.model.weights("other"), version))
    assert (again.version, running.engine.version) == (version, version)
    out = running.answer(PROMPT, 4)
    running.check(PROMPT, out)
    assert set(out.versions.tolist()) == {version}


# The memory of the key/value cache

Mapping = tuple[int, int]


def resident(pid: int) -> dict[Mapping, int]:
    """Of every mapping of a process, its addresses and its resident bytes."""
    found: dict[Mapping, int] = {}
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, end = (int(bound, 16) for bound in first.split("-"))
        elif first == "Rss:":
            found[start, end] = int(rest[0]) * 1024
    return found


def test_a_sync_gives_the_memory_of_the_cache_back_and_takes_it_again(running: Running) -> None:
    if running.name == "sglang":
        pytest.skip("SGLang's memory saver needs a GPU: on a CPU it gives nothing back")
    layers, heads, width, size = 2, 2, 16, 4
    cache = 2 * layers * SLOTS * heads * CONTEXT * width * size
    pid = running.processes()[0] if running.processes() else os.getpid()
    name = running.engine.members[0].replica.name
    after: dict[str, dict[Mapping, int]] = {}
    resident(pid)  # which takes memory itself, the first time

    def look(entry: Entry) -> None:
        if entry.outcome == "done" and entry.replica == name:
            after[entry.action] = resident(pid)

    running.seen = look
    outs = under_way(running, 4, lambda: running.sync(other(running.kind)))
    running.seen = lambda entry: None
    assert {len(out.ids) for out in outs} == {LONG}

    assert list(after) == list(ACTIONS)
    full, empty, again = (after[action] for action in ("pause", "release", "resume"))
    assert sum(full.values()) - sum(empty.values()) == pytest.approx(cache, rel=0.1)
    # One mapping, which stays where it is. The kernel may have joined it with a neighbour.
    (where,) = [at for at in full if full[at] - empty.get(at, full[at]) >= cache]
    assert after["update"][where] - empty[where] < cache / 10
    assert again[where] == full[where]


def test_close_ends_what_was_begun_and_leaves_nothing(running: Running) -> None:
    """The last of this engine's tests."""
    pids = running.processes()
    assert len(pids) == {"embedded": 0, "two servers": 2}.get(running.name, 1)
    began = asyncio.ensure_future(running.ask(PROMPT, LONG), loop=running.loop)
    running.do(running.running(1))
    running.close()
    assert began.done()
    assert began.result().finish_reason == "abort"
    running.close()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not running.left()
