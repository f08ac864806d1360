"""`loraplex demo`: serves three adapters on this machine and checks their answers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from ..demo.asking import AskingFailed
from ..demo.manifest import WEIGHTS
from ..demo.recipe import BASE_NAME
from ..demo.report import print_next_steps, print_outcome
from ..demo.results import write_results
from ..demo.scenario import (
    Outcome,
    Pushed,
    ask_mixed,
    num_questions,
    push_all,
)
from ..local.installation import Installation, StepFailed
from ..local.server import LocalServer, LocalServerFailed, leave_on_sigterm, running_server
from .exit_codes import CommandFailed, ExitCode

app = typer.Typer(add_completion=False)

REQUIRED = {"torch": "engine", "transformers": "engine", "openai": "demo"}
"""Packages that the demo needs beyond the core, and the extra that has each."""
QUANTIZATION = "int8"
"""Of the base."""
SERVE_OPTIONS = (
    *("--model", str(WEIGHTS / "base"), "--served-model-name", BASE_NAME),
    *("--quantize", QUANTIZATION),
    # The model is small: leave the machine's memory to others.
    *("--arena-gib", "0.05", "--kv-cache-gib", "0.25", "--host-cache-gib", "0.05"),
    # So small a model gains nothing from more threads, and on a busy machine they wait for each
    # other: 650 tokens/s with one where two gave 64.
    *("--num-threads", "1"),
)


@app.command()
def demo(
    once: Annotated[
        bool, typer.Option("--once", envvar="ONCE", help="Stop after the answers.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results to this file, too.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port.", show_default="a free one")
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, max=4, help="Processes that compute each layer together.")
    ] = 1,
    pipeline_parallel_size: Annotated[
        int, typer.Option(min=1, max=4, help="Stages that have a part of the layers each.")
    ] = 1,
) -> None:
    """Serve a small base and three adapters of two tenants, and query them in one batch. On a
    terminal the server runs until ^C. Leaves no files."""
    _check_installed()
    leave_on_sigterm()
    out, progress = Console(), Console(stderr=True)
    keep_serving = not once and sys.stdout.isatty()
    options = [
        *SERVE_OPTIONS,
        *("--tensor-parallel-size", str(tensor_parallel_size)),
        *("--pipeline-parallel-size", str(pipeline_parallel_size)),
    ]
    with TemporaryDirectory(prefix="loraplex-demo-") as folder:
        try:
            is_good = _run(
                Path(folder),
                out,
                progress,
                json_file,
                options=options,
                port=port,
                keep_serving=keep_serving,
            )
        except (AskingFailed, LocalServerFailed, StepFailed) as exc:
            raise CommandFailed(str(exc), ExitCode.UNAVAILABLE) from exc
        except KeyboardInterrupt:
            raise CommandFailed("stopped by ^C before all answers arrived") from None
    if not is_good:
        raise CommandFailed("the answers are not what the adapters were trained to give")


def _run(
    folder: Path,
    out: Console,
    progress: Console,
    json_file: Path | None,
    *,
    options: Sequence[str],
    port: int | None,
    keep_serving: bool,
) -> bool:
    """Serve with these options, push, ask and report; returns whether the answers are good
    enough."""
    data_dir = folder / "data"
    with progress.status(f"Loading {BASE_NAME}, quantization {QUANTIZATION} ...") as status:
        starting = running_server(
            [*options, "--data-dir", str(data_dir)], port=port, log=folder / "serve.log"
        )
        with starting as server:
            installation = Installation(data_dir=data_dir, url=server.url, show=progress.print)
            status.update("Pushing adapters ...")
            pushed = push_all(installation.with_operator())
            status.stop()
            outcome = _ask(pushed, server, progress)
            print_outcome(out, outcome)
            if json_file is not None:
                write_results(outcome.results, json_file)
            if keep_serving:
                print_next_steps(out, pushed.namesakes, server.url)
                _serve_until_interrupted(out, server)
            else:
                out.print(
                    "To try it yourself, run `loraplex demo` on a terminal: the server stays up."
                )
    return outcome.is_good


def _ask(pushed: Pushed, server: LocalServer, console: Console) -> Outcome:
    with Progress(console=console, transient=True) as bar:
        asking = bar.add_task("Querying concurrently", total=num_questions(pushed))
        return ask_mixed(
            pushed,
            url=server.url,
            quantization=QUANTIZATION,
            on_answer=lambda: bar.advance(asking),
        )


def _serve_until_interrupted(console: Console, server: LocalServer) -> None:
    console.print(f"\nServing at {server.url}/v1; ^C stops it.")
    try:
        returncode = server.process.wait()
    except KeyboardInterrupt:
        console.print("Stopping.")
    else:
        raise LocalServerFailed(f"the server exited with status {returncode}")


def _check_installed() -> None:
    missing = sorted({extra for package, extra in REQUIRED.items() if find_spec(package) is None})
    if missing:
        raise CommandFailed(f"the demo needs: pip install 'loraplex[{','.join(missing)}]'")
