"""Compiles the Triton kernels without a GPU and reports registers, spills and shared memory.

`python -m loraplex.kernels.report` compiles every kernel ahead of time, for each architecture and
each set of compile-time values that serving uses, and prints JSON: `[{"kernel", "arch",
"registers", "spills", "shared"}]`. Spills are bytes of stack and local memory per thread, shared is
bytes per block. Exits with 1 if a kernel exceeds a limit. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import chain, product, repeat, zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import (
    attention_groups_triton,
    attention_triton,
    expert_pairs_triton,
    gated_activation_triton,
    grouped_linear_triton,
    kv_write_triton,
    lora_triton,
    lora_vectors_triton,
    recurrence_triton,
    rms_norm_triton,
    rotary_triton,
    selective_scan_triton,
    wna16_experts_triton,
    wna16_triton,
)
from .attention import AttentionOptions
from .attention_window import AttentionWindow
from .gated_activation import Activation
from .kv_groups import GroupedPages, OpenBlocks, stack_grouped_pages
from .kv_pages import KeyPrefix, KvPages, make_pages
from .quantized_weight import CodeType, QuantizedWeight
from .recurrence import Recurrence
from .rms_norm import NormForm
from .selective_scan import SelectiveScan
from .wna16_weight import WNA16Weight, pack_codes

ARCHITECTURES = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
MIN_FP8_ARCHITECTURE = 89
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
QUERY_DTYPES = {**DTYPES, "fp16": torch.float16}
CODE_DTYPES = {"i8": torch.int8, "fp8e4nv": torch.float8_e4m3fn}
RANKS = (16, 64)
"""The maximum ranks of a step's adapters: one for each tile that `lora_triton` chooses."""
IN_FEATURES = 4096
SLICE_OUTS = (4096, 1024, 1024)
WNA16_ROWS = (1, 32, 512)
"""One for each tile that `wna16_triton` chooses."""
WARP_THREADS = 32
NUM_EXPERTS = 8
KV_BLOCK, KV_HEADS, HEADS, HEAD_DIM = 16, 8, 32, 128
GROUPED_BLOCK = 64
LATENT_HEADS, LATENT_DIM, ROTARY_DIM = 128, 512, 64
"""DeepSeek-V3's."""
CONTEXT = 8192
MAX_REGISTERS = 255
MAX_PROCESSES = 8
"""Compiling one kernel keeps one core busy."""
MAX_ATTEND_SPILLS = 16
"""Four registers; of all other kernels nothing spills."""
MAX_SHARED_BYTES = 64 << 10
"""Three blocks fit on a multiprocessor."""
MAX_ATTEND_BYTES = 76 << 10
MAX_LATENT_BYTES = 88 << 10
"""Two blocks fit on an H100's multiprocessor."""
MAX_PROMPT_BYTES = 144 << 10
"""The shared memory for a prompt chunk, of which one block fits."""
MAX_WNA16_BYTES = {"sm_80": 96 << 10, "sm_90": 112 << 10, "sm_100": 113 << 10}
"""The shared memory for quantized products: a block fits even the small multiprocessors that run
sm_80's code, and two fit those of an H100 and a B200."""


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel with its compile-time values and the types of its other arguments."""

    name: str
    kernel: Any
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    pointers: Mapping[str, str]
    """Pointer arguments to their types; of the others those without a value are `i32`."""


@dataclass(frozen=True, slots=True)
class KernelUsage:
    """The resources of one compiled kernel, per thread (`registers`, `spills`) or block
    (`shared`)."""

    kernel: str
    arch: str
    registers: int
    spills: int
    shared: int


def excess(usage: KernelUsage) -> str | None:
    """The exceeded limit of a kernel; None if it is within its limits."""
    limits = {
        "registers": MAX_REGISTERS,
        "spills": MAX_ATTEND_SPILLS if usage.kernel.startswith("attend[") else 0,
        "shared": _max_shared_bytes(usage),
    }
    for name, limit in limits.items():
        if (value := getattr(usage, name)) > limit:
            return f"{usage.kernel} on {usage.arch}: {name} {value} of {limit}"
    return None


def _max_shared_bytes(usage: KernelUsage) -> int:
    if usage.kernel.startswith("attend_latent["):
        return MAX_LATENT_BYTES
    is_quantized = usage.kernel.startswith("coded[")
    if not (is_quantized or usage.kernel.startswith("attend[")):
        return MAX_SHARED_BYTES
    most = MAX_PROMPT_BYTES if "rows512" in usage.kernel else MAX_ATTEND_BYTES
    return min(most, MAX_WNA16_BYTES[usage.arch]) if is_quantized else most


def all_cases(arch: str) -> Iterator[KernelCase]:
    """Every kernel that serving launches on this architecture."""
    return chain(
        lora_cases(),
        attention_cases(arch),
        grouped_kv_cases(arch),
        wna16_cases(),
        fused_layer_cases(),
        expert_cases(),
        state_cases(),
    )


def lora_cases() -> Iterator[KernelCase]:
    """Shrink and expand for every serving dtype and class of ranks; the vectors of adapters."""
    tables = {"table_ptr": "*i64", "tiles_ptr": "*i32", "token_rows_ptr": "*i32", "h_ptr": "*fp32"}
    for dtype_name, dtype in DTYPES.items():
        data = f"*{dtype_name}"
        for max_rank, num_experts in product(RANKS, (1, NUM_EXPERTS)):
            variant = f"[{dtype_name},rank{max_rank},experts{num_experts}]"
            splits = lora_triton.num_splits(IN_FEATURES)
            slice_outs = SLICE_OUTS if num_experts == 1 else SLICE_OUTS[:1]
            yield KernelCase(
                f"lora_shrink{variant}",
                lora_triton.shrink_kernel,
                lora_triton.shrink_constants(dtype, IN_FEATURES, max_rank, num_experts),
                lora_triton.SHRINK_OPTIONS,
                {**tables, "x_ptr": data, "flat_ptr": data},
            )
            yield KernelCase(
                f"lora_expand{variant}",
                lora_triton.expand_kernel,
                lora_triton.expand_constants(dtype, slice_outs, splits, max_rank, num_experts),
                lora_triton.EXPAND_OPTIONS,
                {**tables, "y_ptr": data, "flat_ptr": data, "blocks_ptr": "*i32"},
            )
        constants = lora_vectors_triton.vectors_constants(SLICE_OUTS)
        pointers = {
            **dict.fromkeys(("y_ptr", "flat_ptr", "base_bias_ptr"), data),
            **{"vectors_ptr": "*i64", "token_rows_ptr": "*i32", "blocks_ptr": "*i32"},
        }
        for base, absent in (("bias", {}), ("no bias", {"base_bias_ptr": None})):
            yield KernelCase(
                f"lora_vectors[{dtype_name},{base}]",
                lora_vectors_triton.vectors_kernel,
                {**constants, **absent},
                lora_vectors_triton.VECTORS_OPTIONS,
                pointers,
            )


def wna16_cases() -> Iterator[KernelCase]:
    """Products with quantized weights, the combination of their splits, and dequantization."""
    for form in WNA16_FORMS:
        for dtype_name, rows in product(form.dtypes, form.rows):
            yield form.product_case(dtype_name, rows)
        for dtype_name in form.dtypes:
            yield form.dequantize_case(dtype_name)
    yield KernelCase(
        "sum_splits",
        wna16_triton.sum_kernel,
        wna16_triton.sum_constants(wna16_triton.MAX_SPLITS),
        wna16_triton.SUM_OPTIONS,
        {"y_ptr": "*bf16", "sums_ptr": "*fp32", "bias_ptr": "*bf16"},
    )


@dataclass(frozen=True, slots=True)
class WNA16Form:
    """One form of a quantized weight."""

    code_type: CodeType
    group: int
    scale: str
    """The type of a scale."""
    zero: Literal["i8", "fp32"] | None = None
    dtypes: tuple[str, ...] = ("bf16",)
    """Of activations. A kernel for fp32 takes longest to compile and has the fewest registers."""
    rows: tuple[int, ...] = WNA16_ROWS[-1:]
    """The largest tile, or more."""

    def product_case(self, dtype_name: str, rows: int) -> KernelCase:
        launch = wna16_triton.choose_launch(rows, SLICE_OUTS[0], IN_FEATURES, DTYPES[dtype_name])
        pointers = self._pointers() | {"sums_ptr": "*fp32" if self.zero else None}
        data = dict.fromkeys(("y_ptr", "x_ptr", "bias_ptr"), f"*{dtype_name}")
        return KernelCase(
            f"coded[{dtype_name},{self._name},rows{rows}]",
            wna16_triton.wna16_kernel,
            wna16_triton.wna16_constants(self._weight(), launch) | _absent(pointers),
            launch.options,
            data | _present(pointers),
        )

    def experts_case(self, dtype_name: str) -> KernelCase:
        pointers = self._pointers() | {"sums_ptr": "*fp32" if self.zero else None}
        launch = wna16_experts_triton.choose_expert_launch(DTYPES[dtype_name])
        data = dict.fromkeys(("y_ptr", "x_ptr"), f"*{dtype_name}")
        return KernelCase(
            f"coded_experts[{dtype_name},{self._name}]",
            wna16_experts_triton.wna16_experts_kernel,
            wna16_triton.wna16_constants(self._weight(), launch) | _absent(pointers),
            launch.options,
            {**data, **_present(pointers), "tiles_ptr": "*i32"},
        )

    def dequantize_case(self, dtype_name: str) -> KernelCase:
        pointers = self._pointers()
        return KernelCase(
            f"dequantize[{dtype_name},{self._name}]",
            wna16_triton.dequantize_kernel,
            wna16_triton.dequantize_constants(self._weight()) | _absent(pointers),
            wna16_triton.DEQUANTIZE_OPTIONS,
            _present(pointers) | {"dense_ptr": f"*{dtype_name}"},
        )

    @property
    def _name(self) -> str:
        return f"{self.code_type},group{self.group},zero {self.zero}".lower()

    def _weight(self) -> WNA16Weight:
        """A weight of one row: compile-time values do not depend on out_features."""
        scale = torch.ones(1, IN_FEATURES // self.group, dtype=torch.float32)
        table = torch.zeros(16, dtype=torch.float32) if self.code_type is CodeType.TABLE4 else None
        codes = torch.zeros(1, IN_FEATURES, dtype=torch.int8)
        zero = scale if self.zero else None
        return pack_codes(QuantizedWeight(self.code_type, codes, scale, self.group, zero, table))

    def _pointers(self) -> dict[str, str | None]:
        return {
            "words_ptr": "*i16",
            "scale_ptr": f"*{self.scale}",
            "zero_ptr": f"*{self.zero}" if self.zero else None,
            "table_ptr": "*fp32" if self.code_type is CodeType.TABLE4 else None,
        }


WNA16_FORMS = (
    WNA16Form(CodeType.INT8, IN_FEATURES, "fp32", None, tuple(DTYPES), WNA16_ROWS),
    WNA16Form(CodeType.INT4, 128, "bf16", None, tuple(DTYPES), WNA16_ROWS),
    WNA16Form(CodeType.INT8, 32, "fp16"),
    WNA16Form(CodeType.FP8, IN_FEATURES, "fp32"),
    WNA16Form(CodeType.FP8, 128, "fp32", None, tuple(DTYPES)),
    WNA16Form(CodeType.INT4, 32, "bf16"),
    WNA16Form(CodeType.INT4, 64, "bf16"),
    WNA16Form(CodeType.INT4, 32, "fp32", "fp32", tuple(DTYPES)),
    WNA16Form(CodeType.INT4, 64, "fp16", "i8"),
    WNA16Form(CodeType.INT4, 128, "fp16", "i8"),
    WNA16Form(CodeType.TABLE4, 64, "fp32", None, tuple(DTYPES)),
    WNA16Form(CodeType.TABLE4, 32, "bf16"),
)
"""Of each code type those that checkpoints have; first the two that we quantize to."""


def _present(pointers: Mapping[str, str | None]) -> dict[str, str]:
    return {name: kind for name, kind in pointers.items() if kind is not None}


def _absent(pointers: Mapping[str, str | None]) -> dict[str, None]:
    return dict.fromkeys(name for name, kind in pointers.items() if kind is None)


def fused_layer_cases() -> Iterator[KernelCase]:
    """Norms of hidden states and of heads, rotary embedding, and gated activations."""
    for dtype_name in DTYPES:
        data = f"*{dtype_name}"
        for hidden, form in product((IN_FEATURES, HEAD_DIM), NormForm):
            yield KernelCase(
                f"rms_norm[{dtype_name},hidden{hidden},{form.name.lower()}]",
                rms_norm_triton.norm_kernel,
                rms_norm_triton.norm_constants(hidden, form),
                rms_norm_triton.norm_options(hidden),
                {**dict.fromkeys(("out_ptr", "x_ptr", "weight_ptr"), data), "eps": "fp32"},
            )
        tensors = ("q_out_ptr", "k_out_ptr", "q_ptr", "k_ptr", "cos_ptr", "sin_ptr")
        yield KernelCase(
            f"rotary[{dtype_name}]",
            rotary_triton.rotary_kernel,
            rotary_triton.rotary_constants(HEADS, KV_HEADS, HEAD_DIM),
            rotary_triton.ROTARY_OPTIONS,
            dict.fromkeys(tensors, data),
        )
        for activation in Activation:
            yield KernelCase(
                f"gated[{dtype_name},{activation.name.lower()}]",
                gated_activation_triton.gated_kernel,
                gated_activation_triton.gated_constants(IN_FEATURES, activation),
                gated_activation_triton.GATED_OPTIONS,
                dict.fromkeys(("out_ptr", "gate_ptr", "up_ptr"), data),
            )


def expert_cases() -> Iterator[KernelCase]:
    """Sorting an MoE layer's pairs, and their base matmul: in both orders of storage, and with the
    quantized forms."""
    tiles = {"base_tiles_ptr": "*i32", "lora_tiles_ptr": "*i32"}
    pointers = {
        **dict.fromkeys(("order_ptr", "tokens_ptr", "experts_ptr", "top_k_index_ptr"), "*i64"),
        **dict.fromkeys(("expert_rows_ptr", "token_rows_ptr"), "*i32"),
        **tiles,
    }
    adapted = ("expert_rows_ptr", "token_rows_ptr", "lora_tiles_ptr")
    for name, absent in (("adapters", ()), ("base", adapted)):
        yield KernelCase(
            f"sort_pairs[{name}]",
            expert_pairs_triton.sort_kernel,
            {**expert_pairs_triton.SORT_CONSTANTS, **dict.fromkeys(absent)},
            expert_pairs_triton.SORT_OPTIONS,
            {name: kind for name, kind in pointers.items() if name not in absent},
        )
    for (dtype_name, dtype), is_transposed in product(QUERY_DTYPES.items(), (False, True)):
        data = dict.fromkeys(("y_ptr", "x_ptr", "weight_ptr", "bias_ptr"), f"*{dtype_name}")
        order = "in × out" if is_transposed else "out × in"
        yield KernelCase(
            f"grouped[{dtype_name},{order}]",
            grouped_linear_triton.grouped_kernel,
            grouped_linear_triton.grouped_constants(dtype, is_transposed=is_transposed),
            grouped_linear_triton.GROUPED_OPTIONS,
            {**data, "tiles_ptr": "*i32"},
        )
    for form in WNA16_FORMS:
        yield from map(form.experts_case, form.dtypes)


@dataclass(frozen=True, slots=True)
class RecurrenceVariant:
    """A recurrence of layers that people serve."""

    name: str
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    is_delta_rule: bool = True
    decays_keys: bool = False

    def case(self, dtype_name: str) -> KernelCase:
        keys = torch.empty(1, self.num_key_heads, self.key_dim, dtype=torch.float32)
        decays = torch.empty(1, self.num_heads, self.key_dim, dtype=torch.float32)
        task = Recurrence(
            q=keys,
            k=keys,
            v=torch.empty(1, self.num_heads, self.value_dim, dtype=torch.float32),
            log_decay=decays if self.decays_keys else decays[:, :, 0],
            beta=decays[:, :, 0],
            is_delta_rule=self.is_delta_rule,
            is_normalized=self.is_delta_rule,
        )
        data, states = f"*{dtype_name}", "*fp32"
        pointers: dict[str, str | None] = {
            **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), data),
            **dict.fromkeys(("after_ptr", "states_ptr", "decay_ptr", "beta_ptr"), states),
            **dict.fromkeys(("bounds_ptr", "sources_ptr"), "*i64"),
            "out_ptr": data if self.is_delta_rule else states,
            "skip_ptr": None if self.is_delta_rule else states,
        }
        return KernelCase(
            f"recurrence[{dtype_name},{self.name}]",
            recurrence_triton.recurrence_kernel,
            recurrence_triton.recurrence_constants(task) | _absent(pointers),
            recurrence_triton.RECURRENCE_OPTIONS,
            {**_present(pointers), "scale": "fp32"},
        )


RECURRENCES = (
    RecurrenceVariant("delta rule", 32, 16, 128, 128),
    RecurrenceVariant("decay per key", 32, 32, 128, 128, decays_keys=True),
    RecurrenceVariant("mamba2", 128, 8, 128, 64, is_delta_rule=False),
    RecurrenceVariant("mamba2,size256", 24, 1, 256, 128, is_delta_rule=False),
)
"""Qwen3-Next's, Kimi Linear's, Nemotron-H's and Falcon-H1's."""
SCANNED_CHANNELS = 8192
SCAN_SIZES = (8, 16)


def state_cases() -> Iterator[KernelCase]:
    """Recurrences of layers with states, and the selective scan."""
    for dtype_name in DTYPES:
        yield from (variant.case(dtype_name) for variant in RECURRENCES)
        for size in SCAN_SIZES:
            values = torch.empty(1, SCANNED_CHANNELS, dtype=torch.float32)
            rows = torch.empty(1, size, dtype=torch.float32)
            rates = torch.empty(SCANNED_CHANNELS, size, dtype=torch.float32)
            task = SelectiveScan(x=values, b=rows, c=rows, steps=values, rates=rates)
            states = ("after_ptr", "states_ptr", "steps_ptr", "rates_ptr", "skip_ptr", "out_ptr")
            yield KernelCase(
                f"selective_scan[{dtype_name},size{size}]",
                selective_scan_triton.scan_kernel,
                selective_scan_triton.scan_constants(task),
                selective_scan_triton.SCAN_OPTIONS,
                {
                    **dict.fromkeys(("x_ptr", "gate_ptr", "b_ptr", "c_ptr"), f"*{dtype_name}"),
                    **dict.fromkeys(states, "*fp32"),
                    **dict.fromkeys(("bounds_ptr", "sources_ptr"), "*i64"),
                },
            )


def attention_cases(arch: str) -> Iterator[KernelCase]:
    """Attention for each number of rows, page format and kind of layer, with the related
    kernels."""
    variants = [
        AttendVariant("bf16", 1),
        AttendVariant("bf16", 512),
        AttendVariant("i8", 1),
        AttendVariant("i8", 1, queries="fp16"),
        LatentVariant("bf16", 1),
        LatentVariant("bf16", 512),
        LatentVariant("i8", 1),
    ]
    if ARCHITECTURES[arch] >= MIN_FP8_ARCHITECTURE:
        variants += [
            AttendVariant("bf16", 1, extras="window"),
            AttendVariant("bf16", 512, extras="window"),
            AttendVariant("bf16", 1, extras="chunk"),
            AttendVariant("bf16", 512, extras="chunk"),
            AttendVariant("bf16", 1, extras="tree"),
            AttendVariant("bf16", 5, extras="tree"),
            AttendVariant("bf16", 512, dim=256),
            AttendVariant("fp32", 1),
            AttendVariant("fp32", 1, dim=256),
            AttendVariant("i8", 512),
            AttendVariant("i8", 512, queries="fp16"),
            AttendVariant("fp8e4nv", 1),
            LatentVariant("bf16", 5, extras="tree"),
            LatentVariant("fp32", 1),
            LatentVariant("fp8e4nv", 512),
        ]
    yield from (variant.case() for variant in variants)
    yield KernelCase(
        "attend_combine",
        attention_triton.combine_kernel,
        attention_triton.combine_constants(attention_triton.MAX_SPLITS, 128),
        attention_triton.COMBINE_OPTIONS,
        {"out_ptr": "*bf16", "partial_ptr": "*fp32", "weights_ptr": "*fp32", "rows_ptr": "*i64"},
    )
    pages = AttendVariant("i8", 1).pages()
    yield KernelCase(
        "kv_write[i8]",
        kv_write_triton.write_kernel,
        kv_write_triton.write_constants(pages, pages) | {"open_slots_ptr": None},
        kv_write_triton.WRITE_OPTIONS,
        {
            **dict.fromkeys(("keys_ptr", "values_ptr"), "*i8"),
            **dict.fromkeys(("key_scales_ptr", "value_scales_ptr", "k_ptr", "v_ptr"), "*bf16"),
            "slots_ptr": "*i64",
        },
    )


_LAYER_OPTIONS = {
    "window": AttentionOptions(0.1, AttentionWindow(1024), 4, 50.0),
    "chunk": AttentionOptions(0.1, AttentionWindow(1024, is_chunked=True)),
}
"""By the `extras` of a variant; the pointers of the others are the variants' own."""


