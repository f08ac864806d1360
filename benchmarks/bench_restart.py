"""The time until a killed engine serves again, and the unavoidable part of it.

    PYTHONPATH=.src:tests python -m benchmarks.bench_restart [--model FOLDER] [--trials 3]

Prints one JSON object with the seconds of the imports, of the model load, and from `kill -9` to
ready again. Exits with 1 if that exceeds imports and load by more than 2 s. Without --model it uses
a tiny random one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.config import EngineConfig
from loraplex.engine.process.adapter_fetches import FetchedBlock
from loraplex.engine.process.client import EngineClient
from loraplex.engine.process.engine_process import engine_environment
from support.models import make_tiny_llama

MARGIN_SECONDS = 2.0
KV_CACHE_BYTES = 64 << 20
ARENA_BYTES = 16 << 20
_MEASURE = """
import sys, time
begun_at = time.monotonic()
import msgspec
from loraplex.engine.config import EngineConfig
from loraplex.engine.core import EngineCore
from loraplex.engine.parts import open_parts
imported_at = time.monotonic()
EngineCore(open_parts(msgspec.json.decode(sys.argv[1], type=EngineConfig)))
print(imported_at - begun_at, time.monotonic() - imported_at)
"""


def measure_parts(config: EngineConfig) -> tuple[float, float]:
    """Seconds of the imports and of the model's load, in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _MEASURE, msgspec.json.encode(config).decode()],
        env=engine_environment(os.environ),
        capture_output=True,
        text=True,
        check=True,
    )
    imports, load = map(float, done.stdout.split())
    return imports, load


async def measure_restart(config: EngineConfig) -> float:
    """Seconds from `kill -9` until the engine is ready again."""

    async def no_adapters(key: AdapterKey) -> FetchedBlock:
        raise AssertionError(key)

    client = EngineClient(config, on_adapter_wanted=no_adapters)
    try:
        await client.start()
        assert client.pid is not None
        killed_at = time.monotonic()
        os.kill(client.pid, signal.SIGKILL)
        while client.is_ready:
            await asyncio.sleep(0.001)
        while not client.is_ready:
            await asyncio.sleep(0.005)
        return time.monotonic() - killed_at
    finally:
        await client.stop()


def measure(model: Path, num_trials: int) -> dict[str, float]:
    config = EngineConfig(str(model), kv_cache_bytes=KV_CACHE_BYTES, arena_bytes=ARENA_BYTES)
    parts = [measure_parts(config) for _ in range(num_trials)]
    imports, load = (statistics.median(part) for part in zip(*parts, strict=True))
    again = statistics.median(asyncio.run(measure_restart(config)) for _ in range(num_trials))
    return {
        "imports_seconds": imports,
        "model_load_seconds": load,
        "ready_again_seconds": again,
        "margin_seconds": again - imports - load,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--trials", type=int, default=3)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as home:
        model = options.model or make_tiny_llama(Path(home) / "base")
        figures = measure(model, options.trials)
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))
    return 0 if figures["margin_seconds"] <= MARGIN_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
