"""Keeping transformers quiet where nobody watches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def no_progress_bar() -> Iterator[None]:
    """Keep transformers from drawing progress bars into a worker's log."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def no_load_report() -> Iterator[None]:
    """Keep transformers from reporting tensors that a model's files have too many or too few of."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