@dataclass(frozen=True, slots=True)
class AttendVariant:
    """One compiled variant of attention."""

    form: str
    """The page format."""
    rows: int
    """New tokens per sequence: decoding, verification, or a prompt chunk."""
    dim: int = 128
    extras: Literal["window", "chunk", "tree"] | None = None
    """The options of a layer or a step; a sliding window includes all other options of a layer."""
    queries: str = "bf16"
    """For quantized pages; otherwise queries have the format of the pages."""

    name = "attend"
    heads, kv_heads, is_latent = HEADS, KV_HEADS, False

    def pages(self) -> KvPages:
        size = (1, KV_BLOCK, self.kv_heads, self.dim)
        return make_pages(
            size,
            dtype=self.dtype,
            code_dtype=CODE_DTYPES.get(self.form),
            device=torch.device("cpu"),
        )

    @property
    def dtype(self) -> torch.dtype:
        return QUERY_DTYPES[self._query_form]

    @property
    def _query_form(self) -> str:
        return self.queries if self.form in CODE_DTYPES else self.form

    def values(self, keys: KvPages) -> KvPages:
        return keys

    def case(self) -> KernelCase:
        options = _LAYER_OPTIONS.get(str(self.extras), AttentionOptions(0.1))
        shape = attention_triton.attention_shape(
            self.rows * self.heads // self.kv_heads,
            CONTEXT,
            has_sinks=options.num_sink_positions > 0,
            is_tree=self.extras == "tree",
            dim=self.dim,
            dtype=self.dtype,
            is_latent=self.is_latent,
        )
        pages, pointers = self.pages(), self._pointers(is_split=shape.num_splits > 1)
        constants = attention_triton.attend_constants(
            shape, pages, self.values(pages), options, num_heads=self.heads
        )
        return KernelCase(
            f"{self.name}[{self.form},{self._query_form},rows{self.rows},dim{self.dim},{self.extras}]",
            attention_triton.attend_kernel,
            {**constants, **_absent(pointers)},
            attention_triton.attend_options(shape, self.dtype),
            _present(pointers),
        )

    def _pointers(self, *, is_split: bool) -> dict[str, str | None]:
        """Types of the pointer arguments; None: left out."""
        data = f"*{self._query_form}"
        has_scales = self.form in CODE_DTYPES
        return {
            "out_ptr": "*fp32" if is_split else data,
            "weights_ptr": "*fp32" if is_split else None,
            "q_ptr": data,
            "keys_ptr": f"*{self.form}",
            "values_ptr": None if self.is_latent else f"*{self.form}",
            **dict.fromkeys(
                ("key_scales_ptr", "value_scales_ptr"), "*bf16" if has_scales else None
            ),
            **dict.fromkeys(("rows_ptr", "positions_ptr", "tables_ptr"), "*i64"),
            "sinks_ptr": data if self.extras == "window" else None,
            "slopes_ptr": "*fp32" if self.extras == "window" else None,
            "block_positions_ptr": "*i64" if self.extras in _LAYER_OPTIONS else None,
            "hidden_ptr": "*i64" if self.extras == "tree" else None,
        }


