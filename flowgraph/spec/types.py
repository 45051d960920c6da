"""What a port can carry, and the promises about it. One small file, so that both sides of a seam read the same.

Arrays are spelled with jaxtyping (`Int32[Array, "token"]`); everything else is an `Annotated` Python type
with one of the markers below. A port without a marker that is no array is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NewType, get_args

import msgspec
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    Array = npt.NDArray[Any]
else:

    class Array:
        """A buffer with dtype, shape and device: numpy on owners that import no torch, torch elsewhere."""


# Rows are made from rows: a group is sampled into trajectories, a step collects trajectories. The order of this
# tuple is the order of derivation, so a hop may read the columns of any kind at or before its own.
RowKind = Literal["group", "trajectory", "step"]
ROW_KINDS: tuple[RowKind, ...] = get_args(RowKind)

# When a value dies, from the shortest life to the longest.
Lifetime = Literal["firing", "trajectory", "group", "consumed", "step", "version", "durable", "run"]
LIFETIMES: tuple[Lifetime, ...] = get_args(Lifetime)

ReadMode = Literal["queue", "latest", "event"]

# What a number counts. A reader that asks for one gets no other number; where a plain int will do, each is one.
Version = NewType("Version", int)  # batches accounted for in the published weights
Room = NewType("Room", int)  # rows that a pool has room for, those on their way to it included
Backlog = NewType("Backlog", int)  # requests that an engine has and can't compute now
Held = NewType("Held", int)  # of the trajectories in flight, how many of the youngest are to wait
Short = NewType("Short", int)  # the number, from 1, of the batch for which rows are missing; 0 while none are

# How the bytes of a seam cross; rows and values cross as control messages.
Transport = Literal["fused", "in process", "shared memory", "through the driver", "control"]


class Row(msgspec.Struct, frozen=True, gc=False):
    """What a fold sees of a row: its identity, lengths and tag, never its payload.

    key: unique among the rows of its kind, rising in order of creation
    parents: a trajectory's group (one row), a step's trajectories (its rows, in order)
    tag: the version current when the row was registered
    dims: the row's own lengths, e.g. {"token": 61, "leaf": 1}
    failed: why a trajectory came to nothing, "" for one that did not; then it has no columns, and can only be dropped
    """

    kind: str
    key: int
    parents: tuple[Row, ...] = ()
    tag: int = 0
    dims: dict[str, int] = {}
    failed: str = ""

    @property
    def uid(self) -> int:
        """The key of the group that this row comes from."""
        row = self
        while row.kind != "group":
            row = row.parents[0]
        return row.key


class Dropped(msgspec.Struct, frozen=True):
    """A fold lets go of a row that will never be trained, for a counted reason."""

    row: Row
    reason: str


# --- markers of ports that are no arrays -------------------------------------------------------------------


class Text(msgspec.Struct, frozen=True):
    """Unicode text, one a row along `dim` ("" for a single one); `max` bounds the UTF-8 bytes of each."""

    dim: str = ""
    mean: int = 256
    max: int = 4096


class Json(msgspec.Struct, frozen=True):
    """Any JSON value, one a row along `dim` ("" for a single one); `max` bounds the encoded bytes of each.

    NaN and the infinities are no JSON: a hop that gives one is refused.
    """

    dim: str = ""
    mean: int = 256
    max: int = 4096


class Tensors(msgspec.Struct, frozen=True):
    """A named set of tensors, priced from the model's own table of names, shapes and dtypes."""


class Scalars(msgspec.Struct, frozen=True):
    """Named floats for metrics.jsonl; they travel in the control message and no hop reads them."""


class Rows(msgspec.Struct, frozen=True):
    """A stream of rows of one kind, by reference: whoever reads a column of it gets the bytes from its writer."""

    kind: RowKind


class Latest(msgspec.Struct, frozen=True):
    """As an input: sampled, never blocks. As an output: overwritten, `initial` until first written."""

    initial: int | None = None


class Event(msgspec.Struct, frozen=True):
    """As an input: any one fires the hop; it does not count in the rate balance."""


# --- promises about content ---------------------------------------------------------------------------------


class Mask(msgspec.Struct, frozen=True):
    """Booleans; a bit each is enough."""


class LastToken(msgspec.Struct, frozen=True):
    """Non-zero at most at the last valid token of each row along `dim`: one value a row is enough.

    The bounds of the rows are the hop's port of shape `dim+1`, and what is valid says its `Mask` of the same shape as
    this port. `bounds` and `mask` name them when there are several.
    """

    dim: str
    bounds: str = ""
    mask: str = ""


class TiledOver(msgspec.Struct, frozen=True):
    """Constant over the valid tokens of each row along `dim`, and 0 elsewhere: one value a row is enough.

    Bounds and mask are found as those of LastToken. Without any mask every token is valid.
    """

    dim: str
    bounds: str = ""
    mask: str = ""


class Below(msgspec.Struct, frozen=True):
    """Integers in [0, bound); `bound` is a dim expression ("vocab", "token+1"). The smallest unsigned dtype fits."""

    bound: str


class Shared(msgspec.Struct, frozen=True):
    """Rows along `dim` begin as earlier ones do, as the paths of a tree: each of its nodes is there once.

    Lossless whatever the content. The bounds of the rows are found as those of LastToken.
    """

    dim: str
    bounds: str = ""


class Derivable(msgspec.Struct, frozen=True):
    """A pure function of other outputs of the same hop: nothing crosses to a reader that has those.

    by: a module-level function that takes the arrays named in `sources`, in order, and gives this one
    """

    by: Callable[..., Any]
    sources: tuple[str, ...]


# --- where a keyword-only parameter gets its value when it is not the user's to set ---------------------------


class Dim(msgspec.Struct, frozen=True):
    """The largest value of a named dim of the graph."""

    name: str


class Seam(msgspec.Struct, frozen=True):
    """A fact of the seam that feeds port `port`: `max_lag`, `delay` or `every`."""

    port: str
    fact: Literal["max_lag", "delay", "every"]


class Credit(msgspec.Struct, frozen=True):
    """How many steps a fold that collects may make now. It is called again when there is more, or it has made one.

    One without such a parameter is called only while it may make a step, and hears of what came only then.
    """


class Run(msgspec.Struct, frozen=True):
    """A setting of the run: `seed` or `steps`."""

    name: Literal["seed", "steps"]


Fact = Mask | LastToken | TiledOver | Below | Shared | Derivable
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name) for name in ("bool", *INTEGERS, "float16", "float32", "float64")
}


def dtype_of(name: str) -> np.dtype[Any]:
    """The numpy dtype of a seam dtype; bfloat16 and fp8 by ml_dtypes. Raises TypeError for an unknown name."""
    if name in NUMPY_DTYPES:
        return NUMPY_DTYPES[name]
    import ml_dtypes

    try:
        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype
    except (AttributeError, TypeError):
        raise TypeError(f"{name} is no dtype that crosses a seam") from None
