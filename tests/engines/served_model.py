"""The model that every engine is made to serve, its weights of several kinds, and what plain transformers says of it.

It is as small as `tiny`, and made so that what a test needs does happen: a token of several characters, a character
of several tokens, a stop string that the tokenizer would write in fewer tokens than the model, and an end of sequence
that comes only when a test wants it. Nothing here knows of engines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tiny_llama import SIZES, VOCABULARY, save_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM, LlamaConfig

from flowgraph.models.quiet import no_progress_bar

CONTEXT = 512  # all the positions that it has
EOS = VOCABULARY - 1
PAIR, TRIPLE, WORD = 256, 257, 258  # the tokens of several characters
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"

SYMBOLS = sorted(pre_tokenizers.ByteLevel.alphabet())

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


def _bytes() -> list[bytes]:
    """Token → the byte it stands for, by the table that GPT-2 introduced: a printable byte is its own symbol."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    of = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    return [bytes([of[symbol]]) for symbol in SYMBOLS]


class ServedModel:
    """directory: of the model, with its tokenizer. Kinds of weights: `base` is what it holds; `other` differs in every
    number; `ends` gives EOS now and then, which the others never do.
    """

    def __init__(self, where: Path) -> None:
        self.directory = where
        self._greedy: dict[str, list[tuple[Ids, list[int]]]] = {}
        config = LlamaConfig(
            **SIZES | {"max_position_embeddings": CONTEXT, "eos_token_id": EOS}, tie_word_embeddings=True
        )
        save_model(where, config)
        torch.manual_seed(1)
        with no_progress_bar():
            self._model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).eval()
        with torch.no_grad():
            _keep_eos_away(self._model)
        self._model.save_pretrained(where)
        base = {name: p.detach().clone() for name, p in self._model.named_parameters()}
        self._kinds = {
            "base": base,
            "other": {name: p * (1 + 0.2 * torch.randn_like(p)) for name, p in base.items()},
            "ends": base | {EMBED: base[EMBED].clone()},
        }
        often = max(range(EOS), key=lambda id: sum(id in ids[2:] for _, ids in self.greedy("base")))
        self._kinds["ends"][EMBED][EOS] = 1.3 * base[EMBED][often]  # so EOS comes where that token did
        self._text = [*_bytes(), b"", b"", b"", b""]
        self._write_tokenizer()
        # A recommendation that an engine must not follow: it was asked for a temperature, and for nothing else.
        settings = json.loads((where / "generation_config.json").read_text())
        settings |= {"do_sample": True, "top_k": 3, "temperature": 0.5, "repetition_penalty": 1.5}
        (where / "generation_config.json").write_text(json.dumps(settings))

    def _write_tokenizer(self) -> None:
        """Two merges make one token of three characters that the model, asked greedily, writes one by one."""
        _, ids, at = next(self.found(lambda ids, at: at > 1 and self._is_word(ids[at : at + 3]), "base"))
        one, two, three = (SYMBOLS[i] for i in ids[at : at + 3])
        self.word = self.text(ids[at : at + 3])
        more = [one + two, one + two + three, "<word>", "<end>"]
        self._text[PAIR:] = [symbol.encode() for symbol in more]
        vocabulary = {symbol: at for at, symbol in enumerate([*SYMBOLS, *more])}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(one, two), (one + two, three)]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(self.directory / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (self.directory / "tokenizer_config.json").write_text(json.dumps(settings))

    def _is_word(self, ids: list[int]) -> bool:
        text = self.text(ids)
        return len(set(text)) == len(text) == 3 and text.isalnum() and text.isascii()

    def text(self, ids: list[int] | Ids) -> bytes:
        return b"".join(self._text[int(id)] for id in ids)

    def weights(self, kind: str) -> dict[str, Tensor]:
        """Hugging Face names → tensors, the tied head under the embedding's name only."""
        return dict(self._kinds[kind])

    @torch.no_grad()
    def logits(self, kind: str, ids: Tensor) -> Tensor:
        """[B, n] ids → [B, n, V]: of the token after each, without any cache."""
        arguments = {"input_ids": ids, "use_cache": False}
        out = functional_call(self._model, self._kinds[kind], kwargs=arguments, tie_weights=True)
        logits: Tensor = out.logits
        return logits

    def logprobs(self, kind: str, tokens: Any, temperature: float = 1.0) -> Floats:
        """f32[n]: of each token given those before it, at a temperature (0: unscaled); 0 for the first."""
        ids = torch.tensor(np.asarray(tokens, np.int64))
        scaled = self.logits(kind, ids[None])[0, :-1].double() / (temperature or 1.0)
        chosen = scaled.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        return np.concatenate([np.zeros(1), chosen.numpy()]).astype(np.float32)

    def distribution(self, kind: str, prompt: Any) -> npt.NDArray[np.float64]:
        """f64[V]: of the token after a prompt."""
        probabilities = (
            self.logits(kind, torch.tensor(np.asarray(prompt, np.int64))[None])[0, -1].double().softmax(-1)
        )
        return np.asarray(probabilities)

    def greedy(self, kind: str) -> list[tuple[Ids, list[int]]]:
        """Prompts, and what follows each by largest logit: up to the first choice that rounding might turn."""
        if kind not in self._greedy:
            self._greedy[kind] = self._find_greedy(kind)
        return self._greedy[kind]

    def _find_greedy(self, kind: str) -> list[tuple[Ids, list[int]]]:
        random = np.random.default_rng(5)
        ids = torch.tensor(random.integers(0, 256, (128, 8)))
        clear = torch.ones(128, dtype=torch.bool)
        lengths = torch.zeros(128, dtype=torch.int64)
        for _ in range(24):
            best = self.logits(kind, ids)[:, -1].topk(2)
            clear &= best.values[:, 0] - best.values[:, 1] > 0.02
            lengths += clear
            ids = torch.cat([ids, best.indices[:, :1]], 1)
        return [
            (row[:8].numpy().astype(np.int32), row[8 : 8 + int(length)].tolist())
            for row, length in zip(ids, lengths, strict=True)
        ]

    def found(self, wanted: Any, kind: str) -> Iterator[tuple[Ids, list[int], int]]:
        """Prompts, their greedy responses, and a place in the response where `wanted(ids, place)` holds first."""
        for prompt, ids in self.greedy(kind):
            at = next((at for at in range(len(ids)) if wanted(ids, at)), None)
            if at is not None:
                yield prompt, ids, at


def _keep_eos_away(model: Any) -> None:
    """Feature 0 is positive at every position, and only EOS's row of the tied head is negative there."""
    embed = model.get_input_embeddings().weight
    embed[:, 0] = 1.0
    embed[EOS, 0] = -300.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
