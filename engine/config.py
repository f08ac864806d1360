"""The configuration of one engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from .errors import InvalidParameter
from .kv_policy import KvPolicy, parse_kv_policy
from .option import Option, Unset, options_of
from .shards.rank_address import parse_rank_address
from .shards.rank_place import GroupShape

GIB = 1 << 30


class Quantization(StrEnum):
    """How weights of the base are quantized while they are loaded (`kernels/quantize.py`).

    The groups of inputs that share a scale are each format's own; `quantization_group_size` asks
    for others.
    """

    NONE = "none"
    """They stay as the checkpoint has them."""
    INT8 = "int8"
    """Weights int8 with a scale per output channel. Activations int8 with a scale per token on a
    CPU that multiplies bytes faster (W8A8), as they are elsewhere (W8A16)."""
    INT4 = "int4"
    """Weights int4 with a scale per output channel and 128 inputs, activations of 16 or 32 bits."""
    FP8 = "fp8"
    """Weights e4m3 with a scale per output channel."""
    NF4 = "nf4"
    """Weights NF4, as QLoRA quantizes them, with a scale per output channel and 64 inputs."""
    MXFP4 = "mxfp4"
    """Weights e2m1 with a power of two per output channel and 32 inputs."""


class KvDtype(StrEnum):
    """How keys and values are stored in the cache."""

    AUTO = "auto"
    """In the model's own dtype."""
    INT8 = "int8"
    """A code per element, a scale per token and head."""
    FP8 = "fp8"
    """The same with e4m3 codes, where the device computes them."""
    INT4 = "int4"
    """4 bits per element, in groups of tokens for keys and of channels for values
    (`kernels/kv_groups.py`)."""
    INT2 = "int2"
    """The same with 2 bits."""

    @property
    def quantizes_blocks(self) -> bool:
        """Whether the tokens of a block are quantized together, once all are known."""
        return self in (KvDtype.INT4, KvDtype.INT2)


GROUP_SIZE_STEP = 16
"""The groups of inputs that all kernels multiply are multiples of this."""
MXFP4_GROUP_SIZE = 32
BLOCK_SIZE = 16
QUANTIZED_BLOCK_SIZE = 64
"""Where a block is a group of tokens: their steps take half a bit per element."""
MAX_DRAFT_TOKENS = 64
MAX_READ_ROWS = 256
"""The maximum number of prompt tokens per step whose log-probabilities are requested: each needs a
row of logits."""
MAX_RANKS = 64
"""Of a tensor-parallel group."""
TREE_SUFFIX = "_tree"
PROPOSERS = (
    *("ngram", "suffix", "draft", "draft_tree", "early_exit", "early_exit_tree"),
    *("skip", "skip_tree", "quantized", "quantized_tree", "medusa", "medusa_tree"),
    *("eagle", "eagle_tree", "mtp", "mtp_tree"),
)
"""The allowed names in `EngineConfig.speculation`."""
COPYING_PROPOSERS = ("ngram", "suffix")
"""Those whose draft tokens are copied from texts of the adapter, whatever its vocabulary."""
TREE_PROPOSERS: tuple[str, ...] = tuple(name for name in PROPOSERS if name.endswith(TREE_SUFFIX))
"""Those whose drafts may have branches."""
FEATURE_PROPOSERS = ("eagle", "eagle_tree", "mtp", "mtp_tree")
"""Those that read hidden states between the base's layers."""
SINGLE_SOURCES = ("draft", "quantized")
"""What only one proposer of an engine drafts with: its weights are loaded once."""


def source_of(proposer: str) -> str:
    """What it drafts with: the name of the proposer of chains that drafts with the same."""
    return proposer.removesuffix(TREE_SUFFIX)


class GenerationConfig(StrEnum):
    """Where sampling parameters come from that a request leaves out."""

    AUTO = "auto"
    """The base's `generation_config.json`."""
    NONE = "none"
    """They change nothing: temperature 1, all tokens."""


