"""Fixtures for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.models import make_tiny_llama


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama in the Hugging Face layout, fp32."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny-base"))
