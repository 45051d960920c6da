"""Routed experts and indexer positions out of a server's replies: real ones, and the documented form in general.

With FLOWGRAPH_SGLANG_PYTHON, an interpreter with SGLang's CPU recipe, replies are also asked of a server that runs.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from experts import routing, save_experts
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgraph.engines.served.side import Channels, Side, channels, indexed, joined, routed
from flowgraph.models import facts

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("replies.json").read_text())
QWEN = Channels(layers=3, experts=8, top_k=2, moe_layers=(0, 1, 2))
GLM = Channels(layers=4, experts=300, top_k=4, moe_layers=(1, 2, 3))
DENSE = msgspec.structs.replace(QWEN, moe_layers=(1, 2))
MODELS = {"qwen": QWEN, "glm": GLM}


class Meta(msgspec.Struct):
    id: str
    routed_experts: bytes | None = None


class Reply(msgspec.Struct):
    meta_info: Meta
    output_ids: list[int]


def decoded(request: dict[str, Any], reply: dict[str, Any], model: Channels) -> tuple[list[int], Side]:
    """All tokens of a turn, and its side channel, from the JSON of its reply."""
    read = msgspec.json.decode(json.dumps(reply), type=Reply)
    ids = request["input_ids"] + read.output_ids
    start = request.get("routed_experts_start_len", 0)
    raw = read.meta_info.routed_experts
    return ids, routed(raw, model, rid=read.meta_info.id, tokens=len(ids), start=start)


def same_sets(side: Side, chosen: np.ndarray[Any, Any]) -> bool:
    """Whether every recorded token has the same experts as transformers chose, in every layer."""
    return bool((np.sort(side.values, axis=2)[side.recorded] == chosen[side.recorded]).all())


# --- replies of a real server -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [("qwen", np.uint8), ("glm", np.uint16)])
def test_a_real_reply_says_what_transformers_router_chooses(name: str, dtype: type) -> None:
    turn = RECORDED[name]["turns"][0]
    ids, side = decoded(turn["request"], turn["reply"], MODELS[name])
    assert side.values.dtype == dtype
    assert side.values.shape == (len(ids), MODELS[name].layers, MODELS[name].top_k)
    assert side.recorded.tolist() == [True] * (len(ids) - 1) + [False]
    assert not side.values[-1].any()
    assert same_sets(side, np.array(RECORDED[name]["transformers"])[: len(ids)])


@pytest.mark.parametrize("name", ["qwen", "glm"])
def test_a_second_turn_adds_the_rows_that_the_first_lacks(name: str) -> None:
    """X3. The server had the first turn's tokens cached; it was asked for rows from where the first turn ends."""
    first, second = RECORDED[name]["turns"]
    before, kept = decoded(first["request"], first["reply"], MODELS[name])
    ids, more = decoded(second["request"], second["reply"], MODELS[name])
    assert second["reply"]["meta_info"]["cached_tokens"] == len(before) - 1 == kept.start
    assert more.recorded.tolist() == [False] * kept.start + [True] * (len(ids) - 1 - kept.start) + [False]
    whole = joined(kept, more, rid="two")
    assert whole.recorded.tolist() == [True] * (len(ids) - 1) + [False]
    assert same_sets(whole, np.array(RECORDED[name]["transformers"]))
    np.testing.assert_array_equal(whole.values[: len(before) - 1], kept.values[:-1])


def test_a_layer_to_which_only_the_server_gives_experts_is_refused() -> None:
    turn = RECORDED["qwen_dense"]["turns"][0]
    with pytest.raises(
        ValueError, match=r"^3f0c6a.* of layer 0, row 0: experts \[\d, \d\], expected 0, .* none"
    ):
        decoded(turn["request"], turn["reply"], DENSE)


# --- the documented form, in general ----------------------------------------------------------------------------------

steady = settings(deadline=None)


def sent(values: np.ndarray[Any, Any]) -> bytes:
    """What the server sends of a tensor of int32, through the JSON of a reply and its base64."""
    text = base64.b64encode(values.astype("<i4").tobytes()).decode()
    return msgspec.json.decode(json.dumps(text), type=bytes)


