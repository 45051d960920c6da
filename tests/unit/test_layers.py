"""Who may import whom; what `import flowgraph` costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import flowgraph

ROOT = Path(__file__).parents[2]
# The heavy implementations, and what imports them, where a worker is started; nothing else has torch at its top.
HEAVY = {
    f"flowgraph.engines.{name}"
    for name in (
        *("transformers", "slots", "caches", "request", "routing", "sampling", "memory", "embedded"),
        *("served.staging", "served.verify", "served.transports", "served.launch", "served.serve"),
        *("served.deltas", "served.group", "served.handover", "served.session"),
        *("weights.stage", "weights.delta", "weights.layout", "weights.checksum", "weights.fit"),
    )
} | {
    f"flowgraph.learners.{name}"
    for name in (
        "torch",
        "attention",
        "head",
        "optim",
        "replay",
        "save",
        "sharded",
        "whole",
        "layers",
        "lora",
        "value",
    )
}
HEAVY |= {"flowgraph.models.choices", "flowgraph.models.names", "flowgraph.models.positions"}
FOREIGN = {"torch", "transformers", "ray", "sglang"}


def modules() -> dict[str, Path]:
    files = sorted((ROOT / "flowgraph").rglob("*.py"))
    names = (".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for f in files)
    return dict(zip(names, files, strict=True))


def test_the_layers_hold() -> None:
    run = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports"))], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout


def test_all_is_sorted_and_is_what_the_package_has() -> None:
    submodules = {name.split(".")[1] for name in modules() if name.count(".")}
    public = {name for name in dir(flowgraph) if not name.startswith("_")} - submodules - {"TYPE_CHECKING"}
    assert flowgraph.__all__ == sorted(flowgraph.__all__)
    assert set(flowgraph.__all__) == public
    assert all(getattr(flowgraph, name) is not None for name in flowgraph.__all__)
    assert not hasattr(flowgraph, "nothing")


def test_a_type_checker_sees_the_names_that_are_imported_late() -> None:
    tree = ast.parse((ROOT / "flowgraph/__init__.py").read_text())
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {a.name: n.module for n in checked.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert seen == flowgraph._LIBRARY


def test_a_hop_imports_flowgraph_without_the_library() -> None:
    code = "import sys, flowgraph; print([m for m in sys.modules if m.startswith('flowgraph.')])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.split(".")[1] for name in ast.literal_eval(run.stdout)}
    assert loaded == {"engines", "errors", "learners", "models", "spec"}


def test_no_other_module_has_torch_at_its_top() -> None:
    for name, file in modules().items():
        top = [
            node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        roots = {a.name for n in top if isinstance(n, ast.Import) for a in n.names}
        roots |= {n.module or "" for n in top if isinstance(n, ast.ImportFrom)}
        assert name in HEAVY or not {r.partition(".")[0] for r in roots} & FOREIGN, name


def test_importing_everything_else_imports_no_torch() -> None:
    light = [name for name in modules() if name not in HEAVY]
    assert set(modules()) > HEAVY
    code = f"""
import importlib, sys
for name in {light!r}:
    importlib.import_module(name)
print(sorted({FOREIGN!r} & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
