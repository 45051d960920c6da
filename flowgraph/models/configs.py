"""Configs of Hugging Face without weights: a class of transformers with arguments, and the tensors that it makes.

transformers and torch are imported only where a config needs them.
"""

from __future__ import annotations

import ast
import difflib
import functools
import json
from typing import Any

from flowgraph.errors import ModelError

UNNAMED = ("head_dim",)  # models read it where it is given, and some configs have no default for it
Shaped = tuple[str, tuple[int, ...], str]  # name, shape, dtype


def config_of(text: str) -> dict[str, Any]:
    """The config that `transformers.Qwen3MoeConfig(num_hidden_layers=48)` is. Arguments are literals by name.

    Raises ModelError for another form, an unknown class, and arguments that the class refuses.
    """
    name, arguments = _parsed(text)
    import transformers

    made = getattr(transformers, name, None)
    if made is None or not isinstance(made, type):
        raise ModelError(f"transformers {transformers.__version__} has no {name}", "name a class that it has")
    try:
        known = {*made().to_dict(), *getattr(made, "attribute_map", {}), *UNNAMED}
        if unknown := [key for key in arguments if key not in known]:
            meant = difflib.get_close_matches(unknown[0], known, n=1)
            hint = f"did you mean {meant[0]}? " if meant else ""
            raise ModelError(f"{name} has no {unknown[0]}", f"{hint}remove it")
        found: dict[str, Any] = made(**arguments).to_dict()
        return found
    except ModelError:
        raise
    except Exception as error:  # each class checks its arguments in its own way
        raise ModelError(f"{text}: {type(error).__name__}: {error}", "change its arguments") from None


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    help = "write it as transformers.Qwen3MoeConfig(num_hidden_layers=48)"
    try:
        node = ast.parse(text, mode="eval").body
        call = node if isinstance(node, ast.Call) else None
        target = call.func if call else node
        assert isinstance(target, ast.Attribute)
        if call is None:
            return target.attr, {}
        if call.args or any(k.arg is None for k in call.keywords):
            raise ModelError(f"{text} has an argument without a name", help)
        return target.attr, {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError, AssertionError, RecursionError):
        raise ModelError(f"{text!r} is no class of transformers with literal arguments", help) from None


def tensors_of(config: dict[str, Any], said: str) -> list[Shaped]:
    """Every trainable tensor that transformers makes of a config, without its memory. said: how it was given."""
    return _tensors(json.dumps(config, sort_keys=True, default=str), said)


@functools.lru_cache(maxsize=16)
def _tensors(config: str, said: str) -> list[Shaped]:
    import torch
    import transformers

    values = json.loads(config)
    try:
        kind = transformers.CONFIG_MAPPING[values.get("model_type")]
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(kind(**values))
    except Exception as error:  # an unknown kind of model, or numbers that don't fit each other
        what = f"transformers {transformers.__version__} makes no causal language model of {said}"
        raise ModelError(f"{what}: {type(error).__name__}: {error}", "name a model that it knows") from None
    dtype = str(values.get("dtype") or values.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return [(name, tuple(p.shape), dtype) for name, p in model.named_parameters()]
