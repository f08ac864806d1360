"""`loraplex serve` with a local store that responds late, like one in another region.

python -m benchmarks.slow_store LATENCY_SECONDS serve ...     (`fetch`: its fetcher process)
"""

from __future__ import annotations

import sys
import time
from typing import Any

from loraplex.adapters import fetcher_process
from loraplex.adapters.fetcher_client import FetcherClient
from loraplex.adapters.store.local import LocalStore


def main() -> None:
    latency, *arguments = sys.argv[1:]
    if arguments == ["fetch"]:
        _delay_fetches(float(latency))
        fetcher_process.main()
    from loraplex.api.cli import app

    command = (sys.executable, "-P", "-m", "benchmarks.slow_store", latency, "fetch")
    defaults = FetcherClient.__init__.__kwdefaults__
    assert defaults is not None
    defaults["command"] = command
    app(arguments)


def _delay_fetches(seconds: float) -> None:
    fetch_file = LocalStore.fetch_file

    def fetch_late(*arguments: Any, **named: Any) -> None:
        time.sleep(seconds)
        fetch_file(*arguments, **named)

    LocalStore.fetch_file = fetch_late  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
