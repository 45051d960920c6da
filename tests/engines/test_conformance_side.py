"""Side channels as every engine of ours gives them, through the `Engine` protocol alone: embedded and in servers.

The truth is what plain transformers' router chooses in float32; see test_expert_recording.py for what is only asked of
the engine in this process.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from experts import routing
from running import NEAR, SLOTS, Running
from safetensors.torch import load_file, save_file
from served_model import ServedModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from flowgraph.engines.protocol import Generation, Side
from flowgraph.engines.registry import TransformersOptions
from flowgraph.models import ensure, facts
from flowgraph.models.quiet import no_progress_bar

PROMPT = [72, 101, 108, 108, 111, 44, 32, 119]
# One that takes deltas has the first weights from disk.
ENGINES = [
    pytest.param(("tiny-moe-300", {}), id="embedded"),
    pytest.param(("tiny-moe", {"processes": 1, "weights": "delta"}), id="one server"),
    pytest.param(("tiny-moe-300", {"processes": 2}), id="two servers", marks=pytest.mark.slow),
]
KEY = 6  # whose fourth and fifth tokens are printable
ASKED: dict[str, Any] = {"record": ("routed_experts",)}


class MadeModel:
    """A made model and weights of two kinds, each in a directory; as much of `ServedModel` as is asked for here."""

    def __init__(self, name: str, where: Path) -> None:
        self.name, self.directory, self.where = name, Path(ensure(name, progress=False).path), where
        random = torch.Generator().manual_seed(1)
        other = shutil.copytree(self.directory, where / "other")
        weights = self.weights("base")
        for tensor in weights.values():
            tensor += 0.05 * torch.randn(tensor.shape, generator=random)
        save_file(weights, other / "model.safetensors", metadata={"format": "pt"})

    def files(self, kind: str) -> Path:
        return self.directory if kind == "base" else self.where / kind

    def weights(self, kind: str) -> dict[str, Tensor]:
        return {name: t.float() for name, t in load_file(self.files(kind) / "model.safetensors").items()}

    def logprobs(self, kind: str, tokens: Any, temperature: float = 1.0) -> np.ndarray[Any, Any]:
        with no_progress_bar():
            model = AutoModelForCausalLM.from_pretrained(self.files(kind), dtype=torch.float32)
        ids = torch.tensor(np.asarray(tokens, np.int64))[None]
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].log_softmax(-1)
        return np.concatenate([np.zeros(1), logits.gather(1, ids[0, 1:, None])[:, 0].numpy()])


@pytest.fixture(scope="module", params=ENGINES)
def routed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    name, more = request.param
    model = MadeModel(name, tmp_path_factory.mktemp("made"))
    options = TransformersOptions(str(model.directory), slots=SLOTS, dtype="float32", **more)
    running = Running(name, options, cast(ServedModel, model), tmp_path_factory.mktemp("logs"))
    yield running
    running.close()


def chosen(running: Running, kind: str, tokens: list[int]) -> np.ndarray[Any, Any]:
    return routing(cast(MadeModel, running.model).files(kind), tokens)


def whole(side: Side, tokens: list[int]) -> bool:
    """There is a row for each token, and all but the last are recorded."""
    assert len(side.values) == len(side.recorded) == len(tokens)
    return side.recorded.tolist() == [True] * (len(tokens) - 1) + [False] and not side.values[-1].any()


def same_sets(side: Side, wanted: np.ndarray[Any, Any], rows: slice) -> None:
    np.testing.assert_array_equal(np.sort(side.values, axis=2)[rows], wanted[rows])


def test_every_token_but_the_last_has_the_experts_of_every_layer(routed: Running) -> None:
    """X1."""
    routed.serve("base")
    known = facts(cast(MadeModel, routed.model).name)
    assert known is not None
    prompts = [PROMPT[: 1 + at] for at in range(len(PROMPT))]
    outs = routed.answers(routed.ask(p, 9, key=at, **ASKED) for at, p in enumerate(prompts))
    for prompt, out in zip(prompts, outs, strict=True):
        tokens, side = [*prompt, *out.ids.tolist()], out.side["routed_experts"]
        assert side.values.dtype == (np.uint8 if known.experts == 32 else np.uint16)
        assert side.values.shape[1:] == (known.layers, known.top_k)
        assert whole(side, tokens)
        same_sets(side, chosen(routed, "base", tokens), slice(-1))


def test_nothing_is_recorded_that_nobody_asked_for(routed: Running) -> None:
    routed.serve("base")
    plain, recording = routed.answers(routed.ask(PROMPT, 9, **more) for more in ({}, ASKED))
    assert not plain.side
    assert plain.ids.tolist() == recording.ids.tolist()
    with pytest.raises(ValueError, match=r"record indexer_topk: .* 0 indexers|has no indexer"):
        routed.answer(PROMPT, 9, record=("indexer_topk",))


def test_rows_are_cut_as_the_ids_are(routed: Running) -> None:
    """X5. At a stop string, of two characters: that of the fourth token and that of the fifth."""
    routed.serve("base")
    long = routed.answer(PROMPT, 12, key=KEY)
    stop = "".join(chr(30 + int(id)) for id in long.ids[3:5])  # of token 3 and those after it: "!" and so on
    assert stop.isprintable()
    out = routed.answer(PROMPT, 12, key=KEY, stop=(stop,), **ASKED)
    assert (out.ids.tolist(), out.finish_reason) == (long.ids[:5].tolist(), "stop")
    assert whole(out.side["routed_experts"], [*PROMPT, *out.ids.tolist()])


def crossing(running: Running, pause: Any, kind: str) -> Generation:
    """A long response while weights of a kind become the newest ones."""

    async def main() -> Generation:
        (task,) = await running.begun(lambda: running.ask(PROMPT, 100, key=5, **ASKED))
        await running.sync(kind, pause)
        return await task

    return running.do(main())


def test_an_aborted_request_goes_on_and_is_the_whole(routed: Running) -> None:
    """X3. The weights stay as they are, so an uninterrupted response has the same tokens and the same rows."""
    routed.serve("base")
    straight = routed.answer(PROMPT, 100, key=5, **ASKED)
    out = crossing(routed, "abort", "base")
    assert len(set(out.versions.tolist())) == 2, "it was not met under way"
    assert out.ids.tolist() == straight.ids.tolist()
    one, other = out.side["routed_experts"], straight.side["routed_experts"]
    np.testing.assert_array_equal(one.recorded, other.recorded)
    np.testing.assert_array_equal(np.sort(one.values, axis=2), np.sort(other.values, axis=2))


@pytest.mark.parametrize("pause", ["retract", "abort"])
def test_rows_are_those_of_the_weights_that_each_token_was_sampled_under(routed: Running, pause: Any) -> None:
    """X3. What was recorded stays, and all that follows is what the new weights choose."""
    routed.serve("base")
    out = crossing(routed, pause, "other")
    tokens, side = [*PROMPT, *out.ids.tolist()], out.side["routed_experts"]
    old = int((out.versions == out.versions[0]).sum())
    assert 0 < old < len(out.ids), "it was not met under way"
    assert whole(side, tokens)
    kept = len(PROMPT) + old - 1
    same_sets(side, chosen(routed, "base", tokens), slice(kept))
    same_sets(side, chosen(routed, "other", tokens), slice(kept, -1))


def test_an_engine_serves_the_experts_that_it_was_given(routed: Running) -> None:
    """By every way that weights take: log-probabilities are those of plain transformers with the same files."""
    for kind in ("other", "base", "other"):
        routed.serve(kind)
        out = routed.answer(PROMPT, 9, key=3)
        wanted = routed.forced(PROMPT, out, kind)
        np.testing.assert_allclose(out.logprobs, wanted, atol=NEAR)
