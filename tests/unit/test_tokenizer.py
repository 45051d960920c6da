"""The tokenizer without transformers; tests/engines compares it with transformers on the real model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_model

from flowgraph.errors import ModelError
from flowgraph.models import Tokenizer
from flowgraph.models.convert import convert

HELLO = [{"role": "user", "content": "hi <b>"}]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_model.write_gguf(path / "tiny.gguf")
    convert(path / "tiny.gguf", path)
    return path


@pytest.fixture
def directory(converted: Path, tmp_path: Path) -> Path:
    """A copy of the small files, for tests that change them."""
    for file in converted.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change(path: Path, **values: Any) -> None:
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize(
    "text", ["", "plain text", "1 + 2 = 3\n\n4", "é 😀\t\r\n", "<|im_start|>user\n<|im_end|>"]
)
def test_text_comes_back_from_its_ids(converted: Path, text: str) -> None:
    tokenizer = Tokenizer(converted)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert tokenizer.decode(ids, skip_special=False) == text
    assert len(tokenizer) == len(tiny_model.tokens())


def test_special_tokens_are_single_ids_and_skipped_on_request(converted: Path) -> None:
    tokenizer = Tokenizer(converted)
    ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids.tolist(), skip_special=False) == "<|im_start|>a<|im_end|>"


def test_half_a_character_decodes_to_a_replacement(converted: Path) -> None:
    tokenizer = Tokenizer(converted)
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "�"


def test_saved_truncation_and_padding_are_ignored(directory: Path) -> None:
    import tokenizers

    saved = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    saved.enable_truncation(2)
    saved.enable_padding(length=8)
    saved.save(str(directory / "tokenizer.json"))
    assert len(Tokenizer(directory).encode("abc")) == 3


def test_eos_ids_come_from_the_first_file_that_says(directory: Path) -> None:
    change(directory / "generation_config.json", eos_token_id=[2, 0])
    assert Tokenizer(directory).eos_ids == (2, 0)
    change(directory / "generation_config.json", eos_token_id=None)
    change(directory / "config.json", eos_token_id=0)
    assert Tokenizer(directory).eos_ids == (0,)
    change(directory / "config.json", eos_token_id=None)
    assert Tokenizer(directory).eos_ids == (2,)
    change(directory / "tokenizer_config.json", eos_token=None)
    assert Tokenizer(directory).eos_ids == ()


def test_no_tokenizer_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)


# chat


def test_a_system_message_is_put_in_front(converted: Path) -> None:
    tokenizer = Tokenizer(converted)
    user = "<|im_start|>user\nhi <b><|im_end|>\n"
    assert tokenizer.chat(HELLO) == user
    assert tokenizer.chat(HELLO, system="S") == f"<|im_start|>system\nS<|im_end|>\n{user}"
    with pytest.raises(ValueError, match="begin with a system message"):
        tokenizer.chat([{"role": "system", "content": "T"}, *HELLO], system="S")


def test_the_jinja_file_wins_and_a_list_has_a_default(directory: Path) -> None:
    named = [{"name": "tool", "template": "no"}, {"name": "default", "template": "list"}]
    change(directory / "tokenizer_config.json", chat_template=named)
    assert Tokenizer(directory).chat(HELLO) == "list"
    (directory / "chat_template.jinja").write_text("file")
    assert Tokenizer(directory).chat(HELLO) == "file"


def test_no_template_and_a_template_that_refuses_are_model_errors(directory: Path) -> None:
    change(directory / "tokenizer_config.json", chat_template=None)
    with pytest.raises(ModelError, match="no chat template"):
        Tokenizer(directory).chat(HELLO)
    (directory / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ModelError, match="refused: roles must alternate"):
        Tokenizer(directory).chat(HELLO)
    (directory / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ModelError, match="chat template refused"):
        Tokenizer(directory).chat(HELLO)


def test_a_template_runs_in_a_sandbox(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(ModelError, match="refused"):
        Tokenizer(directory).chat(HELLO)
    (directory / "chat_template.jinja").write_text("{{ messages.append(1) }}")
    with pytest.raises(ModelError, match="refused"):
        Tokenizer(directory).chat(HELLO)


def test_text_that_goes_on_has_no_space_of_a_first_word(tmp_path: Path) -> None:
    """A tokenizer as Llama 2's, which marks the first word of a text with a space."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Fast

    words = ["<unk>", "▁", "a", "b", "</s>"]
    fast = Fast(models.Unigram([(word, -float(i)) for i, word in enumerate(words)], unk_id=0))
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    fast.decoder = decoders.Metaspace(prepend_scheme="first")
    fast.add_special_tokens([AddedToken("</s>", normalized=False)])
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    whole = tokenizer.encode("a b</s>ab").tolist()
    assert whole == [*tokenizer.encode("a b"), *tokenizer.encode("</s>ab", follows=True)]
    assert tokenizer.encode("ab", follows=True).tolist() == [words.index("a"), words.index("b")]
    assert tokenizer.encode("ab").tolist() == [words.index(word) for word in "▁ab"]


def test_tools_reach_the_template(directory: Path) -> None:
    change(
        directory / "tokenizer_config.json",
        chat_template="{% for t in tools or [] %}{{ t.name }} {% endfor %}{{ messages[0].content }}",
    )
    assert Tokenizer(directory).chat(HELLO, tools=[{"name": "add"}]) == "add hi <b>"
    assert Tokenizer(directory).chat(HELLO) == "hi <b>"
