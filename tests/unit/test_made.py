"""Models that are made here: with random weights that are the same everywhere, and without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flowgraph.models import Tokenizer, ensure, facts
from flowgraph.models.directory import check_directory
from flowgraph.models.facts import directory_facts

# Of the weights' file, as every machine makes it.
MADE = {
    "tiny-moe": "8af103f3fca284c28e7fc0e04e76d5db7f03c1df541b3d90fc9b39863e50a348",
    "tiny-moe-300": "a3ee748850ba4ad17e23e5eed5ddc4fc2551b64331a519b7e3fed232ab038b35",
    "tiny-dsa": "e7d919e57acd4eddbd783279d983f3fd09125a367c82b00a345885ea5e9658df",
}
CHOICES = {"tiny-moe": (4, 32, 2, None), "tiny-moe-300": (4, 300, 4, None), "tiny-dsa": (3, 16, 2, 8)}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWGRAPH_CACHE", str(tmp_path))


@pytest.mark.parametrize("name", MADE)
def test_a_made_model_has_the_same_bits_everywhere_and_is_what_the_facts_say(name: str) -> None:
    found = ensure(name, progress=False)
    assert (found.source, found.sha256) == (f"made:{name}", MADE[name])
    assert ensure(name) == found
    check_directory(Path(found.path))
    shipped = facts(name)
    assert shipped is not None
    assert directory_facts(Path(found.path)) == shipped
    assert shipped.layers == 4
    assert (shipped.moe_layers, shipped.experts, shipped.top_k, shipped.index_top_k) == CHOICES[name]
    assert shipped.bytes == sum(t.bytes for t in shipped.tensors) == 2 * shipped.parameters


def test_it_reads_and_writes_any_text_byte_by_byte() -> None:
    tokenizer = Tokenizer(ensure("tiny-moe", progress=False).path)
    text = " Zoë:\n\t1+1"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 259
    assert tokenizer.eos_ids == (2,)
    chat = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(chat)[0] == 1


def test_it_is_made_without_torch() -> None:
    code = (
        "import sys; from flowgraph.models import ensure; ensure('tiny-moe'); print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