class Acceptance(StrEnum):
    """The acceptance rule of draft tokens. Neither changes the output's distribution."""

    COUPLED = "coupled"
    """Accepts draft tokens that equal the target's own sample: the output is that of plain
    decoding, token for token."""
    REJECTION = "rejection"
    """Accepts by the ratio of probabilities (Leviathan et al. 2023, Chen et al. 2023): more at high
    temperature, but the tokens differ from those of plain decoding."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine's configuration. The fields with an `Option` are options of `loraplex serve`; the
    text below a field is the option's help."""

    model: Annotated[str, Option(), Unset("required")]
    """A model directory or Hugging Face model ID."""
    quantization: Annotated[Quantization, Option(name="quantize", aliases=("quantization",))] = (
        Quantization.NONE
    )
    """Quantization of the linear layers and experts while they are loaded."""
    quantization_group_size: Annotated[
        int | None, Option(name="quantize_group_size", minimum=0), Unset("the format's")
    ] = None
    """Inputs that share a scale of --quantize, a multiple of 16; 0: a scale per output."""
    quantization_exclude: Annotated[
        tuple[str, ...], Option(name="quantize_exclude", metavar="GLOB"), Unset("none")
    ] = ()
    """Linear layers and experts that --quantize leaves as they are, such as '*.down_proj'.
    Repeatable."""
    embedding_quantization: Annotated[Quantization, Option(name="quantize_embeddings")] = (
        Quantization.NONE
    )
    """Quantization of the input embedding and the output head while they are loaded."""
    dtype: Annotated[str, Option()] = "auto"
    """auto, float32, bfloat16 or float16. auto is the checkpoint's dtype if the device computes it
    fast, else float32."""
    device: Annotated[str, Option()] = "auto"
    """auto, cpu or cuda."""
    tensor_parallel_size: Annotated[int, Option(minimum=1, maximum=MAX_RANKS)] = 1
    """Processes among which the base and its adapters are divided. On CUDA each has a device of
    its own."""
    enable_expert_parallel: Annotated[bool, Option()] = False
    """Give each process of --tensor-parallel-size whole experts. A base with experts is always
    divided so; with this option a base without experts is refused."""
    pipeline_parallel_size: Annotated[int, Option(minimum=1, maximum=MAX_RANKS)] = 1
    """Stages among which the layers and their adapters are divided, each of --tensor-parallel-size
    processes. On the CPU only."""
    num_local_ranks: Annotated[int | None, Option(minimum=1), Unset("all")] = None
    """Processes of --tensor-parallel-size times --pipeline-parallel-size that run on this host. The
    others join from other hosts, see `loraplex ranks`."""
    rank_address: Annotated[
        str | None, Option(metavar="HOST:PORT"), Unset("the loopback interface")
    ] = None
    """Where the processes of other hosts join, on a private network."""
    rank_secret: Annotated[str | None, Option(metavar="FILE"), Unset("a random secret")] = None
    """File with the secret that the processes of other hosts know, 32 characters or more."""
    max_model_len: Annotated[int | None, Option(minimum=1), Unset("the model's length")] = None
    """Maximum tokens of a sequence."""
    max_num_seqs: Annotated[int, Option(minimum=1)] = 64
    """Maximum sequences in a batch."""
    max_num_batched_tokens: Annotated[int, Option(minimum=1)] = 1024
    """Maximum tokens in a step."""
    kv_block_size: int = 0
    """Tokens of a KV block; 0: chosen by `kv_dtype`."""
    enforce_eager: Annotated[bool, Option()] = False
    """Disable CUDA graphs."""
    async_scheduling: Annotated[bool | None, Option(has_negation=True), Unset("on a GPU")] = None
    """Schedule each step while the one before it runs."""
    memory_bytes: Annotated[
        int | None,
        Option(name="memory_gib", unit=GIB, minimum=0.1),
        Unset("free memory, less a reserve"),
    ] = None
    """Memory limit of the engine, including weights."""
    trainer_device: str = "auto"
    """Where trainers of fine-tuning jobs run; auto: on the engine's device."""
    trainer_bytes: int = 0
    """Memory of that device that they take: an engine on it leaves it free."""
    trainer_cpus: tuple[int, ...] = ()
    """CPUs that the engine leaves to them."""
    arena_bytes: Annotated[
        int | None,
        Option(name="arena_gib", unit=GIB, minimum=0.001),
        Unset("1/4 of the memory after the weights; on the CPU at most 4 GiB at the start"),
    ] = None
    """Device memory for adapters. Setting it or --kv-cache-gib fixes the border between the two,
    which else moves with the load."""
    kv_cache_bytes: Annotated[
        int | None,
        Option(name="kv_cache_gib", unit=GIB, minimum=0.001),
        Unset("a full batch, of the remaining memory at most all; on the CPU half at the start"),
    ] = None
    """Device memory for KV blocks."""
    host_bytes: Annotated[
        int | None,
        Option(name="host_gib", unit=GIB, minimum=0.001),
        Unset("--host-cache-gib and --swap-gib"),
    ] = None
    """Host memory for adapters, and for the KV blocks of preempted sequences and of evicted
    prefixes. The border between the two moves with the load. Replaces --host-cache-gib and
    --swap-gib, which fix it."""
    host_cache_bytes: Annotated[
        int | None, Option(name="host_cache_gib", unit=GIB, minimum=0.001), Unset("1")
    ] = None
    """Host memory for adapters."""
    kv_dtype: Annotated[KvDtype, Option(aliases=("kv-cache-dtype",))] = KvDtype.AUTO
    """Data type of the KV cache."""
    kv_policy: Annotated[
        str | None, Option(metavar="METHOD:TOKENS"), Unset("all tokens are kept")
    ] = None
    """KV eviction by attention of requests without a `kv_policy` of their own: snapkv:TOKENS or
    h2o:TOKENS."""
    # One of them is kept for adapters below 64 MiB.
    num_loader_threads: Annotated[int, Option(minimum=1)] = 2
    """Threads that load and zero adapters."""
    # All loader threads share it; see `adapters.loaders.Pace`.
    loader_duty: Annotated[
        float | None, Option(minimum=0.01), Unset("0.1 on the CPU, measured on a GPU")
    ] = None
    """Share of a core that adapter loading may use while requests run; 1 or more is no limit."""
    prefix_caching: bool = True
    """Whether requests reuse prompt prefixes that were computed before."""
    swap_bytes: Annotated[
        int, Option(name="swap_gib", unit=GIB, minimum=0.0, aliases=("swap-space",)), Unset("none")
    ] = 0
    """Host memory for the KV blocks of preempted sequences and of evicted prefixes; without it they
    are recomputed."""
    prefix_disk_bytes: Annotated[
        int, Option(name="prefix_disk_gib", unit=GIB, minimum=0.0), Unset("none")
    ] = 0
    """Disk for encrypted prefixes, which outlive a restart. Requires --host-gib or --swap-gib."""
    prefix_disk_dir: Annotated[
        str | None, Option(metavar="FOLDER"), Unset("prefixes in the data folder")
    ] = None
    """Folder of --prefix-disk-gib on a local disk, for one server alone."""
    # StreamingLLM (Xiao et al. 2023): memory is bounded for an output of any length. Positions are
    # not renumbered within the window: `model.endless` says which bases may exceed `max_model_len`.
    attention_window: Annotated[int | None, Option(minimum=1), Unset("all")] = None
    """Attention window of the full-attention layers, in tokens."""
    attention_sinks: Annotated[int, Option(minimum=0)] = 4
    """First positions that stay visible outside the window."""
    target_itl_ms: Annotated[
        float | None, Option(name="target_itl", metavar="MS", minimum=0.1), Unset("no target")
    ] = None
    """Target ITL: the step time while prompts and decodes share a step."""
    target_ttft_ms: Annotated[
        float | None, Option(name="target_ttft", metavar="MS", minimum=1.0), Unset("no target")
    ] = None
    """Target TTFT: a request that cannot meet it behind its tenant's others is refused at once; one
    that waits too long lets the later ones of its queue pass for 30 s."""
    speculation: Annotated[tuple[str, ...], Option(metavar="PROPOSER[:WHAT],...")] = ()
    """Speculative decoding: ngram, suffix, draft:MODEL, early_exit:LAYERS (a number), skip:LAYERS
    (such as 3,5,8-10), quantized:FORMAT (as of `quantization`), medusa:CHECKPOINT, eagle:CHECKPOINT
    (a folder) or mtp (the base's own head); or off. All but the first two draft trees if `_tree` is
    added to the name. Of several, the fastest is used."""
    max_draft_tokens: Annotated[int, Option(minimum=1, maximum=MAX_DRAFT_TOKENS)] = 8
    """Maximum draft tokens per sequence and step."""
    adapter_draft_heads: Annotated[int, Option(minimum=0, maximum=1024)] = 0
    """Adapters that draft with EAGLE heads of their own at the same time; each takes as much memory
    as the base's head without quantization. 0: the base's head drafts for all."""
    generation_config: Annotated[GenerationConfig, Option()] = GenerationConfig.AUTO
    """Sampling parameters of requests that leave them out. auto: those of the base's
    generation_config.json. none: temperature 1 and all tokens."""
    acceptance: Annotated[Acceptance, Option()] = Acceptance.COUPLED
    """How draft tokens are accepted. coupled: the output equals plain decoding. rejection: accepts
    more at high temperature; a seed no longer fixes the output."""
    max_queued: Annotated[int, Option(minimum=1)] = 4096
    """Maximum queued requests of all tenants."""
    max_queued_per_tenant: Annotated[int, Option(minimum=1)] = 1024
    """Maximum queued requests of one tenant."""
    tenant_cap: Annotated[float, Option(minimum=0.01, maximum=1.0)] = 0.6
    """Maximum share of the engine that one tenant holds while others wait."""
    num_threads: Annotated[int | None, Option(minimum=1), Unset("all cores")] = None
    """Maximum CPU threads for tensor work."""

    @property
    def proposers(self) -> list[str]:
        """The names of the proposers."""
        return [entry.partition(":")[0] for entry in self.speculation]

    @property
    def drafts_trees(self) -> bool:
        """Whether a proposer may draft trees."""
        return not set(TREE_PROPOSERS).isdisjoint(self.proposers)

    @property
    def adapter_host_bytes(self) -> int:
        """Host memory for adapters alone, without `host_bytes`."""
        return GIB if self.host_cache_bytes is None else self.host_cache_bytes

    @property
    def all_host_bytes(self) -> int:
        """Host memory for adapters and KV blocks."""
        if self.host_bytes is not None:
            return self.host_bytes
        return self.adapter_host_bytes + self.swap_bytes

    @property
    def stores_kv_on_host(self) -> bool:
        """Whether host memory has room for KV blocks."""
        return bool(self.swap_bytes or self.host_bytes)

    @property
    def group_shape(self) -> GroupShape:
        """The ranks that serve the base together."""
        return GroupShape(self.tensor_parallel_size, self.pipeline_parallel_size)

    @property
    def num_ranks(self) -> int:
        return self.group_shape.size

    @property
    def has_remote_ranks(self) -> bool:
        """Whether ranks join from other hosts."""
        return self.num_local_ranks is not None and self.num_local_ranks < self.num_ranks

    @property
    def ranks_obstacle(self) -> str:
        """Why something is refused that is not divided among ranks."""
        kind = "pipeline" if self.pipeline_parallel_size > 1 else "tensor"
        return f"is not supported with --{kind}-parallel-size above 1"

    @property
    def default_kv_policy(self) -> KvPolicy | None:
        return None if self.kv_policy is None else parse_kv_policy(self.kv_policy)

    @property
    def max_kept_rows(self) -> int:
        """The maximum number of tokens in a step whose logits are computed: the last token of each
        sequence, draft tokens, and tokens of prompts that are read."""
        num_draft_tokens = self.max_draft_tokens if self.speculation else 0
        num_rows = self.max_num_seqs * (1 + num_draft_tokens) + MAX_READ_ROWS
        return min(num_rows, self.max_num_batched_tokens)

    def __post_init__(self) -> None:
        for name, option in options_of(EngineConfig).items():
            option.check(name, getattr(self, name))
        self._check_quantization()
        if self.num_ranks > 1:
            self._check_ranks()
        self._check_hosts()
        self._check_host_memory()
        self._check_prefix_disk()
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise InvalidParameter(
                "enable_expert_parallel", "requires --tensor-parallel-size above 1"
            )
        if self.kv_policy is not None:
            parse_kv_policy(self.kv_policy)
        quantizes_blocks = KvDtype(self.kv_dtype).quantizes_blocks
        if not self.kv_block_size:
            size = QUANTIZED_BLOCK_SIZE if quantizes_blocks else BLOCK_SIZE
            object.__setattr__(self, "kv_block_size", size)
        for name in self.proposers:
            if name not in TREE_PROPOSERS:
                continue
            if quantizes_blocks:
                raise InvalidParameter(
                    "speculation", f"{name} is not supported with --kv-dtype {self.kv_dtype}"
                )
            if self.acceptance != Acceptance.COUPLED:
                raise InvalidParameter("speculation", f"{name} requires coupled acceptance")
        for source in SINGLE_SOURCES:
            users = [name for name in dict.fromkeys(self.proposers) if source_of(name) == source]
            if len(users) > 1:
                raise InvalidParameter("speculation", f"{' and '.join(users)} cannot be combined")
        if self.adapter_draft_heads and not {"eagle", "eagle_tree"} & set(self.proposers):
            raise InvalidParameter(
                "adapter_draft_heads", "requires --speculation eagle or eagle_tree"
            )
        readers = [name for name in self.proposers if name in FEATURE_PROPOSERS]
        if len(readers) > 1:
            raise InvalidParameter(
                "speculation",
                f"{' and '.join(readers)} cannot be combined: a step collects features for one",
            )
        if self.max_num_batched_tokens <= self.max_num_seqs:
            raise InvalidParameter(
                "max_num_batched_tokens", "must exceed max_num_seqs, or prompts would never advance"
            )

    def _check_quantization(self) -> None:
        size = self.quantization_group_size
        if self.quantization == Quantization.NONE:
            for name in ("quantization_group_size", "quantization_exclude"):
                if getattr(self, name) not in (None, ()):
                    raise InvalidParameter(name, "requires --quantize")
        elif self.quantization == Quantization.MXFP4 and size not in (None, MXFP4_GROUP_SIZE):
            raise InvalidParameter(
                "quantization_group_size", f"mxfp4 has groups of {MXFP4_GROUP_SIZE} inputs"
            )
        elif size is not None and size % GROUP_SIZE_STEP:
            raise InvalidParameter(
                "quantization_group_size",
                f"must be a multiple of {GROUP_SIZE_STEP}, or 0 for a scale per output",
            )

    def _check_host_memory(self) -> None:
        """Refuse two answers to one question. Raises InvalidParameter."""
        if self.host_bytes is None:
            return
        if self.host_cache_bytes is not None:
            raise InvalidParameter("host_cache_bytes", "is a part of --host-gib; set one of them")
        if self.swap_bytes:
            raise InvalidParameter("swap_bytes", "is a part of --host-gib; set one of them")
        if self.num_ranks > 1:
            raise InvalidParameter(
                "host_bytes",
                "is not supported in a group of ranks; set --host-cache-gib and --swap-gib",
            )

    def _check_prefix_disk(self) -> None:
        """Refuse a disk that could not be used. Raises InvalidParameter."""
        if not self.prefix_disk_bytes:
            if self.prefix_disk_dir is not None:
                raise InvalidParameter("prefix_disk_dir", "requires --prefix-disk-gib")
            return
        if not self.stores_kv_on_host:
            raise InvalidParameter(
                "prefix_disk_bytes",
                "requires --host-gib or --swap-gib: prefixes come from the disk to host memory",
            )
        if not self.prefix_caching:
            raise InvalidParameter("prefix_disk_bytes", "requires prefix caching")

    def _check_hosts(self) -> None:
        """Check how ranks of other hosts join. Raises InvalidParameter."""
        if (self.num_local_ranks or 1) > self.num_ranks:
            raise InvalidParameter(
                "num_local_ranks", f"must be at most the number of ranks, {self.num_ranks}"
            )
        for name in ("rank_address", "rank_secret"):
            is_given = getattr(self, name) is not None
            if is_given and not self.has_remote_ranks:
                raise InvalidParameter(name, "requires --num-local-ranks below the number of ranks")
            if self.has_remote_ranks and not is_given:
                raise InvalidParameter(name, "is required if ranks join from other hosts")
        if self.rank_address is not None:
            parse_rank_address(self.rank_address, "rank_address")

    def _check_ranks(self) -> None:
        """Refuse what is not divided among ranks yet. Raises InvalidParameter."""
        refused = {
            # As many steps are in flight as there are stages.
            "async_scheduling": bool(self.async_scheduling) and self.pipeline_parallel_size > 1,
            "kv_dtype": (
                self.pipeline_parallel_size > 1 and KvDtype(self.kv_dtype).quantizes_blocks
            ),
        }
        for name, is_refused in refused.items():
            if is_refused:
                raise InvalidParameter(name, self.ranks_obstacle)
        # Stages work on different steps, and a draft needs all of them for each token.
        has_stages = self.pipeline_parallel_size > 1
        is_refused_source = {
            "early_exit": has_stages,
            "skip": has_stages,
            "eagle": True,
            "mtp": True,
            "quantized": has_stages,
        }
        for name in self.proposers:
            if is_refused_source.get(source_of(name)):
                raise InvalidParameter("speculation", f"{name} {self.ranks_obstacle}")
