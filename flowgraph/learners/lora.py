"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): peft puts them in, and what leaves the learner has them added.

Shapes: a linear layer's matrix is [O,I]; A is [R,I], B is [O,R], with R the rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flowgraph.errors import ModelError

from .registry import LoraOptions

_NAME = "default"
_BASE, _A, _B = ".base_layer.", f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight"


def adapt(model: Any, options: LoraOptions) -> None:
    """Put adapters into a model, in its own dtype; they alone are trained. A is random, the same on every call.

    Raises ModelError without peft, and for a target that is no linear layer of the backbone.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ModelError(
            "lora needs peft, which is not installed", 'pip install "flowgraph-rl[lora]"'
        ) from error
    for target in options.targets or ():
        _check_target(model, target)
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules="all-linear" if options.targets is None else list(options.targets),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            inject_adapter_in_model(config, model, adapter_name=_NAME)
        except ValueError as error:
            raise ModelError(
                f"lora: {error}", "name linear layers of the model under lora.targets"
            ) from error


def _check_target(model: Any, target: str) -> None:
    """peft passes over a target that it finds nowhere if it finds another, and takes embeddings and heads too, which
    may be tied or are computed elsewhere: the learner would train what nobody reads.
    """
    linear = {id(m) for m in model.base_model.modules() if isinstance(m, torch.nn.Linear)}
    named = {name: id(module) in linear for name, module in model.named_modules()}
    found = {name: fits for name, fits in named.items() if f".{name}".endswith(f".{target}")}
    if found and all(found.values()):
        return
    what = next((name for name, fits in found.items() if not fits), None)
    is_none = f"{what} is no linear layer of the backbone" if what else "the model has no layer of that name"
    known = dict.fromkeys(name.rpartition(".")[2] for name, fits in named.items() if fits)
    raise ModelError(f"lora.targets {target}: {is_none}", f"name some of {', '.join(known)}")


def merged(tensors: Mapping[str, Tensor], options: LoraOptions | None) -> dict[str, Tensor]:
    """The tensors of an adapted model under the names that it had before; views where nothing is added.

    W + alpha/rank · B·A in float32, rounded once to W's dtype.
    """
    if options is None:
        return dict(tensors)
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, base, what = name.rpartition(_BASE)
        if base and what == "weight" and f"{layer}{_A}" in tensors:
            low_RI, high_OR = tensors[f"{layer}{_A}"].float(), tensors[f"{layer}{_B}"].float()
            added_OI = (high_OR @ low_RI).mul_(options.alpha / options.rank)
            tensor = added_OI.add_(tensor).to(tensor.dtype)
        if not name.endswith((_A, _B)):
            out[f"{layer}.{what}" if base else name] = tensor
    return out
