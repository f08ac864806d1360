"""Trains an adapter on the demo's base in int8, in a confined process, and prints the pace.

`python -m benchmarks.tune_check --examples 2000 --quantization int8 --device cpu`
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import islice
from pathlib import Path

from loraplex.api.demo.task import Style, training_requests
from loraplex.engine.tuning.messages import Checkpointed, Failed, Finished, Open, Ready, Trained
from support.tuning import TrainerProcess, chat_line, open_order, recipe, write_lines

BASE = Path(__file__).parents[1] / "api" / "demo" / "weights" / "base"


def main() -> None:
    """Print one line per tenth of the run, then tokens per second of steps and in total."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=2_000)
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _train(_order(Path(folder), options))


def _order(work: Path, options: argparse.Namespace) -> Open:
    requests = islice(training_requests(seed=5), options.examples)
    lines = (chat_line(request.prompt, request.answer(Style.SQL)) for request in requests)
    settings = recipe(rank=16, alpha=32.0, batch_size=16, learning_rate=3e-3, checkpoint_steps=100)
    return open_order(
        BASE,
        write_lines(work / "lines", lines),
        work,
        recipe=settings,
        quantization=options.quantization,
        device=options.device,
        dtype="auto",
    )


def _train(order: Open) -> None:
    started = time.perf_counter()
    first = started
    num_steps = 1
    with TrainerProcess(order, "loraplex.engine.tuning.process", num_threads=None) as trainer:
        while True:
            match trainer.receive():
                case Ready() as ready:
                    first, num_steps = time.perf_counter(), ready.num_steps
                    print(f"ready after {first - started:.1f} s; {num_steps} steps")
                case Trained() as done if done.step % max(num_steps // 10, 1) == 0:
                    accuracy = 100 * (done.accuracy or 0.0)
                    print(f"step {done.step}: loss {done.loss:.3f}, {accuracy:.1f} % of tokens")
                case Checkpointed() | Trained():
                    pass
                case Finished() as end:
                    break
                case Failed() as failed:
                    raise SystemExit(f"{failed.code}: {failed.message}")
    now = time.perf_counter()
    print(
        f"{order.quantization} on {order.device}: {end.num_tokens} tokens, "
        f"{end.num_tokens / (now - first):.0f} tokens/s of steps, "
        f"{end.num_tokens / (now - started):.0f} with the start"
    )


if __name__ == "__main__":
    main()
