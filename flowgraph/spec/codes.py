"""Every code that a finding or a failed run can have, with what it says in a line; a page on each is in `pages/`.

FG1xx to FG5xx are findings of `flowgraph check`. FG9xx are the errors of a run, see `errors.py`.
"""

from __future__ import annotations

from importlib.resources import files

CODES: dict[str, str] = {
    "FG100": "the graph file can't be read",
    "FG101": "invalid YAML",
    "FG102": "YAML reads a value otherwise than it looks",
    "FG103": "a key stands twice",
    "FG104": "an unknown key",
    "FG105": "a missing key",
    "FG106": "a value of the wrong form",
    "FG107": "what `use:` names can't be imported",
    "FG108": "a name that no hop has",
    "FG109": "an input or output that the hop does not have",
    "FG110": "a hop lacks an input",
    "FG111": "an unknown, missing or wrong option under `with:`",
    "FG113": "a model that is not there",
    "FG114": "what can be priced and not run",
    "FG201": "a function whose signature can't be read as a hop",
    "FG202": "writer and reader differ in type",
    "FG203": "writer and reader differ in shape",
    "FG204": "a dim without a size",
    "FG205": "a hop that can't be split as it says",
    "FG206": "a fact that nothing can be made of",
    "FG207": "one dim is two things",
    "FG301": "an owner that is not there or lacks the resource",
    "FG302": "two writers of one value",
    "FG303": "a value is read after it died",
    "FG304": "engine and learner differ in model, dtype or temperature",
    "FG305": "a hop that keeps what it does not declare",
    "FG306": "what is kept of rows grows with the run",
    "FG401": "a cycle without a delay",
    "FG402": "rows would become staler than `max_lag`",
    "FG403": "rows of another kind than the reader takes",
    "FG404": "no step would ever be made",
    "FG405": "the largest lag is not stated",
    "FG406": "more or fewer rows are made than are taken",
    "FG407": "what is said of a seam means nothing there",
    "FG501": "more bytes than can be addressed",
    "FG502": "more bytes than the budget",
    "FG503": "a budget that can't be",
    "FG900": "the run can't start or go on",
    "FG901": "a payload breaks its port's type or bound",
    "FG902": "a hop raised",
    "FG903": "a worker process ended",
    "FG904": "a wait outlived its deadline",
    "FG905": "trajectories were lost or counted twice",
    "FG906": "a promise about content is broken",
    "FG907": "a hop that declares no state keeps some",
    "FG908": "the machine can't hold the arenas, or a copy of the weights",
    "FG909": "no replica of an engine can serve",
}


def page(code: str) -> str:
    """The page on a code, as Markdown. Raises KeyError for a code that is none."""
    if code not in CODES:
        raise KeyError(code)
    return files(__package__).joinpath("pages", f"{code}.md").read_text(encoding="utf-8")
