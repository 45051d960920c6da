"""Fixtures that tests in several folders share."""

import os

import pytest

SGLANG = "FLOWGRAPH_SGLANG_PYTHON"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests against a real server are deselected unless they are asked for; then they run or fail, and never skip."""
    if item.get_closest_marker("sglang") and not os.environ.get(SGLANG):
        pytest.fail(f"this test needs a real SGLang server: let {SGLANG} name its interpreter", pytrace=False)


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
