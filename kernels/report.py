"""What the Triton kernels compile to, without a GPU: registers, spills and shared memory.

`python -m loraplex.kernels.report` compiles every kernel ahead of time, for each architecture and
each set of compile-time values that serving uses, and prints JSON:
`[{"kernel", "arch", "registers", "spills", "shared"}]`. Spills are bytes of stack and local memory
per thread, shared is bytes per block. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import coded_triton, lora_triton
from .int4_codes import GROUP

ARCHITECTURES = {"sm_80": 80, "sm_90": 90}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SHAPES = ((16, 16), (16, 64), (64, 16), (64, 64))
"""(tokens, ranks) of a tile: the smallest and largest that `lora_triton` chooses of each."""
IN_FEATURES = 4096
SLICE_OUTS = (4096, 1024, 1024)
CODED_ROWS = (1, 32, 512)
"""One of each tile that `coded_triton` chooses."""
WARP_THREADS = 32


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel with its compile-time values and the types of its other arguments."""

    name: str
    kernel: Any
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    pointers: Mapping[str, str]
    """Pointer arguments to their types; all other arguments are `i32`."""


@dataclass(frozen=True, slots=True)
class KernelUsage:
    """What one compiled kernel takes, per thread (`registers`, `spills`) or block (`shared`)."""

    kernel: str
    arch: str
    registers: int
    spills: int
    shared: int


def lora_cases() -> Iterator[KernelCase]:
    """Shrink and expand for every serving dtype and tile shape."""
    tables = {"table_ptr": "*i64", "tiles_ptr": "*i32", "token_rows_ptr": "*i32", "h_ptr": "*fp32"}
    for dtype_name, dtype in DTYPES.items():
        data = f"*{dtype_name}"
        for block_tokens, max_rank in SHAPES:
            variant = f"[{dtype_name},tokens{block_tokens},rank{max_rank}]"
            splits = lora_triton.num_splits(IN_FEATURES, block_tokens)
            yield KernelCase(
                f"lora_shrink{variant}",
                lora_triton.shrink_kernel,
                lora_triton.shrink_constants(dtype, IN_FEATURES, block_tokens, max_rank),
                lora_triton.SHRINK_OPTIONS,
                {**tables, "x_ptr": data, "flat_ptr": data},
            )
            yield KernelCase(
                f"lora_expand{variant}",
                lora_triton.expand_kernel,
                lora_triton.expand_constants(dtype, SLICE_OUTS, splits, block_tokens, max_rank),
                lora_triton.EXPAND_OPTIONS,
                {**tables, "y_ptr": data, "flat_ptr": data, "blocks_ptr": "*i32"},
            )


def coded_cases() -> Iterator[KernelCase]:
    """Products with int8 and int4 codes, what puts their splits together, and dequantizing."""
    groups = IN_FEATURES // GROUP
    for (dtype_name, dtype), bits, rows in product(DTYPES.items(), (8, 4), CODED_ROWS):
        data = f"*{dtype_name}"
        launch = coded_triton.choose_launch(rows, SLICE_OUTS[0], groups, dtype)
        coded = {"codes_ptr": "*i16", "scale_ptr": "*fp32" if bits == 8 else "*bf16"}
        yield KernelCase(
            f"coded[{dtype_name},int{bits},rows{rows}]",
            coded_triton.coded_kernel,
            coded_triton.coded_constants(IN_FEATURES, bits, launch),
            launch.options,
            {**coded, "y_ptr": data, "x_ptr": data, "bias_ptr": data},
        )
        if rows == CODED_ROWS[-1]:
            yield KernelCase(
                f"dequantize[{dtype_name},int{bits}]",
                coded_triton.dequantize_kernel,
                coded_triton.dequantize_constants(bits),
                coded_triton.DEQUANTIZE_OPTIONS,
                {**coded, "weight_ptr": data},
            )
    yield KernelCase(
        "sum_splits",
        coded_triton.sum_kernel,
        coded_triton.sum_constants(coded_triton.MAX_SPLITS),
        coded_triton.SUM_OPTIONS,
        {"y_ptr": "*bf16", "sums_ptr": "*fp32", "bias_ptr": "*bf16"},
    )


def compile_case(case: KernelCase, arch: str) -> KernelUsage:
    """Compile one kernel for one architecture, as the launcher would."""
    names = case.kernel.arg_names
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    signature = {
        name: "constexpr" if name in case.constants else case.pointers.get(name, "i32")
        for name in names
    }
    # The launcher finds by itself that pointers and row lengths are multiples of 16.
    divisible = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name not in case.constants
        and name != "table_stride"
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


def main() -> None:
    usages = [
        compile_case(case, arch)
        for arch in ARCHITECTURES
        for case in chain(lora_cases(), coded_cases())
    ]
    json.dump([asdict(usage) for usage in usages], sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
