"""An indexer's positions follow their tokens into training, and are what attention reads there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from learner_rows import LOSS, sampled
from tiny_llama import SIZES, save_model
from transformers import AutoModelForCausalLM, DeepseekV32Config

from flowgraph.errors import ModelError
from flowgraph.learners.protocol import Rows
from flowgraph.learners.torch import TorchLearner
from flowgraph.models.choices import Choices
from flowgraph.models.positions import Positions

TOP_K = 4
INDEXED = {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
INDEXED |= {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
INDEXED |= {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
INDEXED |= {"index_n_heads": 2, "index_head_dim": 16, "index_topk": TOP_K, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"} | {"initializer_range": 0.1}
    config = DeepseekV32Config(**sizes | INDEXED, tie_word_embeddings=False)
    return save_model(tmp_path_factory.mktemp("indexed"), config)


def learner(model: Path, **more: object) -> TorchLearner:
    options = {"lr": 1e-3, "dtype": "float32", "pack": "padded", "threads": 1, "max_tokens": 40} | more
    return TorchLearner(str(model), **options)  # type: ignore[arg-type]


def recorded(model: Path, rows: Rows) -> Rows:
    """Both channels as an engine gives them: the model's choice for each row alone, own positions to fill up."""
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    choices, positions = Choices(whole), Positions(whole)
    routed = np.zeros((len(rows.tokens), choices.layers, choices.top_k), np.uint8)
    at = np.zeros((len(rows.tokens), positions.layers, positions.top_k), np.int32)
    there = np.zeros(len(rows.tokens), np.bool_)
    for start, stop in zip(rows.offsets[:-1], rows.offsets[1:], strict=True):
        stop = stop - 1  # the last token was sampled, and never computed
        ids = torch.from_numpy(rows.tokens[start:stop].astype(np.int64))
        with torch.no_grad(), choices.capture() as experts, positions.capture() as attended:
            whole(input_ids=ids[None], use_cache=False)
        own = np.arange(stop - start)[:, None, None]
        found = attended.indices.numpy()
        at[start:stop] = own
        at[start:stop, :, : found.shape[2]] = np.minimum(found, own)
        routed[start:stop] = experts.indices.numpy()
        there[start:stop] = True
    return rows._replace(side={"routed_experts": routed, "indexer_topk": at}, recorded=there)


def other_positions(rows: Rows) -> Rows:
    """Random positions at or before each token, its own among them."""
    random, at = np.random.default_rng(3), rows.side["indexer_topk"].copy()
    own = np.arange(len(at)) - np.repeat(rows.offsets[:-1], np.diff(rows.offsets))
    at[:] = random.integers(own[:, None, None] + 1, size=at.shape)
    at[..., 0] = own[:, None]
    return rows._replace(side={**rows.side, "indexer_topk": at})


def test_its_own_positions_put_in_give_its_own_bits(indexed: Path) -> None:
    """Each row alone: beside others, it would choose otherwise between positions of equal scores."""
    plain = sampled(3, 5, 2, 9)
    rows = recorded(indexed, plain)
    trained = learner(indexed, max_tokens=1)
    assert trained.logprobs(rows).tobytes() == trained.logprobs(plain).tobytes()
    found = trained.step(rows, LOSS, replay=False)
    assert (found["recorded"], found["routing_mismatch"], found["indexer_mismatch"]) == (1, 0, 0)


def test_X7_training_attends_to_what_was_recorded_wherever_its_row_was_packed(indexed: Path) -> None:
    """Rows beside each other in a batch, and each alone: the same log-probabilities, and others than without replay."""
    rows = other_positions(recorded(indexed, sampled(3, 5, 2, 9)))
    assert rows.recorded is not None
    trained = learner(indexed)
    together = trained.logprobs(rows)
    for start, stop in zip(rows.offsets[:-1], rows.offsets[1:], strict=True):
        part = slice(int(start), int(stop))
        side = {name: values[part] for name, values in rows.side.items()}
        alone = Rows(
            rows.tokens[part], np.array([0, stop - start]), rows.mask[part], {}, side, rows.recorded[part]
        )
        np.testing.assert_allclose(trained.logprobs(alone), together[part], atol=1e-5)
    without = trained.logprobs(rows, replay=False)
    assert np.abs(without - together)[rows.mask].mean() > 1e-3
    found = trained.step(rows, LOSS)
    assert (found["routing_mismatch"], found["indexer_mismatch"]) == (0, 0)
    assert learner(indexed).step(rows, LOSS, replay=False)["indexer_mismatch"] > 0.2


def test_a_position_of_another_line_or_of_too_few_tokens_is_refused(indexed: Path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(indexed, dtype=torch.float32).eval()
    positions = Positions(whole)
    ids, given = torch.ones(2, 6, dtype=torch.int64), torch.ones(12, dtype=torch.bool)
    zeros = torch.zeros(12, positions.layers, TOP_K, dtype=torch.int64)
    with pytest.raises(ValueError, match="of another line"), positions.force(zeros, given):
        whole(input_ids=ids, use_cache=False)
    with pytest.raises(ValueError, match="of 12 tokens were given"), positions.force(zeros, given):
        whole(input_ids=ids[:1], use_cache=False)
    with (
        pytest.raises(ValueError, match=r"positions are \[12, 3, 3\]"),
        positions.force(zeros[..., 1:], given),
    ):
        pass
    with positions.capture() as attended, pytest.raises(RuntimeError, match="no forward of the model"):
        _ = attended.indices


def test_what_cannot_read_an_indexers_positions_is_refused_by_name(indexed: Path, tiny: Path) -> None:
    with pytest.raises(NotImplementedError, match="DeepseekV32ForCausalLM, which reads the positions that"):
        learner(indexed, pack="tree")
    with pytest.raises(ModelError, match="LlamaForCausalLM has 0 indexers in 2 layers"):
        Positions(AutoModelForCausalLM.from_pretrained(tiny))
