"""What only a fold's signature must be: it decides by rows that it is shown, and makes some only where it says so."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from flowgraph.spec.ports import HopTypeError, Port

if TYPE_CHECKING:
    from flowgraph.spec.hop import Facts


def check_fold(
    use: str,
    facts: Facts,
    state: Any,
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    hints: Mapping[str, Any],
) -> None:
    """Raises HopTypeError for a state that can't be empty, and for ports that no run could fill or carry out."""
    _check_state(use, state)
    _check_inputs(use, inputs)
    _check_none(use, inputs, hints)
    _check_outputs(use, outputs)
    _check_makes(use, facts, outputs)


def _check_state(use: str, state: Any) -> None:
    """A run starts each fold from an empty state."""
    try:
        state()
    except Exception as error:
        message = f"the state of fold {use} can't be made empty: {error}"
        raise HopTypeError(message, "give every field of it a default") from None


def _check_inputs(use: str, inputs: Sequence[Port]) -> None:
    """A fold lives on the driver: it decides by rows, plain values and columns of the rows that it is shown."""
    shown = any(port.kind == "rows" for port in inputs)
    for port in inputs:
        if port.kind == "tensors" or (port.kind not in ("rows", "value") and not shown):
            message = f"fold {use} takes {port.name} as {port}, and a fold reads columns of the rows that it is shown"
            raise HopTypeError(message, "give it a port of Rows(…) too, or move it to a hop")


def _check_none(use: str, inputs: Sequence[Port], hints: Mapping[str, Any]) -> None:
    """A fold is called for one queue or event at a time, or for none, so that any of them may be None."""
    for port in inputs:
        comes = port.mode == "event" or (port.kind == "rows" and port.mode == "queue")
        if comes and not _takes_none(hints[port.name]):
            what = "Row" if port.kind == "rows" else port.dtype
            message = f"fold {use} takes {port.name} as never None, and it is None when another input changes"
            raise HopTypeError(message, f"annotate it as {what} | None, and look before it is used")


def _takes_none(hint: Any) -> bool:
    if typing.get_origin(hint) is Annotated:
        return _takes_none(hint.__origin__)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_takes_none(one) for one in typing.get_args(hint))
    return hint in (Any, None, type(None), object)


def _check_outputs(use: str, outputs: Sequence[Port]) -> None:
    for port in outputs:
        if port.kind not in ("rows", "value"):
            message = f"fold {use} gives {port.name} as {port}, and a fold gives rows and plain values only"
            raise HopTypeError(message, "annotate it as Rows(…), Latest() or Event(), or move it to a hop")


def _check_makes(use: str, facts: Facts, outputs: Sequence[Port]) -> None:
    """New rows are of the kind that the fold declares to make; rows that are there it shows or hands on."""
    makes = facts.source or (facts.expand or facts.collect or (None, None))[1]
    for port in outputs:
        if port.kind == "rows" and not port.handed and port.row_kind != makes:
            message = f"fold {use} gives {port.name} as {port} that it does not make"
            help = "give those that are there, as a list of Row, or declare what it makes: source=, expand= or collect="
            raise HopTypeError(message, help)
