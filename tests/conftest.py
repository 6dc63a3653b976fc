"""Options and fixtures for all tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-scenarios", action="store_true", help="write what the machine says into the scenario files"
    )
