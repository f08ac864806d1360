"""The options of `loraplex serve` in groups, in the order in which the help shows them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Annotated

import typer

from ...engine.config import (
    MAX_DRAFT_TOKENS,
    Acceptance,
    EngineConfig,
    KvDtype,
    Quantization,
)
from ..tools.tool_format import ToolFormatName
from .admin import DatabaseUrl, DataDir
from .numbers import check_finite
from .speculation import parse_speculation

GIB = 1 << 30
MIB = 1 << 20
DEFAULTS = EngineConfig(model="")
DEFAULT_SPECULATION = ["ngram"]


class EngineOptions(ABC):
    """A group of options that configures the engine."""

    @abstractmethod
    def configure(self, config: EngineConfig) -> EngineConfig:
        """The configuration with the group's options applied."""


@dataclass(frozen=True, kw_only=True)
class BaseOptions(EngineOptions):
    """Which base, and how it is held."""

    model: Annotated[str, typer.Option(help="A model directory or Hugging Face model ID.")]
    quantize: Annotated[
        Quantization,
        typer.Option(help="Quantization of the linear layers; int4 uses groups of 128 inputs."),
    ] = Quantization.NONE
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = DEFAULTS.dtype
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = DEFAULTS.device

    def configure(self, config: EngineConfig) -> EngineConfig:
        return replace(
            config,
            quantization=self.quantize,
            dtype=self.dtype,
            device=self.device,
        )


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Where requests come in."""

    host: str = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000


@dataclass(frozen=True, kw_only=True)
class PlatformOptions:
    """What the base is called, and where tenants' things are kept."""

    served_model_name: Annotated[
        str | None,
        typer.Option(
            envvar="LORAPLEX_SERVED_MODEL_NAME",
            help="Name of the base model in API requests.",
            show_default="its folder",
        ),
    ] = None
    data_dir: DataDir = None
    database: DatabaseUrl = None
    store: Annotated[
        str | None,
        typer.Option(
            envvar="LORAPLEX_STORE", help="A folder or s3://bucket/prefix.", show_default="a folder"
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class BatchOptions(EngineOptions):
    """How much one step may do."""

    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of a sequence.")
    ] = None
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Maximum sequences in a batch.")] = (
        DEFAULTS.max_num_seqs
    )
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum tokens in a step.")
    ] = DEFAULTS.max_num_batched_tokens
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="Disable CUDA graphs.")] = (
        DEFAULTS.enforce_eager
    )

    def configure(self, config: EngineConfig) -> EngineConfig:
        return replace(
            config,
            enforce_eager=self.enforce_eager,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(EngineOptions):
    """What memory is used for."""

    memory_gib: Annotated[
        float | None,
        typer.Option(
            min=0.1, callback=check_finite, help="Memory limit of the engine, including weights."
        ),
    ] = None
    arena_gib: Annotated[
        float | None,
        typer.Option(min=0.001, callback=check_finite, help="Device memory for adapters."),
    ] = None
    kv_cache_gib: Annotated[
        float | None,
        typer.Option(min=0.001, callback=check_finite, help="Device memory for KV blocks."),
    ] = None
    host_cache_gib: Annotated[
        float, typer.Option(min=0.001, callback=check_finite, help="Host memory for adapters.")
    ] = DEFAULTS.host_cache_bytes / GIB
    kv_dtype: Annotated[KvDtype, typer.Option(help="Data type of the KV cache.")] = (
        DEFAULTS.kv_dtype
    )
    lora_window_gib: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            callback=check_finite,
            help="CPU memory for the compact decode windows of adapters (half dtypes).",
            show_default="1/16 of the arena",
        ),
    ] = None

    def configure(self, config: EngineConfig) -> EngineConfig:
        return replace(
            config,
            memory_bytes=_bytes(self.memory_gib),
            arena_bytes=_bytes(self.arena_gib),
            kv_cache_bytes=_bytes(self.kv_cache_gib),
            host_cache_bytes=int(self.host_cache_gib * GIB),
            kv_dtype=self.kv_dtype,
            lora_window_bytes=_bytes(self.lora_window_gib),
        )


@dataclass(frozen=True, kw_only=True)
class LoadingOptions(EngineOptions):
    """Options for loading adapters."""

    num_loader_threads: Annotated[
        int, typer.Option(min=1, help="Threads that load and zero adapters.")
    ] = DEFAULTS.num_loader_threads
    loader_duty: Annotated[
        float,
        typer.Option(
            min=0.01,
            help="Share of a core that adapter loading may use while requests run.",
        ),
    ] = DEFAULTS.loader_duty

    def configure(self, config: EngineConfig) -> EngineConfig:
        return replace(
            config,
            num_loader_threads=self.num_loader_threads,
            loader_duty=self.loader_duty,
        )


