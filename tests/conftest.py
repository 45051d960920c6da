"""Fixtures that tests in several folders share."""

import pytest


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The directory of the built-in model smollm2-135m. Fails, and never skips, where it can't be had."""
    from flowgraph.errors import ModelError
    from flowgraph.models import ensure

    try:
        return ensure("smollm2-135m", progress=False).path
    except ModelError as error:
        reason = str(error)
    pytest.fail(f"this test needs a model: run `flowgraph pull smollm2-135m` first\n{reason}", pytrace=False)
