"""`loraplex serve`: one base model, its adapters, and the API."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from ...adapters.errors import AdapterError
from ...engine.config import (
    MAX_DRAFT_TOKENS,
    Acceptance,
    EngineConfig,
    KvDtype,
    Quantization,
)
from ..settings import Settings, default_data_dir, load_settings
from ..tools.tool_format import ToolFormatName
from .admin import DatabaseUrl, DataDir, naming_the_database
from .client import DEFAULT_URL
from .exit_codes import CommandFailed, ExitCode
from .numbers import check_finite
from .output import note
from .speculation import describe_speculation, parse_speculation

if TYPE_CHECKING:
    from ..runtime import Runtime

app = typer.Typer(add_completion=False)

GIB = 1 << 30
MIB = 1 << 20
DEFAULTS = EngineConfig(model="")
DEFAULT_SPECULATION = ["ngram"]


@app.command()
def serve(
    model: Annotated[str, typer.Option(help="A Hugging Face directory or hub id.")],
    quantize: Annotated[
        Quantization, typer.Option(help="How the base's linear layers are held.")
    ] = Quantization.NONE,
    dtype: Annotated[
        str, typer.Option(help="auto, float32, bfloat16 or float16.")
    ] = DEFAULTS.dtype,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = DEFAULTS.device,
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            envvar="LORAPLEX_SERVED_MODEL_NAME",
            help="What callers name the base.",
            show_default="its folder",
        ),
    ] = None,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    store: Annotated[
        str | None,
        typer.Option(
            envvar="LORAPLEX_STORE", help="A folder or s3://bucket/prefix.", show_default="a folder"
        ),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of one sequence.")
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Most sequences in one batch.")
    ] = DEFAULTS.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Token budget of one step.")
    ] = DEFAULTS.max_num_batched_tokens,
    memory_gib: Annotated[
        float | None,
        typer.Option(
            min=0.1, callback=check_finite, help="What the engine may use, weights included."
        ),
    ] = None,
    arena_gib: Annotated[
        float | None,
        typer.Option(min=0.001, callback=check_finite, help="Device memory for adapters."),
    ] = None,
    kv_cache_gib: Annotated[
        float | None,
        typer.Option(min=0.001, callback=check_finite, help="Device memory for KV blocks."),
    ] = None,
    host_cache_gib: Annotated[
        float, typer.Option(min=0.001, callback=check_finite, help="Host memory for adapters.")
    ] = DEFAULTS.host_cache_bytes / GIB,
    kv_dtype: Annotated[
        KvDtype, typer.Option(help="How keys and values are held.")
    ] = DEFAULTS.kv_dtype,
    lora_window_gib: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="CPU copies of adapters that decode together.",
            show_default="1/16 of the arena",
        ),
    ] = None,
    num_loader_threads: Annotated[
        int, typer.Option(min=1, help="Threads that load and zero adapters.")
    ] = DEFAULTS.num_loader_threads,
    loader_duty: Annotated[
        float,
        typer.Option(min=0.01, help="Part of a core that loading may have while requests run."),
    ] = DEFAULTS.loader_duty,
    swap_gib: Annotated[
        float,
        typer.Option(
            min=0.0, callback=check_finite, help="Host memory for the KV of preempted sequences."
        ),
    ] = DEFAULTS.swap_bytes / GIB,
    attention_window: Annotated[
        int | None,
        typer.Option(min=1, help="Most positions that a token sees.", show_default="all"),
    ] = None,
    attention_sinks: Annotated[
        int, typer.Option(min=0, help="First positions that stay visible behind that window.")
    ] = DEFAULTS.attention_sinks,
    target_itl: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            callback=check_finite,
            metavar="MS",
            help="Prompts share a step with decodes up to this time.",
        ),
    ] = None,
    speculation: Annotated[
        list[str],
        typer.Option(
            metavar="PROPOSER[:WHAT],...",
            help="Who guesses tokens ahead: ngram, draft:MODEL, early_exit:LAYERS (a number), "
            "medusa:CHECKPOINT or medusa_tree:CHECKPOINT (a folder); or off. "
            "Of several the one that pays is used.",
        ),
    ] = DEFAULT_SPECULATION,
    max_draft_tokens: Annotated[
        int,
        typer.Option(min=1, max=MAX_DRAFT_TOKENS, help="Most guesses for a sequence in one step."),
    ] = DEFAULTS.max_draft_tokens,
    acceptance: Annotated[
        Acceptance,
        typer.Option(
            help="Which guesses hold. coupled: the answer is plain decoding's, token for token. "
            "rejection: more hold at high temperature, and a seed no longer fixes the answer."
        ),
    ] = DEFAULTS.acceptance,
    max_queued: Annotated[
        int, typer.Option(min=1, help="Most requests that wait, over all tenants.")
    ] = DEFAULTS.max_queued,
    max_queued_per_tenant: Annotated[
        int, typer.Option(min=1, help="Most requests of one tenant that wait.")
    ] = DEFAULTS.max_queued_per_tenant,
    tenant_cap: Annotated[
        float,
        typer.Option(min=0.01, max=1.0, help="Most that one tenant holds while others wait."),
    ] = DEFAULTS.tenant_cap,
    reference_base: Annotated[
        str | None,
        typer.Option(
            envvar="LORAPLEX_REFERENCE_BASE",
            metavar="DIR",
            help="The base before quantization: new versions are compared with it.",
            show_default="not measured",
        ),
    ] = None,
    max_reference_kl: Annotated[
        float | None,
        typer.Option(
            envvar="LORAPLEX_MAX_REFERENCE_KL",
            callback=check_finite,
            help="Reject versions under which the base strays further from it, in nats.",
            show_default="none is rejected",
        ),
    ] = None,
    max_full_matrix_mib: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            callback=check_finite,
            help="What whole matrices (modules_to_save) of one adapter may take.",
            show_default="refused",
        ),
    ] = None,
    tool_format: Annotated[
        ToolFormatName | None,
        typer.Option(
            envvar="LORAPLEX_TOOL_FORMAT",
            help="How the base writes calls of tools.",
            show_default="as its chat template does",
        ),
    ] = None,
    num_threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of the maths.", show_default="all cores")
    ] = None,
) -> None:
    """Serve a base model and its tenants' adapters until ^C or SIGTERM."""
    engine_config = EngineConfig(
        model=model,
        quantization=quantize,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        memory_bytes=_bytes(memory_gib),
        arena_bytes=_bytes(arena_gib),
        kv_cache_bytes=_bytes(kv_cache_gib),
        host_cache_bytes=_bytes(host_cache_gib) or 0,
        lora_window_bytes=_bytes(lora_window_gib),
        num_loader_threads=num_loader_threads,
        loader_duty=loader_duty,
        num_threads=num_threads,
        kv_dtype=kv_dtype,
        swap_bytes=_bytes(swap_gib) or 0,
        attention_window=attention_window,
        attention_sinks=attention_sinks,
        target_itl_ms=target_itl,
        speculation=parse_speculation(speculation),
        max_draft_tokens=max_draft_tokens,
        acceptance=acceptance,
        max_queued=max_queued,
        max_queued_per_tenant=max_queued_per_tenant,
        tenant_cap=tenant_cap,
    )
    settings = load_settings(
        data_dir=data_dir,
        database=database,
        store=store,
        served_model_name=served_model_name,
        tool_format=tool_format,
        reference_base=reference_base,
        max_reference_kl=max_reference_kl,
        max_full_matrix_bytes=(
            None if max_full_matrix_mib is None else round(max_full_matrix_mib * MIB)
        ),
    )
    _run(settings, engine_config, host=host, port=port)


