"""The token tree of a trajectory of several turns. Pure functions; what was tokenised once is never tokenised again.

A path is a row of pieces from the root on: a prompt's new text, what was sampled to it, the next prompt's new text, …
A turn's prompt is one text, the rendering of all its messages. Where it begins with the text of a whole path, only the
text past that is tokenised, and its tokens follow those that are there: the sampled ones stay as they were sampled,
also where their text would be tokenised in another way. Any other prompt (a template that strips earlier thinking, a
history that was rewritten, a sub-agent) forks: it shares the longest beginning of whole tokens, and is a path of its
own.

Paths are the leaves of the tree. A sampled token lies on several when a fork comes after it; it is trained on the
first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


class Text(Protocol):
    """What is needed of a tokenizer."""

    eos_ids: tuple[int, ...]

    def encode(self, text: str, *, follows: bool = False) -> Ints: ...

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str: ...


class Piece(NamedTuple):
    """Tokens of one origin, and their text. Arrays have one entry a token.

    sampled: i32, the token's number among those that its trajectory sampled, as they came; -1 of what was not sampled
    logprobs, versions: 0 and -1 of what was not sampled
    """

    text: str
    ids: Ints
    sampled: Ints
    logprobs: npt.NDArray[np.float32]
    versions: Ints

    def first(self, n: int, text: str) -> Piece:
        """Its first `n` tokens, whose text is `text`."""
        return Piece(text, self.ids[:n], self.sampled[:n], self.logprobs[:n], self.versions[:n])


Path = tuple[Piece, ...]


class Tree(NamedTuple):
    """paths: root to leaf; grown: (number of the turn, tokens that it sampled), in the order in which they came"""

    paths: tuple[Path, ...]
    grown: tuple[tuple[int, int], ...] = ()

    @property
    def sampled(self) -> int:
        """Tokens sampled so far."""
        return sum(count for _, count in self.grown)


class Flat(NamedTuple):
    """Leaves packed one behind the other at leaf_offsets i64[leaf+1]; the others have one entry a token of a leaf.

    sampled: numbers in the order of turns, so that they do not depend on which of several turns at once ends first
    mask: each sampled token is marked in the first leaf that has it, and in no other
    """

    tokens: Ints
    logprobs: npt.NDArray[np.float32]
    mask: npt.NDArray[np.bool_]
    versions: Ints
    sampled: Ints
    leaf_offsets: npt.NDArray[np.int64]


def root(text: str, ids: npt.NDArray[Any]) -> Tree:
    """A tree of one path on which nothing is sampled. ids: i32[n], the tokens of `text`, as they stay"""
    return Tree(((_given(text, ids),),))


def length(path: Path) -> int:
    return sum(len(piece.ids) for piece in path)


def prompt_of(tree: Tree, text: str, tokenizer: Text) -> Path:
    """The path of a prompt: as many tokens as can be had of a path that is there, then those of the text past them.

    Of several that share as much, one that is extended comes before one that is forked, then the newest first.
    """
    found = [(*_follow(path, text, tokenizer), i) for i, path in enumerate(tree.paths)]
    path, _, _, _ = max(found, key=lambda one: one[1:])
    return path


def grow(
    tree: Tree,
    prompt: Path,
    turn: int,
    ids: npt.NDArray[Any],
    logprobs: npt.NDArray[Any],
    versions: npt.NDArray[Any],
    tokenizer: Text,
) -> Tree:
    """The tree once r tokens were sampled, in turn number `turn`, to a prompt that `prompt_of` gave.

    Raises ValueError unless there is a log-probability and a version to each token.
    """
    r = len(ids)
    if not len(logprobs) == len(versions) == r:
        raise ValueError(
            f"the engine gave {r} ids, {len(logprobs)} log-probabilities, {len(versions)} versions"
        )
    if not r:
        return tree
    # A final EOS is a piece of its own: a template may write the end of a message in another way, or not at all.
    cut = r - 1 if r > 1 and int(ids[-1]) in tokenizer.eos_ids else r
    numbers = np.arange(tree.sampled, tree.sampled + r, dtype=np.int32)
    grown = prompt
    for part in (slice(0, cut), slice(cut, r)):
        some = np.asarray(ids[part], np.int32)
        if len(some):
            text = _text(tokenizer, _last(grown), some)
            scores, under = np.asarray(logprobs[part], np.float32), np.asarray(versions[part], np.int32)
            grown = (*grown, Piece(text, some, numbers[part], scores, under))
    paths = list(tree.paths)
    at = next((i for i, path in enumerate(paths) if _begins(grown, path)), len(paths))
    paths[at : at + 1] = [grown]
    return Tree(tuple(paths), (*tree.grown, (turn, r)))


def leaves(tree: Tree) -> tuple[Path, ...]:
    """The paths on which something was sampled; the first one when nothing was."""
    return (
        tuple(p for p in tree.paths if any(piece.sampled.max(initial=-1) >= 0 for piece in p))
        or tree.paths[:1]
    )


def flatten(tree: Tree) -> Flat:
    """Every leaf from the root on; leaves that have sampled tokens in common stand side by side."""
    numbers = _in_turn(tree)
    rows = sorted(
        leaves(tree), key=lambda path: [n for piece in path for n in numbers[piece.sampled] if n >= 0]
    )
    _, ids, sampled, logprobs, versions = zip(*(piece for path in rows for piece in path), strict=True)
    number = numbers[np.concatenate(sampled)]
    first = np.zeros(len(number), np.bool_)
    first[np.unique(number, return_index=True)[1]] = True
    return Flat(
        tokens=np.concatenate(ids),
        logprobs=np.concatenate(logprobs),
        mask=first & (number >= 0),
        versions=np.concatenate(versions),
        sampled=number,
        leaf_offsets=np.cumsum([0, *map(length, rows)], dtype=np.int64),
    )


def _in_turn(tree: Tree) -> Ints:
    """i32[sampled+1]: each number as it came → in the order of turns; -1 → -1, which stands last."""
    ends = np.cumsum([count for _, count in tree.grown], dtype=np.int32)
    numbers = np.full(tree.sampled + 1, -1, np.int32)
    at = 0
    for (_, count), end in sorted(zip(tree.grown, ends, strict=True)):
        numbers[end - count : end] = np.arange(at, at + count)
        at += count
    return numbers


# --- following a text along a path ---------------------------------------------------------------------------------


def _follow(path: Path, text: str, tokenizer: Text) -> tuple[Path, int, bool]:
    """(the text's path, how many tokens it has of `path`, whether that is all of them)."""
    at, i = 0, 0
    while i < len(path) and text.startswith(path[i].text, at):
        at += len(path[i].text)
        i += 1
    if i == len(path):
        return (*path, *_rest(text[at:], tokenizer, at)), length(path), True
    # Left where a response begins: the prompt before it is gone through again, together with what follows now, so that
    # tokens that reach across are those of the text as a whole.
    if i and at < len(text) and path[i].sampled[0] >= 0 > path[i - 1].sampled[0]:
        i -= 1
        at -= len(path[i].text)
    kept, used = _shared(path[:i], path[i:], text[at:], tokenizer)
    whole = path[:i] + kept
    return (*whole, *_rest(text[at + used :], tokenizer, at + used)), length(whole), False


def _shared(behind: Path, pieces: Path, text: str, tokenizer: Text) -> tuple[Path, int]:
    """What the tokens of `text` have in common with those of the pieces, and how much of the text that is.

    behind: the pieces before. Whole tokens only, as far as they spell the text: no half character is shared.
    """
    ids = tokenizer.encode(text, follows=bool(behind))
    old = np.concatenate([piece.ids for piece in pieces])
    n = min(len(ids), len(old))
    differs = np.flatnonzero(ids[:n] != old[:n])
    left = int(differs[0]) if len(differs) else n
    kept: list[Piece] = []
    used = 0
    for piece in pieces:
        before = _last((*behind, *kept))
        n = min(len(piece.ids), left)
        said = piece.text if n == len(piece.ids) else _text(tokenizer, before, piece.ids[:n])
        while n and not text.startswith(said, used):
            n -= 1
            said = _text(tokenizer, before, piece.ids[:n])
        if n:
            kept.append(piece.first(n, said))
            used, left = used + len(said), left - n
        if n < len(piece.ids):
            break
    return tuple(kept), used


def _rest(text: str, tokenizer: Text, at: int) -> Path:
    ids = tokenizer.encode(text, follows=at > 0)
    return (_given(text, ids),) if len(ids) else ()


def _given(text: str, ids: npt.NDArray[Any]) -> Piece:
    n = len(ids)
    none = np.full(n, -1, np.int32)
    return Piece(text, np.asarray(ids, np.int32), none, np.zeros(n, np.float32), none)


def _last(path: Path) -> list[int]:
    """Its last few ids: enough for a decoder to see that something stands before."""
    return [int(i) for piece in path[-8:] for i in piece.ids[-8:]][-8:]


def _text(tokenizer: Text, before: list[int], ids: Ints) -> str:
    """The text of ids that follow others: a decoder may leave out the space of a first word."""
    head = tokenizer.decode(before, skip_special=False)
    whole = tokenizer.decode([*before, *ids.tolist()], skip_special=False)
    return (
        whole[len(head) :] if whole.startswith(head) else tokenizer.decode(ids.tolist(), skip_special=False)
    )


def _begins(path: Path, start: Path) -> bool:
    """Whether a path is another one that went on: of the same pieces, not only of equal ones."""
    return len(path) >= len(start) and all(a is b for a, b in zip(path, start, strict=False))