@dataclass(frozen=True, kw_only=True)
class SequenceOptions(EngineOptions):
    """Options for the KV cache of sequences and the length of steps."""

    swap_gib: Annotated[
        float,
        typer.Option(min=0.0, callback=check_finite, help="Host memory for swapped KV blocks."),
    ] = DEFAULTS.swap_bytes / GIB
    attention_window: Annotated[
        int | None,
        typer.Option(min=1, help="Attention window in tokens.", show_default="all"),
    ] = None
    attention_sinks: Annotated[
        int, typer.Option(min=0, help="First positions that stay visible outside the window.")
    ] = DEFAULTS.attention_sinks
    target_itl: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            callback=check_finite,
            metavar="MS",
            help="Target step time while prompts and decodes share a step.",
        ),
    ] = None

    def configure(self, config: EngineConfig) -> EngineConfig:
        return replace(
            config,
            swap_bytes=int(self.swap_gib * GIB),
            attention_window=self.attention_window,
            attention_sinks=self.attention_sinks,
            target_itl_ms=self.target_itl,
        )


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions(EngineOptions):
    """Options for speculative decoding."""

    speculation: Annotated[
        list[str],
        typer.Option(
            metavar="PROPOSER[:WHAT],...",
            help="Speculative decoding: ngram, draft:MODEL, early_exit:LAYERS (a number), "
            "medusa:CHECKPOINT or medusa_tree:CHECKPOINT (a folder); or off. Of several, "
            "the fastest is used.",
        ),
    ] = field(default_factory=DEFAULT_SPECULATION.copy)
    max_draft_tokens: Annotated[
        int,
        typer.Option(
            min=1, max=MAX_DRAFT_TOKENS, help="Maximum draft tokens per sequence and step."
        ),
    ] = DEFAULTS.max_draft_tokens
    acceptance: Annotated[
        Acceptance,
        typer.Option(
            help="How draft tokens are accepted. coupled: the output equals plain decoding. "
            "rejection: accepts more at high temperature; a seed no longer fixes the "
            "output."
        ),
    ] = DEFAULTS.acceptance

    def configure(self, config: EngineConfig) -> EngineConfig:
        return replace(
            config,
            speculation=parse_speculation(self.speculation),
            max_draft_tokens=self.max_draft_tokens,
            acceptance=self.acceptance,
        )


@dataclass(frozen=True, kw_only=True)
class QueueOptions(EngineOptions):
    """Options for queues and tenants' shares."""

    max_queued: Annotated[
        int, typer.Option(min=1, help="Maximum queued requests of all tenants.")
    ] = DEFAULTS.max_queued
    max_queued_per_tenant: Annotated[
        int, typer.Option(min=1, help="Maximum queued requests of one tenant.")
    ] = DEFAULTS.max_queued_per_tenant
    tenant_cap: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=1.0,
            help="Maximum share of the engine that one tenant holds while others wait.",
        ),
    ] = DEFAULTS.tenant_cap

    def configure(self, config: EngineConfig) -> EngineConfig:
        return replace(
            config,
            max_queued=self.max_queued,
            max_queued_per_tenant=self.max_queued_per_tenant,
            tenant_cap=self.tenant_cap,
        )


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Which adapters are taken, and how they are examined."""

    reference_base: Annotated[
        str | None,
        typer.Option(
            envvar="LORAPLEX_REFERENCE_BASE",
            metavar="DIR",
            help="The unquantized base; new versions are compared with it.",
            show_default="not measured",
        ),
    ] = None
    max_reference_kl: Annotated[
        float | None,
        typer.Option(
            envvar="LORAPLEX_MAX_REFERENCE_KL",
            callback=check_finite,
            help="Reject versions whose KL divergence from it is larger, in nats.",
            show_default="none is rejected",
        ),
    ] = None
    max_full_matrix_mib: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            callback=check_finite,
            help="Maximum size of an adapter's full matrices (modules_to_save).",
            show_default="refused",
        ),
    ] = None
    require_confinement: Annotated[
        bool | None,
        typer.Option(
            "--require-confinement",
            envvar="LORAPLEX_REQUIRE_CONFINEMENT",
            help="Start only if namespaces, Landlock and limits confine examinations.",
            show_default="a warning in the log",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ToolOptions:
    """How functions are called."""

    tool_format: Annotated[
        ToolFormatName | None,
        typer.Option(
            envvar="LORAPLEX_TOOL_FORMAT",
            help="Tool call format of the base model.",
            show_default="as its chat template does",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ThreadOptions(EngineOptions):
    """What the maths may have of the machine."""

    num_threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads for tensor work.", show_default="all cores"),
    ] = None

    def configure(self, config: EngineConfig) -> EngineConfig:
        return replace(
            config,
            num_threads=self.num_threads,
        )


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)
