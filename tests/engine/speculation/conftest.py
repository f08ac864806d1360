"""Fixtures for the tests of speculation."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.models import make_adapter, make_tiny_llama


@pytest.fixture(scope="session")
def adapter_folders(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters of the tiny base, of different ranks."""
    root = tmp_path_factory.mktemp("adapters")
    return [make_adapter(tiny_base, root / f"{r}", seed=r, r=r, scale=0.1) for r in (2, 8)]


@pytest.fixture(scope="session")
def small_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows nothing of the base: what it proposes is hardly ever right."""
    path = tmp_path_factory.mktemp("small-draft")
    return make_tiny_llama(path, seed=9, num_hidden_layers=1, hidden_size=32)
