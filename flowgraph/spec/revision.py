"""Where the text of a graph is read from: a file, or a file as it is at a revision of git, `HEAD~1:graphs/x.yaml`.

PATH of REV:PATH counts from the root of the repository of the working directory, as for git; one that begins with `./`,
`../` or `/` is the path of a file. Only the graph is that of the revision: what it imports is that of the working tree.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec

WAIT = 60  # seconds for git, which may have to fetch what a partial clone lacks
# Set inside a git hook, where they would stand for the repository of the hook.
INHERITED = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")


class RevisionError(ValueError):
    """A REV:PATH can't be read. `help` names one fix."""

    def __init__(self, message: str, help: str) -> None:
        self.help = help
        super().__init__(message)


class Revision(msgspec.Struct, frozen=True):
    """One file of a repository at a revision. root: the working tree; path: from there."""

    rev: str
    root: Path
    path: str


def read_text(name: str) -> str:
    """The text that a name stands for. Raises OSError or ValueError; of those a RevisionError carries its own help."""
    at = _revision(name)
    data = Path(name).read_bytes() if at is None else _blob(at)
    return data.decode("utf-8-sig")


def home(name: str) -> Path:
    """The directory that a graph lies in, or lay in; the working directory where that can't be told."""
    try:
        at = _revision(name)
    except RevisionError:
        return Path.cwd()
    return (Path(name) if at is None else at.root / at.path).resolve().parent


def at_revision(rev: str, path: str) -> str:
    """The name of a file at a revision: `HEAD~1:./graphs/x.yaml`."""
    return f"{rev}:{path if path.startswith(('/', './', '../')) else f'./{path}'}"


def _revision(name: str) -> Revision | None:
    """What a REV:PATH names; None for what is there as a file, or has no colon."""
    rev, colon, path = name.rpartition(":")
    if not colon or not path or os.path.exists(name):
        return None
    if not path.startswith(("/", "./", "../")):
        return Revision(rev, _root(Path.cwd()), path)
    file = Path(path).resolve()
    root = _root(next(parent for parent in file.parents if parent.is_dir()))
    return Revision(rev, root, os.path.relpath(file, root))


def _root(where: Path) -> Path:
    found = _git(where, "rev-parse", "--show-toplevel")
    if found.returncode:
        said = (found.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
        raise RevisionError(f"{where} is in no git repository: {said}", "give the path of a graph file")
    return Path(os.fsdecode(found.stdout.removesuffix(b"\n"))).resolve()


def _blob(at: Revision) -> bytes:
    known = not at.rev.startswith("-") and at.rev != ""
    if not known or _git(at.root, "rev-parse", "--verify", "--quiet", f"{at.rev}^{{tree}}").returncode:
        help = "`git log --oneline` lists those that are here; a shallow clone has few"
        raise RevisionError(f"git knows no revision {at.rev!r} in {at.root}", help)
    found = _git(at.root, "cat-file", "blob", f"{at.rev}:{at.path}")
    if found.returncode:
        help = "write the path from the root of the repository, or ./PATH from where you are"
        raise RevisionError(f"revision {at.rev} has no file {at.path}", help)
    return found.stdout


def _git(where: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    env = {name: value for name, value in os.environ.items() if name not in INHERITED}
    command = ["git", "-C", str(where), *arguments]
    try:
        return subprocess.run(
            command, capture_output=True, check=False, env=env, stdin=subprocess.DEVNULL, timeout=WAIT
        )
    except FileNotFoundError:
        raise RevisionError(
            "there is no git to read a revision with", "install git, or give a file"
        ) from None
    except subprocess.TimeoutExpired:
        raise RevisionError(f"git did not answer in {WAIT} s", f"try: {' '.join(command)}") from None
