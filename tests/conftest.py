"""Fixtures for all tests."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import structlog

# Before torch is imported, and for the processes that tests start: tiny matrices gain nothing from
# threads, and threads that wait for each other on shared cores cost several times the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Assertions are rewritten and modules compiled once, not by each worker and each process of a test:
# where the environment says to keep no bytecode, as in many containers, that takes 8 s a worker.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

gc.set_threshold(100_000)  # see pytest_collection_finish

# Each HTTP client reads the certificates of all authorities when it is made, 20 ms of CPU. Those of
# the tests speak plain HTTP to this machine: to them there is no authority.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

pytest_plugins = [
    "support.first_files",
    "support.slow_files",
    "support.slow_sample",
    "support.slowest_files",
]


@pytest.hookimpl(trylast=True)  # after pytest's own, which prints the stacks of all threads
def pytest_configure() -> None:
    """A crash prints the stack of the thread that crashed, last in the output of a run.

    A worker's other threads are dozens: servers, pools, loaders.
    """
    faulthandler.enable(os.dup(2), all_threads=False)


def pytest_collection_finish() -> None:
    """The imports of all test files leave a million objects, which no collection looks through.

    With Python's own settings a tenth of a run's CPU time went there.
    """
    gc.freeze()


# At its end Python frees what nothing refers to, and libraries count what was left. Not before:
# pytest collects five times when it ends, and all objects took 2 s of CPU of each worker.
atexit.register(gc.unfreeze)


@pytest.fixture(scope="session", autouse=True)
def _short_polling_intervals() -> Iterator[None]:
    """Commands poll every 20 ms."""
    with patch("loraplex.api.client.polling.FIRST_SECONDS", 0.02):
        yield


@pytest.fixture(scope="session", autouse=True)
def _plain_tracebacks() -> None:
    """Rich draws every local variable of every frame of a logged exception, 3 s of CPU each."""
    renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], renderer])


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama in the Hugging Face layout, fp32."""
    from support.models import make_tiny_llama  # here: many tests need no torch

    return make_tiny_llama(tmp_path_factory.mktemp("tiny-base"))
