"""Shared by all tests: seeds, torch's version in the header, the end of the pool of ranks."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from importlib.metadata import version

import pytest


def pytest_report_header() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("torch", "pytorch-lightning", "hydra-core"))


@pytest.fixture(autouse=True)
def seeds() -> None:
    """The same random numbers in every test, whatever ran before; torch only where a test has loaded it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _end_of_pool() -> Iterator[None]:
    yield
    if "ranks" in sys.modules:
        sys.modules["ranks"].close_pool()
