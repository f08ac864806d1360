"""A base in this process for the tests of the offline classes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loraplex import LLM

SMALL: dict[str, Any] = {"memory_gib": 0.5, "host_cache_gib": 0.05, "num_threads": 1}
"""Leaves room for others on the machine."""


@pytest.fixture(scope="session")
def llm(tiny_base: Path) -> Iterator[LLM]:
    """The base of the session's server."""
    with LLM(tiny_base, **SMALL) as running:
        yield running
