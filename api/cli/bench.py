"""`loraplex bench`: measures serving speed on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from ...engine.config import EngineConfig, Quantization
from ...engine.process.engine_process import DEFAULT_VARIABLES
from ..bench.load_client import RequestFailed
from ..bench.models import BaseShape
from ..bench.serving import (
    Plan,
    Report,
    Target,
    make_models,
    measure,
    push_adapters,
    served_base,
)
from ..bench.summary import Summary
from ..local.installation import Installation, StepFailed, TenantAccess
from ..local.server import LocalServerFailed, leave_on_sigterm, running_server
from ..settings import load_settings
from .engine_extra import need_engine
from .exit_codes import CommandFailed, ExitCode
from .output import AsJson, print_json

app = typer.Typer(no_args_is_help=True, add_completion=False)

TENANT = "bench"
Quantize = Annotated[Quantization, typer.Option()]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
ModelDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder in which the models are created and kept.", show_default="in the data folder"
    ),
]
PROFILE_CACHE_BYTES = 1 << 28
"""Host memory for the adapters of `profile`."""


@app.callback()
def _root() -> None:
    """Benchmarks."""


@app.command()
def serving(
    concurrency: Annotated[int, typer.Option(min=1)] = Plan.concurrency,
    requests: Annotated[int, typer.Option(min=1, help="Of each run.")] = Plan.num_requests,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = Plan.prompt_tokens,
    output_tokens: Annotated[int, typer.Option(min=2)] = Plan.output_tokens,
    adapters: Annotated[int, typer.Option(min=1, help="How many.")] = Plan.num_adapters,
    rank: Annotated[int, typer.Option(min=1, help="Of each adapter.")] = Plan.rank,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each kind.")] = Plan.repeats,
    quantize: Quantize = Quantization.NONE,
    dtype: Dtype = "auto",
    model_dir: ModelDir = None,
    url: Annotated[
        str | None,
        typer.Option(help="A server of the base in the model folder.", show_default="own"),
    ] = None,
    key: Annotated[
        str | None, typer.Option(envvar="LORAPLEX_API_KEY", help="For --url.", show_envvar=True)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare a mix of adapters with the base alone, on a random Llama model. Prompts are random
    token ids without shared prefixes; outputs are greedy and of fixed length."""
    plan = Plan(
        concurrency=concurrency,
        num_requests=requests,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        num_adapters=adapters,
        rank=rank,
        repeats=repeats,
    )
    if url is not None and key is None:
        raise CommandFailed("--url needs a key: set LORAPLEX_API_KEY", ExitCode.AUTHENTICATION)
    leave_on_sigterm()
    folder = model_dir or load_settings().prepare_data_dir() / "bench"
    serve_options = ("--quantize", quantize.value, "--dtype", dtype)
    try:
        report = _measure(plan, folder, serve_options, url=url, key=key)
    except (LocalServerFailed, StepFailed, RequestFailed) as exc:
        raise CommandFailed(str(exc), ExitCode.UNAVAILABLE) from exc
    if as_json:
        print_json(report.as_json())
    else:
        _print_report(report)