@dataclass(frozen=True, slots=True)
class LatentVariant(AttendVariant):
    """The same for latents, of which the values are a part."""

    dim: int = LATENT_DIM + ROTARY_DIM
    name = "attend_latent"
    heads, kv_heads, is_latent = LATENT_HEADS, 1, True

    def values(self, keys: KvPages) -> KvPages:
        return KeyPrefix(keys, LATENT_DIM)


def grouped_kv_cases(arch: str) -> Iterator[KernelCase]:
    """Attention over keys and values in 4 and 2 bits, writing them, and computing their codes."""
    variants = [
        GroupedVariant(4, 1),
        GroupedVariant(4, 512),
        GroupedVariant(4, 512, dim=256),
        GroupedVariant(2, 1),
    ]
    if ARCHITECTURES[arch] >= MIN_FP8_ARCHITECTURE:
        variants += [
            GroupedVariant(2, 512),
            GroupedVariant(4, 1, extras="window"),
            GroupedVariant(4, 512, extras="window"),
            GroupedVariant(4, 512, extras="chunk"),
            GroupedVariant(4, 5),
            GroupedVariant(4, 1, dim=64),
            GroupedVariant(4, 1, dim=256),
            GroupedVariant(4, 1, queries="fp16"),
            GroupedVariant(4, 1, queries="fp32"),
            GroupedVariant(2, 512, queries="fp32"),
            GroupedVariant(4, 1, dim=256, queries="fp32"),
        ]
    yield from (variant.case() for variant in variants)
    plain = AttendVariant("bf16", 1).pages()
    yield KernelCase(
        "kv_write[open bf16]",
        kv_write_triton.write_kernel,
        kv_write_triton.write_constants(plain, plain)
        | dict.fromkeys(("key_scales_ptr", "value_scales_ptr")),
        kv_write_triton.WRITE_OPTIONS,
        {
            **dict.fromkeys(("keys_ptr", "values_ptr", "k_ptr", "v_ptr"), "*bf16"),
            **dict.fromkeys(("slots_ptr", "open_slots_ptr"), "*i64"),
        },
    )
    for bits, dim in product((4, 2), (HEAD_DIM, 256)):
        yield GroupedVariant(bits, 1, dim=dim).close_case()


