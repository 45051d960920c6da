"""Text ↔ token ids, and chats → text, for processes that import no torch and no transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowgraph.errors import ModelError
from flowgraph.models.chat import render
from flowgraph.models.directory import read_json

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of a model directory. Gives the ids and the text that transformers' AutoTokenizer gives.

    Raises ModelError when the directory has no tokenizer.json.
    """

    def __init__(self, model_dir: str | PathLike[str]) -> None:
        import tokenizers

        path = Path(model_dir)
        if not (path / "tokenizer.json").is_file():
            help = "save a fast tokenizer there with save_pretrained"
            raise ModelError(f"{path} has no tokenizer.json", help)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        # A tokenizer.json may carry the truncation and padding of the run that saved it.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _optional(path / "tokenizer_config.json")
        self._special = _special_tokens({**_optional(path / "special_tokens_map.json"), **config})
        self._anchor = self._some_special()
        self._template = _template(path, config)
        self.eos_ids: tuple[int, ...] = self._eos(path)
        """Ids that end a response: generation_config.json's, else config.json's, else the tokenizer's."""

    def __len__(self) -> int:
        """Number of ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, follows: bool = False) -> NDArray[np.int32]:
        """int32[token]. Adds no special tokens; those spelled in the text become their ids.

        follows: the text goes on after other text. A tokenizer that marks the first word of a text with a space does
        not do so then.
        """
        anchor = self._anchor if follows else ""
        ids = self._tokenizer.encode(anchor + text, add_special_tokens=False).ids
        return np.array(ids[bool(anchor) :], dtype=np.int32)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of ids; bytes that form no UTF-8 character become U+FFFD."""
        return str(self._tokenizer.decode([int(id) for id in ids], skip_special_tokens=skip_special))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render messages ({"role", "content"}) with the model's chat template.

        `system` is put in front as a system message; None leaves that to the template, which may add its own.
        `tools` are JSON schemas of functions; a template that knows of none leaves them out.
        Raises ModelError when there is no template or it refuses the messages, ValueError when the messages
        begin with a system message already.
        """
        if self._template is None:
            raise ModelError("the model has no chat template", "give the prompt as plain text instead")
        chat = [dict(message) for message in messages]
        if system is not None:
            if chat and chat[0].get("role") == "system":
                raise ValueError("system= is given, but the messages begin with a system message already")
            chat.insert(0, {"role": "system", "content": system})
        return render(
            self._template,
            messages=chat,
            tools=None if tools is None else [dict(tool) for tool in tools],
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._special,
        )

    def _some_special(self) -> str:
        """The text of a special token, which parts a text for certain; "" when there is none."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return next((str(t.content) for t in added if t.special and not (t.lstrip or t.rstrip)), "")

    def _eos(self, path: Path) -> tuple[int, ...]:
        for name in ("generation_config.json", "config.json"):
            config = _optional(path / name)
            text = config.get("text_config")
            value = config.get("eos_token_id", text.get("eos_token_id") if isinstance(text, dict) else None)
            if value is not None:
                return tuple(value) if isinstance(value, list) else (int(value),)
        id = self._tokenizer.token_to_id(self._special.get("eos_token", ""))
        return () if id is None else (int(id),)


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Name → text; a token is stored as a string or as an object with its `content`."""
    found = {name: config.get(name) for name in _SPECIAL}
    texts = {name: v.get("content") if isinstance(v, dict) else v for name, v in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _template(path: Path, config: dict[str, Any]) -> str | None:
    """The template of chat_template.jinja, which wins as in transformers, or of tokenizer_config.json."""
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None