@st.composite
def routings(draw: st.DrawFn) -> tuple[Channels, np.ndarray[Any, Any]]:
    """A model with experts, and int32 [rows, layers, top_k] as a server would record for it, with at least a row."""
    top_k = draw(st.integers(1, 5))
    experts = draw(st.integers(top_k + 1, 600))
    layers = draw(st.integers(1, 4))
    moe = draw(st.sets(st.integers(0, layers - 1), min_size=1))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = np.zeros((draw(st.integers(1, 12)), layers, top_k), np.int32)
    for row in values:
        for layer in moe:
            # not 0 where it would be the only choice, which can't be told from no choice
            row[layer] = random.choice(experts - (top_k == 1), top_k, replace=False) + (top_k == 1)
    return Channels(layers, experts, top_k, tuple(sorted(moe))), values


@steady
@given(routings(), st.data())
def test_what_is_sent_is_what_is_read(
    made: tuple[Channels, np.ndarray[Any, Any]], data: st.DataObject
) -> None:
    """X1, X2, on the documented form: rows of all but the last token; rows that are 0 throughout are not recorded."""
    model, values = made
    lost = data.draw(st.sets(st.integers(0, len(values) - 1), max_size=len(values) - 1))
    values[list(lost)] = 0
    start = data.draw(st.integers(0, 3))
    tokens = start + len(values) + 1
    side = routed(sent(values), model, rid="r", tokens=tokens, start=start)
    assert side.values.dtype == (np.uint8 if model.experts <= 256 else np.uint16)
    np.testing.assert_array_equal(side.values[start:-1], values)
    recorded = [start <= at < tokens - 1 and at - start not in lost for at in range(tokens)]
    assert side.recorded.tolist() == recorded
    assert not side.values[~side.recorded].any()


@steady
@given(routings(), st.data())
def test_a_trajectory_in_parts_is_the_whole(
    made: tuple[Channels, np.ndarray[Any, Any]], data: st.DataObject
) -> None:
    """X3, on the documented form: an aborted request that was resumed, wherever it was cut, and from wherever asked."""
    model, values = made
    tokens = len(values) + 1
    whole = routed(sent(values), model, rid="r", tokens=tokens)
    cut = data.draw(st.integers(1, tokens))
    first = routed(sent(values[: cut - 1]), model, rid="r", tokens=cut)
    assert first.start == cut - 1
    start = data.draw(st.integers(0, first.start))
    other = values.copy()
    other[: first.start] = np.roll(other[: first.start], 1, axis=2)  # as other weights might have chosen
    second = routed(sent(other[start:]), model, rid="r", tokens=tokens, start=start)
    both = joined(first, second, rid="r")
    np.testing.assert_array_equal(both.values, whole.values)
    np.testing.assert_array_equal(both.recorded, whole.recorded)


@steady
@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 6), st.integers(0, 2**32))
def test_indexer_positions_become_positions_throughout(tokens: int, layers: int, k: int, seed: int) -> None:
    """On the documented form, as SGLang records an indexer on GPUs only: -1 fills up what a token lacks before it."""
    random = np.random.default_rng(seed)
    wide = np.full((tokens - 1, layers, k), -1, np.int32)
    for row, layer in np.ndindex(tokens - 1, layers):
        found = random.permutation(row + 1)[:k]
        wide[row, layer, : len(found)] = found
    side = indexed(sent(wide), Channels(layers, index_layers=layers, index_top_k=k), rid="r", tokens=tokens)
    own = np.arange(tokens - 1)[:, None, None]
    np.testing.assert_array_equal(side.values[:-1], np.where(wide < 0, own, wide))
    assert side.values.dtype == np.uint8
    assert side.recorded.tolist() == [True] * (tokens - 1) + [False]


def test_positions_take_the_dtype_that_the_trajectory_needs() -> None:
    model = Channels(1, index_layers=1, index_top_k=1)
    for tokens, dtype in ((256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.uint32)):
        wide = np.arange(tokens - 1, dtype=np.int32)[:, None, None]
        side = indexed(sent(wide), model, rid="r", tokens=tokens)
        assert side.values.dtype == dtype
        np.testing.assert_array_equal(side.values[:-1], wide)


def test_rows_of_other_weights_are_left_out() -> None:
    """A request that was retracted while the weights changed: `since` is the first row of the new ones."""
    values = np.array([[[1, 0]], [[2, 3]], [[4, 5]], [[6, 7]]])
    side = routed(sent(values), Channels(1, 8, 2, (0,)), rid="r", tokens=5, since=2)
    assert side.recorded.tolist() == [False, False, True, True, False]
    assert side.values[:, 0].tolist() == [[0, 0], [0, 0], [4, 5], [6, 7], [0, 0]]


