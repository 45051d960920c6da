"""The audit as CSV (RFC 4180), a row a field: plain numbers of bytes a step, and nothing where one is unknown."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from flowgraph.plan.copies import Copies
from flowgraph.report.audit.rows import Audit, FieldRow, SeamRow

HEAD = (
    "source", "reader", "port", "producer", "column", "type", "facts", "encoding", "writer_owner", "reader_owner",
    "transport", "lifetime", "readers", "copies", "copied", "mean", "max", "share", "before", "driver", "priced",
    "token_raw", "token_base64", "naive_read_raw", "naive_read_base64", "naive_controller_raw",
    "naive_controller_base64", "ranks", "slice_bytes", "expected", "measured", "off", "exceeds", "over",
)  # fmt: skip


def to_csv(audit: Audit) -> str:
    """Lines end in CRLF; several readers or facts of one field are joined by blanks."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(HEAD)
    whole = audit.total.mean
    for seam in audit.seams:
        for field in seam.fields:
            writer.writerow(["" if cell is None else cell for cell in _row(seam, field, whole)])
    return out.getvalue()


def _row(seam: SeamRow, field: FieldRow, whole: float) -> Iterator[object]:
    yield from (seam.source, seam.reader, field.port, field.producer, field.column, field.type)
    yield from (" ".join(field.facts), field.encoding, *field.owners, seam.transport, seam.lifetime)
    yield from (" ".join(field.readers), _total(field.copies), _total(field.copied), field.mean, field.max)
    yield from (field.mean / whole if whole else 0.0, field.before, field.driver, _flag(field.priced))
    one = field.naive
    yield from (one and one.token_raw, one and one.token_base64)
    yield from (one and one.read_raw, one and one.read_base64)
    yield from (one and one.controller_raw, one and one.controller_base64)
    yield from (field.ranks, field.slice_bytes, field.expected, field.measured)
    yield from (_flag(field.off), _flag(field.exceeds), seam.over)


def _total(copies: Copies | None) -> float | None:
    return None if copies is None else copies.total


def _flag(value: bool) -> str:
    return "true" if value else "false"
