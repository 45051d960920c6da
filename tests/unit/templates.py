"""Chat templates beside the model's own, each with a habit that breaks the joining of turns. In SmolLM2's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowgraph import Tokenizer
from flowgraph.models.chat import render

# As Qwen3's: thinking is taken out of every answer before the last question.
STRIPS_THINKING = """\
{%- set at = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set at.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set content = m.content %}
{%- if m.role == 'assistant' and loop.index0 < at.last and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

# As Llama 3's: a BOS once in front, contents trimmed, nothing between the end of a message and the next.
TRIMS = """\
{{- '<|endoftext|>' }}
{%- for m in messages %}{{- '[' + m.role + ']\\n' + m.content | trim + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{- '[assistant]\\n' }}{% endif %}"""

# As Mistral's: no token of its own where the answer begins or the question ends, and an answer begins with a space.
INLINE = """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- ' ' + m.content + '<|im_end|>' }}
{%- else %}{{- '[INST] ' + m.content + ' [/INST]' }}{% endif %}
{%- endfor %}"""


class Templated:
    """The model's tokenizer with another chat template."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self.tokenizer, self.template = tokenizer, template
        self.eos_ids, self.encode, self.decode = tokenizer.eos_ids, tokenizer.encode, tokenizer.decode

    def chat(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> str:
        return render(self.template, messages=list(messages), add_generation_prompt=True)


def of(tokenizer: Tokenizer, name: str) -> Any:
    """The tokenizer with a template by name; "own" is the model's."""
    return tokenizer if name == "own" else Templated(tokenizer, globals()[name])


NAMES = ("own", "STRIPS_THINKING", "TRIMS", "INLINE")