def test_one_choice_of_expert_0_is_no_fault() -> None:
    side = routed(sent(np.array([[[0], [1]], [[0], [0]]])), Channels(2, 4, 1, (0, 1)), rid="r", tokens=3)
    assert side.recorded.tolist() == [True, False, False]


ROUTED = [[[1, 0], [2, 3]], [[3, 2], [0, 1]]]


def _routed(change: Callable[[np.ndarray[Any, Any]], None], tokens: int = 3) -> Side:
    values = np.array(ROUTED)
    change(values)
    return routed(sent(values), Channels(2, 4, 2, (0, 1)), rid="r7", tokens=tokens)


def _set(at: Any, value: Any) -> Callable[[np.ndarray[Any, Any]], None]:
    return lambda values: values.__setitem__(at, value)


@pytest.mark.parametrize(
    ("change", "tokens", "says"),
    [
        (_set((1, 0, 1), 4), 3, r"of layer 0, row 1: expert 4, expected 0 to 3"),
        (_set((0, 1, 0), -1), 3, r"of layer 1, row 0: expert -1, expected 0 to 3"),
        (_set((1, 1), 0), 3, r"of layer 1, row 1: \[0, 0\] was not recorded, expected distinct choices"),
        (_set((slice(None), 0), 0), 3, r"of layer 0, row 0: \[0, 0\] was not recorded"),
        (_set((0, 0), 3), 3, r"of layer 0, row 0: \[3, 3\] was not recorded"),
        (_set(..., 0), 3, r"of layer 0, row 0: nothing, nor in any other; .* recorded none"),
        (_set((), ROUTED), 4, r"has 32 bytes, 2 rows; expected 3 rows \(of 4 tokens, from 0 on.*2 layers, 2 int32"),
    ],
)  # fmt: skip
def test_what_is_no_routing_is_refused_by_name(change: Any, tokens: int, says: str) -> None:
    with pytest.raises(ValueError, match=f"^r7: routed_experts {says}"):
        _routed(change, tokens)


def test_a_layer_without_experts_has_none() -> None:
    with pytest.raises(
        ValueError, match=r"^r: routed_experts of layer 1, row 0: experts \[2, 3\], expected 0"
    ):
        routed(sent(np.array(ROUTED)), Channels(2, 4, 2, (0,)), rid="r", tokens=3)


def test_what_was_not_asked_for_says_how_to_ask() -> None:
    with pytest.raises(
        ValueError, match=r"^r: the reply has no routed_experts.*--enable-return-routed-experts"
    ):
        routed(None, QWEN, rid="r", tokens=3)
    with pytest.raises(ValueError, match=r"^r: no layer of the model has experts"):
        routed(b"", Channels(2), rid="r", tokens=3)
    with pytest.raises(ValueError, match=r"^r: the model has no indexer"):
        indexed(b"", QWEN, rid="r", tokens=3)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ([2, 0], r"row 1: position 2, expected 0 to 1 or -1; .*SGLANG_DSA_FUSE_TOPK=0"),
        ([-2, 0], r"row 1: position -2, expected"),
        ([1, 1], r"row 1: \[1, 1\] was not recorded"),
    ],
)
def test_what_is_no_position_is_refused_by_name(row: list[int], says: str) -> None:
    """A slot of the server's cache is what its fused kernel gives in place of a position."""
    with pytest.raises(ValueError, match=f"^r: indexer_topk of layer 0, {says}"):
        indexed(
            sent(np.array([[[0, -1]], [row]])),
            Channels(1, index_layers=1, index_top_k=2),
            rid="r",
            tokens=3,
        )


@pytest.mark.parametrize("row", [[0, 0], [-1, -1]])
def test_positions_that_were_not_recorded_are_marked(row: list[int]) -> None:
    model = Channels(1, index_layers=1, index_top_k=2)
    side = indexed(sent(np.array([[[0, -1]], [row]])), model, rid="r", tokens=3)
    assert side.recorded.tolist() == [True, False, False]
    assert side.values[:, 0].tolist() == [[0, 0], [0, 0], [0, 0]]


def test_only_a_longer_trajectory_of_the_same_model_goes_on() -> None:
    one = _routed(_set((), ROUTED))
    for other in (routed(sent(np.array(ROUTED[:1])), Channels(2, 4, 2, (0, 1)), rid="r", tokens=2),
                  routed(sent(np.array([[[1, 0]]] * 3)), Channels(1, 4, 2, (0,)), rid="r", tokens=4)):  # fmt: skip
        with pytest.raises(
            ValueError, match=r"^r9: a side channel of .* can't go on from one of \[3, 2, 2\]"
        ):
            joined(one, other, rid="r9")


