"""Plugins of SGLang: with SGLANG_USE_CPU_ENGINE=1 a server starts without SGLang's compiled kernels.

SGLang calls `activate` in each of its processes, before it imports sgl_kernel and torchvision. Neither has a CPU build
on the package index, and both are imported at module level, though plain decoding calls nothing of them. Later it calls
`experts`, before it makes a model: routing to experts does call a kernel, and recording it asks for a GPU's memory.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

_KEPT: list[Any] = []  # the library of schemas: torch takes them back when it is collected


class _NamesOnly(types.ModuleType):
    """A module that has every name; calling one says that there is nothing behind it."""

    __path__: list[str] = []  # noqa: RUF012  # a package without submodules

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: object, **__: object) -> NoReturn:
            raise NotImplementedError(f"{self.__name__}.{name} has no CPU build here")

        setattr(self, name, missing)
        return missing


def activate() -> None:
    """Make room for SGLang's imports. None leaves the choice of the platform, its own CPU one, to SGLang."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    if not _imports("sgl_kernel"):
        sys.modules["sgl_kernel"] = _NamesOnly("sgl_kernel")
    if not _torchvision_loads():
        _define_schemas()


def experts() -> None:
    """Let models with experts run, and their routing be recorded, by what SGLang looks up and has for GPUs only."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    from sglang.srt.layers.moe import topk
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    if not hasattr(topk, "topk_softmax"):
        topk.topk_softmax = _topk_softmax
    ALLOC_MEMORY_FUNCS.setdefault("cpu", _allocate)


def _topk_softmax(weights: Any, ids: Any, logits: Any, renormalize: bool) -> None:
    """The kernel of that name. weights f32[n, k] and ids i32[n, k] are written, best first; logits [n, experts]."""
    chosen, at = logits.float().softmax(dim=-1).topk(ids.shape[1], dim=-1)
    if renormalize:
        chosen = chosen / chosen.sum(dim=-1, keepdim=True)
    weights.copy_(chosen)
    ids.copy_(at)


def _allocate(dims: tuple[int, ...], dtype: Any, device: str, **_: object) -> Any:
    """Host memory that no GPU needs to reach: SGLang's own allocator pins it through the CUDA runtime."""
    import torch

    return torch.empty(dims, dtype=dtype, device=device)


def _imports(package: str) -> bool:
    try:
        importlib.import_module(package)
    except ImportError:  # absent, or built for CUDA: libcuda.so.1 is not there
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
        return False
    return True


def _torchvision_loads() -> bool:
    """Whether torchvision's operators load into this torch: those of a CPU build do, those of a CUDA build don't."""
    import torch

    spec = importlib.util.find_spec("torchvision")
    folders = (spec.submodule_search_locations if spec else None) or []
    for library in [path for folder in folders for path in Path(folder).glob("_C*.so")]:
        try:
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        except OSError:
            continue
        return True
    return False


def _define_schemas() -> None:
    """The operators whose schemas torchvision needs to be imported; without kernels."""
    import torch

    try:
        torch._C._dispatch_has_kernel_for_dispatch_key("torchvision::nms", "CPU")
    except RuntimeError:  # there is no such operator yet
        library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            library.define(schema)  # type: ignore[no-untyped-call]
        _KEPT.append(library)
