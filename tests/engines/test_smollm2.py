"""The built-in model as it is pulled: it works in transformers, and our readers agree with transformers."""

from pathlib import Path
from typing import Any

import pytest

from flowgraph.models import Tokenizer, facts
from flowgraph.models.directory import check_directory
from flowgraph.models.facts import directory_facts

TEXTS = [
    "",
    "The capital of France is",
    "1234 + 56 = 1290\n\n7",
    "a  12\tb\r\n\r\n3",
    "  lead and trail  ",
    "don't I'll café 😀 日本語 ½ ٣",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "def f(x):\n    return x ** 2\n",
]

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is 2 + 3?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
    [
        {"role": "user", "content": "a\n\n1"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "<c> & 'd'"},
    ],
]

# One line per feature in which template engines differ.
TEMPLATES = [
    "{% for m in messages %}\n  {% if loop.last %}\n{% break %}\n{% endif %}\n{{ m.role }}\n{% endfor %}\n",
    "{{ messages | tojson }} {{ messages | tojson(indent=2) }} {{ 'é<&>' | tojson }}",
    "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|{{ tools is none }}|{{ nothing }}",
    "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ strftime_now('%Y') }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% if add_generation_prompt %}prompt{% endif %}",
]


@pytest.fixture(scope="module")
def reference(smollm2: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


def test_the_directory_is_complete_and_the_shipped_facts_are_its_facts(smollm2: str) -> None:
    check_directory(Path(smollm2))
    assert directory_facts(Path(smollm2)) == facts("smollm2-135m")


def test_the_config_is_the_published_one(smollm2: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(smollm2)
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings is True
    assert config.max_position_embeddings == 8192
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)


def test_it_knows_the_capital_of_france(smollm2: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2)
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    names = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    shipped = facts("smollm2-135m")
    assert shipped is not None
    assert names == {tensor.name: tensor.shape for tensor in shipped.tensors}
    tokenizer = Tokenizer(smollm2)
    ids = torch.tensor(tokenizer.encode("The capital of France is"))[None].long()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4)
    assert "Paris" in tokenizer.decode(out[0].tolist())


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_are_those_of_transformers(smollm2: str, reference: Any, text: str) -> None:
    tokenizer = Tokenizer(smollm2)
    ids = tokenizer.encode(text).tolist()
    assert ids == reference(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special=False) == text
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special=skip) == reference.decode(ids, skip_special_tokens=skip)


def test_digits_stand_alone_and_double_newlines_are_one_token(smollm2: str) -> None:
    tokenizer = Tokenizer(smollm2)
    pieces = [tokenizer.decode([id]) for id in tokenizer.encode("12 + 3\n\n45")]
    assert pieces == ["1", "2", " +", " ", "3", "\n\n", "4", "5"]


def test_special_tokens_and_eos_are_kept(smollm2: str, reference: Any) -> None:
    tokenizer = Tokenizer(smollm2)
    ids = tokenizer.encode("<|endoftext|><|im_start|><|im_end|><file_sep><empty_output>").tolist()
    assert ids == [0, 1, 2, 5, 16]
    assert tokenizer.eos_ids == (2,)
    assert len(tokenizer) == len(reference) == 49152


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
def test_chats_are_rendered_as_by_transformers(
    smollm2: str, reference: Any, chat: list[dict[str, str]], prompt: bool
) -> None:
    expected = reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
    assert Tokenizer(smollm2).chat(chat, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_mean_what_they_mean_to_transformers(
    smollm2: str, reference: Any, template: str, tmp_path: Path
) -> None:
    for file in Path(smollm2).glob("*.json"):
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text(template)
    expected = reference.apply_chat_template(
        CHATS[2], chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert Tokenizer(tmp_path).chat(CHATS[2]) == expected
