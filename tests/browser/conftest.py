"""Tests in a real browser: skipped, by name, only where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.chromium import binary

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("browser")
            if binary() is None:
                item.add_marker(pytest.mark.skip(reason="no Chromium on this machine (Debian: chromium)"))
