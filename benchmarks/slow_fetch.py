"""A fetcher process with a slow store: waits, then copies an object and verifies it.

python -m benchmarks.slow_fetch STORE KEY PATH SHA256 SIZE LATENCY_SECONDS
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from loraplex.adapters.store.local import LocalStore


def main() -> None:
    store, key, path, sha256, size_bytes, latency_seconds = sys.argv[1:]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    time.sleep(float(latency_seconds))
    LocalStore(Path(store)).fetch_file(key, Path(path), sha256=sha256, size_bytes=int(size_bytes))


if __name__ == "__main__":
    main()
