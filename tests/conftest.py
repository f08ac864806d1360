"""Fixtures for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch is imported, and for the processes that tests start: tiny matrices gain nothing from
# threads, and threads that wait for each other on shared cores cost several times the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Each HTTP client reads the certificates of all authorities when it is made, 20 ms of CPU. Those of
# the tests speak plain HTTP to this machine: to them there is no authority.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

pytest_plugins = ["support.slowest_files"]


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama in the Hugging Face layout, fp32."""
    from support.models import make_tiny_llama  # here: many tests need no torch

    return make_tiny_llama(tmp_path_factory.mktemp("tiny-base"))