def test_a_models_side_channels_come_from_its_facts() -> None:
    dense, qwen, deepseek = (facts(name) for name in ("smollm2-135m", "qwen3-30b-a3b", "deepseek-v3.2"))
    assert dense is not None
    assert qwen is not None
    assert deepseek is not None
    assert channels(dense) == Channels(layers=30)
    assert channels(qwen) == Channels(48, 128, 8, tuple(range(48)))
    assert channels(deepseek) == Channels(61, 256, 8, tuple(range(3, 61)), 61, 2048)


# --- a server that runs -----------------------------------------------------------------------------------------------

PYTHON = os.environ.get("FLOWGRAPH_SGLANG_PYTHON")
running = [pytest.mark.sglang, pytest.mark.timeout(900)]


def asked(ids: list[int], tokens: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": sampling, "return_routed_experts": True}


class Server:
    """SGLang on CPU in fp32, that records routing."""

    def __init__(self, model_dir: Path, log: Path) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{one.getsockname()[1]}"
        flags = {
            "model-path": model_dir,
            "device": "cpu",
            "dtype": "float32",
            "port": self.url.rpartition(":")[2],
        }
        flags |= {"max-total-tokens": 4096, "max-running-requests": 8}
        command = [PYTHON, "-m", "sglang.launch_server", "--sleep-on-idle", "--enable-return-routed-experts"]
        command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        variables = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, env=variables, stdout=out, stderr=out, start_new_session=True
            )
        end = time.monotonic() + 600
        while not self._answers():
            assert self.process.poll() is None, log.read_text(errors="replace")[-2000:]
            assert time.monotonic() < end, log.read_text(errors="replace")[-2000:]
            time.sleep(0.5)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=20):
                return True
        except OSError:
            return False

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
        return urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=300)

    def turn(self, ids: list[int], tokens: int, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """A request and its reply."""
        request = asked(ids, tokens) | more
        with self._post("/generate", request) as reply:
            return request, json.loads(reply.read())

    def cut(self, ids: list[int], tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The same, aborted by a pause after its first tokens."""
        request = asked(ids, tokens) | {"stream": True}
        with self._post("/generate", request) as reply:
            reply.readline()
            for path, body in (("/pause_generation", {"mode": "abort"}), ("/continue_generation", {})):
                self._post(path, body).close()
            parts = [line[6:] for line in reply.read().splitlines() if line.startswith(b"data: {")]
        return request, json.loads(parts[-1])

    def end(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module", params=["qwen", "glm"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Path, Channels]]:
    where = tmp_path_factory.mktemp("served")
    model_dir = save_experts(where / "model", request.param)
    server = Server(model_dir, where / "log")
    yield server, model_dir, MODELS[request.param]
    server.end()


class TestServer:
    pytestmark = running

    def test_the_models_own_facts_fit(self, served: tuple[Server, Path, Channels]) -> None:
        _, model_dir, model = served
        found = facts(str(model_dir))
        assert found is not None
        assert channels(found) == model

    def test_every_token_was_routed_as_transformers_routes_it(
        self, served: tuple[Server, Path, Channels]
    ) -> None:
        """In fp32, over a first turn and one that goes on from it out of the prefix cache."""
        server, model_dir, model = served
        before, first = decoded(*server.turn(list(range(60, 90)), 40), model)
        request, reply = server.turn([*before, 7, 8], 8, routed_experts_start_len=first.start)
        assert reply["meta_info"]["cached_tokens"] >= first.start
        ids, second = decoded(request, reply, model)
        whole = joined(first, second, rid="r")
        assert whole.recorded.sum() == len(ids) - 1
        assert same_sets(whole, routing(model_dir, ids))
        again, at_once = decoded(*server.turn(ids, 1), model)
        np.testing.assert_array_equal(at_once.values[: len(ids) - 1], whole.values[:-1])
        assert len(again) == len(ids) + 1

    def test_an_aborted_request_goes_on_where_it_ended(self, served: tuple[Server, Path, Channels]) -> None:
        server, model_dir, model = served

        request, reply = server.cut(list(range(40, 50)), 400)
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        part, first = decoded(request, reply, model)
        assert 10 < len(part) < 410
        ids, second = decoded(*server.turn(part, 5, routed_experts_start_len=first.start), model)
        whole = joined(first, second, rid="r")
        assert whole.recorded.sum() == len(ids) - 1
        assert same_sets(whole, routing(model_dir, ids))