def _run(settings: Settings, engine_config: EngineConfig, *, host: str, port: int) -> None:
    from ..data_dir_lock import DataDirInUse
    from ..logs import configure_logging
    from ..server import CannotListen, address, bind, run_server

    configure_logging()
    try:
        listener = bind(host, port)
        url = f"http://{address(host, listener.getsockname()[1])}"
        note(f"Loading {engine_config.model} ...")
        with naming_the_database(settings):
            run_server(
                settings,
                engine_config,
                listener=listener,
                announce=lambda runtime: _announce(runtime, url),
                on_drain=lambda seconds: note(
                    f"Stopping: waiting up to {seconds:g} s for running requests."
                ),
            )
    except (AdapterError, CannotListen, DataDirInUse, OSError) as exc:
        raise CommandFailed(str(exc), ExitCode.UNAVAILABLE) from exc


def _announce(runtime: Runtime, url: str) -> None:
    for line in runtime.engine.info.memory_plan:
        note(f"  {line}")
    note(describe_speculation(runtime.engine.info))
    note(f"Serving {runtime.inference.served_model_name} at {url}/v1")
    for line in next_steps(runtime.settings, url):
        note(line)


def next_steps(settings: Settings, url: str) -> list[str]:
    """What to do once it serves, with the options that another terminal needs."""
    where = ""
    if settings.data_dir != default_data_dir():
        where += f" --data-dir {shlex.quote(str(settings.data_dir.absolute()))}"
    if settings.database is not None:
        where += " --database ..."  # not shown: it may hold a password
    server = "" if url == DEFAULT_URL else f" --url {url}"
    return [
        f"Make the first operator: loraplex operators create NAME{where}",
        f"Log in with its key: loraplex login{server}",
        "Make a tenant and a key: loraplex tenants create SLUG && "
        "loraplex keys create --tenant SLUG",
    ]


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)
