"""What an interpreter's environment holds, read from its metadata: nothing of it is imported, here or there."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from flowgraph.errors import Check

DEADLINE = 60.0  # seconds; it takes 0.2, and a cold disk 5
AFFECTS = "everything: the server runs in it"
OWN = ".venv-sglang/bin/python"  # where there is no environment for a server yet, it is made there

# Runs in the other interpreter, which may be older than ours and has none of our packages.
PROBE = """
import importlib.metadata, importlib.util, json, platform, re, runpy, sys
sys.path = [p for p in sys.path if p]
packages, requires, cuda = {}, [], None
for one in importlib.metadata.distributions():
    name = re.sub("[-_.]+", "-", one.metadata["Name"] or "").lower()
    if name in packages:
        continue
    packages[name] = one.version or ""
    if name == "sglang":
        requires = one.requires or []
    if name == "torch":
        try:
            cuda = runpy.run_path(str(one.locate_file("torch/version.py"))).get("cuda")
        except OSError:
            pass
points = importlib.metadata.entry_points()
group = "sglang.srt.platforms"
plugins = points.select(group=group) if hasattr(points, "select") else points.get(group, [])
print(json.dumps({
    "version": platform.python_version(), "packages": packages, "requires": requires, "cuda": cuda,
    "plugins": [point.value for point in plugins],
    "kernel": importlib.util.find_spec("sgl_kernel") is not None,
    "pip": importlib.util.find_spec("pip") is not None,
}))
"""


class Environment(msgspec.Struct, frozen=True):
    """packages: normalised name → version; requires: what its sglang asks for; cuda: that of its torch, None on a build
    for the CPU; plugins: entry points of SGLang's platforms; kernel, pip: whether it has modules sgl_kernel and pip.
    """

    version: str
    packages: dict[str, str]
    requires: list[str]
    cuda: str | None
    plugins: list[str]
    kernel: bool
    pip: bool
    python: str = ""

    @property
    def ours(self) -> bool:
        """Whether flowgraph itself runs in it."""
        return os.path.dirname(self.python) == os.path.dirname(os.path.abspath(sys.executable))

    @property
    def install(self) -> str:
        """The command that installs into it. An environment made by uv has no pip."""
        python = shlex.quote(self.python)
        return f"{python} -m pip install" if self.pip else f"uv pip install --python {python}"


class Unmet(NamedTuple):
    """version: the one that is there, or None"""

    name: str
    allowed: str
    version: str | None

    def __str__(self) -> str:
        if self.version is None:
            return f"{self.name}{self.allowed} is absent"
        return f"{self.name} is {self.version}, not {self.allowed}"


def probe(python: str, deadline: float = DEADLINE) -> Environment | Check:
    """The environment of the interpreter `python`, a path or a name on PATH; or the failed check that says why not."""
    path = absolute(python)
    if not os.path.isfile(path):
        return _failed(f"there is no {path}", path)
    if not os.access(path, os.X_OK):
        return _failed(f"{path} can't be executed", path)
    command = [path, "-W", "ignore", "-c", PROBE]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=deadline, errors="replace")
        found = msgspec.json.decode(ran.stdout.strip().rpartition("\n")[2], type=Environment)
    except subprocess.TimeoutExpired:
        return _failed(f"{path} does not answer within {deadline:.0f} s", path)
    except (OSError, msgspec.MsgspecError):
        return _failed(f"{path} does not work as a Python interpreter", path)
    return msgspec.structs.replace(found, python=path)


def unmet(requirements: Iterable[str], env: Environment) -> Iterator[Unmet]:
    """The requirements that the environment does not meet. A line that is none, as an option of pip, is passed over."""
    markers = {"python_version": ".".join(env.version.split(".")[:2]), "extra": ""}
    for line in requirements:
        try:
            wanted = Requirement(line)
        except InvalidRequirement:
            continue
        if wanted.marker is not None and not wanted.marker.evaluate(markers):
            continue
        version = env.packages.get(canonicalize_name(wanted.name))
        if version is None or not within(version, wanted.specifier):
            yield Unmet(wanted.name, str(wanted.specifier), version)


def within(version: str, allowed: SpecifierSet | str) -> bool:
    """Whether a version lies in a range such as `>=0.5.23,<0.6`; its local part, as of `2.13.0+cpu`, does not count."""
    specifier = SpecifierSet(allowed) if isinstance(allowed, str) else allowed
    try:
        return specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return False


def absolute(python: str) -> str:
    """The link of a virtual environment is kept: where it leads to is another environment."""
    return os.path.abspath(shutil.which(python) or os.path.expanduser(python))


def _failed(found: str, path: str) -> Check:
    """What to do is to make an environment: the one that was named, where nothing lies in its way."""
    folder = Path(path).parent.parent
    named = Path(path).parent.name == "bin" and not folder.exists()
    return Check("interpreter", "fail", found, AFFECTS, make(path if named else OWN))


def make(python: str) -> str:
    """The command that makes an environment with that interpreter, and looks at it again."""
    folder = shlex.quote(str(Path(python).parent.parent))
    return f"python3 -m venv {folder} && flowgraph doctor sglang --python {shlex.quote(python)}"