@app.command()
def profile(
    sequences: Annotated[int, typer.Option(min=1, max=1000, help="That decode together.")] = 16,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    adapters: Annotated[int, typer.Option(min=0, help="How many; 0: the base alone.")] = 8,
    rank: Annotated[int, typer.Option(min=1, help="Of each adapter.")] = 16,
    steps: Annotated[int, typer.Option(min=1)] = 50,
    quantize: Quantize = Quantization.NONE,
    dtype: Dtype = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    model_dir: ModelDir = None,
    as_json: AsJson = False,
) -> None:
    """Print the time of a decode step by kind of work, on a random Llama model."""
    need_engine("profiling")
    # As in an engine process; OpenMP reads them when PyTorch is imported.
    for name, value in DEFAULT_VARIABLES.items():
        os.environ.setdefault(name, value)
    from ...engine.errors import EngineError
    from ...engine.step_profile import ProfileFailed
    from ..bench.decode_profile import profile_models

    folder = model_dir or load_settings().prepare_data_dir() / "bench"
    console = Console(stderr=True)
    plan = Plan(num_adapters=adapters, rank=rank)
    with console.status("Making the models ...") as status:
        folders = make_models(folder, BaseShape(), plan)
        status.update("Measuring ...")
        config = EngineConfig(
            str(folder / "base"),
            quantization=quantize,
            dtype=dtype,
            device=device,
            max_num_seqs=sequences,
            host_cache_bytes=PROFILE_CACHE_BYTES,
        )
        try:
            found = profile_models(
                config, folders, num_sequences=sequences, context=context, num_steps=steps
            )
        except (EngineError, ProfileFailed) as exc:
            raise CommandFailed(str(exc)) from exc
    if as_json:
        print_json({"step_ms": found.step_milliseconds, "milliseconds": found.milliseconds})
        return
    table = Table("", Column("ms a step", justify="right"), Column("share", justify="right"))
    for work, taken in found.milliseconds.items():
        table.add_row(work, f"{taken:,.2f}", f"{taken / found.step_milliseconds:.0%}")
    table.add_row("step", f"{found.step_milliseconds:,.2f}", "")
    Console().print(table)


def _measure(
    plan: Plan, folder: Path, serve_options: tuple[str, ...], *, url: str | None, key: str | None
) -> Report:
    console = Console(stderr=True)
    shape = BaseShape()
    with console.status("Making the models ...") as status:
        adapters = make_models(folder, shape, plan)
        status.update("Starting the server ...")
        with _site(folder / "base", serve_options, console, url=url, key=key) as (site, tenant):
            status.update("Pushing adapters ...")
            target = Target(
                base_url=f"{site.url}/v1",
                api_key=tenant.api_key,
                base=served_base(site.url, tenant),
                adapters=push_adapters(site, tenant, adapters),
            )
            status.stop()
            with Progress(console=console, transient=True) as bar:
                sending = bar.add_task("Measuring", total=plan.num_sent)
                return measure(plan, target, shape, on_finished=lambda: bar.advance(sending))


@contextmanager
def _site(
    model: Path,
    serve_options: tuple[str, ...],
    console: Console,
    *,
    url: str | None,
    key: str | None,
) -> Iterator[tuple[Installation, TenantAccess]]:
    """The server at `url` and its caller, or a server of our own that is gone afterwards."""
    with TemporaryDirectory(prefix="loraplex-bench-") as temporary:
        data_dir = Path(temporary) / "data"
        if url is not None and key is not None:
            site = Installation(data_dir, url.rstrip("/").removesuffix("/v1"), console.print)
            yield site, TenantAccess(TENANT, key)
            return
        options = ["--model", str(model), "--data-dir", str(data_dir), *serve_options]
        log = Path(temporary) / "serve.log"
        with running_server(options, port=None, log=log) as server:
            site = Installation(data_dir, server.url, console.print).with_operator()
            yield site, site.create_tenant(TENANT)


def _print_report(report: Report) -> None:
    plan, served = report.plan, report.served
    console = Console()
    console.print(
        f"{plan.concurrency} concurrent, {plan.prompt_tokens} in, {plan.output_tokens} out, "
        f"{plan.num_adapters} adapters of rank {plan.rank}; {served.dtype}, quantization "
        f"{served.quantization}; {plan.repeats} runs each"
    )
    table = Table()
    for heading in ("", "mixed adapters", "base only"):
        table.add_column(heading, justify="right" if heading else "left")
    rows = zip(_rows(report.mixed), _rows(report.base_only), strict=True)
    for (name, mixed), (_, base_only) in rows:
        table.add_row(name, f"{mixed:,.1f}", f"{base_only:,.1f}")
    console.print(table)
    console.print(f"mixed / base only: [bold]{report.ratio:.2f}[/bold]")


def _rows(summary: Summary) -> Iterator[tuple[str, float]]:
    yield "output tokens/s", summary.output_tokens_per_second
    latencies = {"TTFT": summary.ttft_ms, "ITL": summary.itl_ms, "TPOT": summary.tpot_ms}
    for latency, values in latencies.items():
        for percentile, value in values.items():
            yield f"{latency} {percentile}, ms", value