@dataclass(frozen=True, slots=True)
class GroupedVariant:
    """One compiled variant of attention over pages of `kv_groups`."""

    bits: int
    rows: int
    dim: int = HEAD_DIM
    extras: Literal["window", "chunk"] | None = None
    """As in an AttendVariant."""
    queries: str = "bf16"

    def case(self) -> KernelCase:
        options = _LAYER_OPTIONS.get(str(self.extras), AttentionOptions(0.1))
        keys, values = self._pages()
        shape = attention_groups_triton.grouped_shape(
            self.rows, CONTEXT // GROUPED_BLOCK, keys, values, num_heads=HEADS
        )
        constants = attention_groups_triton.attend_constants(
            shape, keys, values, options, num_heads=HEADS
        )
        pointers = self._pointers(is_split=shape.num_splits > 1)
        return KernelCase(
            f"attend_groups[int{self.bits},{self.queries},rows{self.rows},dim{self.dim},{self.extras}]",
            attention_groups_triton.attend_groups_kernel,
            {**constants, **_absent(pointers)},
            attention_groups_triton.attend_options(shape, QUERY_DTYPES[self.queries]),
            _present(pointers),
        )

    def close_case(self) -> KernelCase:
        return KernelCase(
            f"kv_close[int{self.bits},dim{self.dim}]",
            kv_write_triton.close_kernel,
            kv_write_triton.close_constants(*self._pages()),
            kv_write_triton.CLOSE_OPTIONS,
            self._page_pointers() | {"slots_ptr": "*i64"},
        )

    def _pages(self) -> Iterator[GroupedPages]:
        cpu = torch.device("cpu")
        for is_key in (True, False):
            (pages,) = stack_grouped_pages(
                1,
                (1, GROUPED_BLOCK, KV_HEADS, self.dim),
                dtype=QUERY_DTYPES[self.queries],
                bits=self.bits,
                is_key=is_key,
                blocks=OpenBlocks(1, 1, cpu),
                device=cpu,
            ).pages
            assert isinstance(pages, GroupedPages)
            yield pages

    def _pointers(self, *, is_split: bool) -> dict[str, str | None]:
        """Types of the pointer arguments; None: left out."""
        data = f"*{self.queries}"
        return {
            **self._page_pointers(),
            "out_ptr": "*fp32" if is_split else data,
            "weights_ptr": "*fp32" if is_split else None,
            "q_ptr": data,
            **dict.fromkeys(("rows_ptr", "positions_ptr", "tables_ptr"), "*i64"),
            "sinks_ptr": data if self.extras == "window" else None,
            "slopes_ptr": "*fp32" if self.extras == "window" else None,
            "block_positions_ptr": "*i64" if self.extras else None,
        }

    def _page_pointers(self) -> dict[str, str]:
        return {
            **dict.fromkeys(("key_codes_ptr", "value_codes_ptr"), "*u8"),
            **dict.fromkeys(("key_steps_ptr", "value_steps_ptr"), "*bf16"),
            **dict.fromkeys(("open_keys_ptr", "open_values_ptr"), f"*{self.queries}"),
            "open_slots_ptr": "*i64",
        }


