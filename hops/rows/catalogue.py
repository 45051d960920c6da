"""reasoning-gym's tasks and options, read from its source files: a check must not wait for the import."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

from hops.rows.example import near

COMPACT = ("basic_arithmetic", "chain_sum", "decimal_chain_sum", "products")
"""Tasks whose metadata hold an `expression` with the answer as its value."""

UNORDERED = ("isomorphic_strings", "polynomial_multiplication", "ransom_note")
"""Tasks that iterate over sets of strings: one seed gives other rows in another process (version 0.1.25)."""


def check_task(task: str, options: dict[str, Any]) -> None:
    """Raise ValueError for a task that is unknown or can't be reproduced, or an option that it has not."""
    files = _files()
    if task not in files:
        raise ValueError(f"reasoning-gym has no task {task!r}; {near(task, files)}it has {len(files)}")
    if task in UNORDERED and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise ValueError(
            f"task {task} gives other rows in every process, because it iterates over sets of strings; "
            "set PYTHONHASHSEED=0 in the environment of the run, or choose another task"
        )
    known = _fields(files[task])
    for name in options:
        if name in ("seed", "size"):
            raise ValueError(
                f"option {name!r} of {task} is not yours to set: rows come from run.seed, without end"
            )
        if known and name not in known:
            raise ValueError(
                f"task {task} has no option {name!r}; {near(name, known)}it has {', '.join(known)}"
            )


@functools.cache
def _files() -> dict[str, Path]:
    """Task → the file that registers it."""
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is None or spec.origin is None:
        raise ValueError("reasoning_gym is not installed; pip install reasoning-gym")
    found: dict[str, Path] = {}
    for file in sorted(Path(spec.origin).parent.glob("*/**/*.py")):
        text = file.read_text(encoding="utf-8")
        name = re.search(r'^DATASET_NAME = "(\w+)"', text, re.MULTILINE)
        if name and "register_dataset(" in text:
            found[name[1]] = file
    return found


def _fields(file: Path) -> tuple[str, ...]:
    """Fields of the configuration class that the file registers; none when it is written in another file."""
    text = file.read_text(encoding="utf-8")
    registered = re.search(r"register_dataset\(\s*DATASET_NAME,\s*\w+,\s*(\w+)", text)
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and registered and node.name == registered[1]:
            names = [
                n.target.id
                for n in node.body
                if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
            ]
            return tuple(n for n in names if n not in ("seed", "size"))
    return ()
