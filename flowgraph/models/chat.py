"""A chat template rendered as transformers renders it, with jinja2 alone."""

from __future__ import annotations

import datetime
import functools
import json
from typing import TYPE_CHECKING, Any, NoReturn

from flowgraph.errors import ModelError

if TYPE_CHECKING:
    from jinja2 import Template


def render(template: str, **variables: Any) -> str:
    """Render a template in a sandbox. Raises ModelError when it is malformed or refuses the messages."""
    from jinja2 import TemplateError

    try:
        return _compile(template).render(**variables)
    except TemplateError as error:
        raise ModelError(
            f"the chat template refused: {error.message or type(error).__name__}",
            "check the messages' roles and order, or the model's chat_template",
        ) from error


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> Template:
    """The settings, names and tags are those of transformers' apply_chat_template."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    extensions = [_generation_tag(), "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


@functools.cache
def _generation_tag() -> type:
    """`{% generation %}…{% endgeneration %}` marks the assistant's words; they are rendered as they stand."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    return Generation