def compile_case(case: KernelCase, arch: str) -> KernelUsage:
    """Compile one kernel for one architecture, as the launcher would."""
    names = case.kernel.arg_names
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    signature = {
        name: "constexpr" if name in case.constants else case.pointers.get(name, "i32")
        for name in names
    }
    # The launcher detects that pointers and row lengths are multiples of 16.
    divisible = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name not in case.constants
        and name not in ("table_stride", "vectors_stride", "eps")
        and not case.kernel.params[index].do_not_specialize
    }
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constants, attrs=divisible)
    target = GPUTarget("cuda", ARCHITECTURES[arch], WARP_THREADS)
    compiled = triton.compile(source, target=target, options=dict(case.options))
    registers, spills = _resources(compiled.asm["cubin"])
    return KernelUsage(case.name, arch, registers, spills, compiled.metadata.shared)


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack and local memory) per thread, as cuobjdump reads them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [tool, "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    fields = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return fields["REG"], fields["STACK"] + fields["LOCAL"]


def compile_share(share: int, num_shares: int) -> list[KernelUsage]:
    """Every `num_shares`-th case of all architectures, from number `share` on."""
    cases = [(case, arch) for arch in ARCHITECTURES for case in all_cases(arch)]
    return [compile_case(case, arch) for case, arch in cases[share::num_shares]]


def main() -> int:
    num_shares = min(os.cpu_count() or 1, MAX_PROCESSES)
    with ProcessPoolExecutor(num_shares, get_context("spawn")) as pool:
        shares = list(pool.map(compile_share, range(num_shares), repeat(num_shares)))
    usages = [usage for usage in chain.from_iterable(zip_longest(*shares)) if usage]
    json.dump([asdict(usage) for usage in usages], sys.stdout, indent=1)
    sys.stdout.write("\n")
    found = [text for text in map(excess, usages) if text]
    sys.stderr.writelines(f"{text}\n" for text in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
