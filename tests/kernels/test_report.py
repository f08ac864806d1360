"""`make kernels-report` compiles every kernel; this tests one of each, and the limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import loraplex.kernels.report as report_module
from loraplex.kernels.report import ARCHITECTURES, KernelUsage, all_cases, excess

PACKAGE_PARENT = Path(report_module.__file__).parents[2]
KERNELS = {
    *("lora_shrink", "lora_expand", "lora_vectors", "kv_write"),
    *("attend", "attend_latent", "attend_combine", "attend_groups", "kv_close"),
    *("coded", "coded_experts", "dequantize", "sum_splits", "rms_norm", "rotary", "gated"),
    *("sort_pairs", "grouped", "recurrence", "selective_scan"),
}
COMPILE_SOME = """
import json
from dataclasses import asdict
from loraplex.kernels.report import all_cases, compile_case
first = {}
for case in all_cases("sm_90"):
    first.setdefault(case.name.partition("[")[0], case)
print(json.dumps([asdict(compile_case(case, "sm_90")) for case in first.values()]))
"""


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_is_reported_once_for_each_set_of_values(arch: str) -> None:
    names = [case.name for case in all_cases(arch)]
    assert {name.partition("[")[0] for name in names} == KERNELS
    assert len(names) == len(set(names))


@pytest.mark.slow
def test_a_kernel_of_each_kind_compiles_and_stays_within_its_limits() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    printed = subprocess.run(
        [sys.executable, "-c", COMPILE_SOME],
        env=environment | {"PYTHONPATH": str(PACKAGE_PARENT)},
        check=True,
        capture_output=True,
        text=True,
        timeout=280,
    ).stdout
    usages = [KernelUsage(**usage) for usage in json.loads(printed)]
    assert {usage.kernel.partition("[")[0] for usage in usages} == KERNELS
    assert [excess(usage) for usage in usages] == [None] * len(KERNELS)
    for usage in usages:
        assert usage.registers > 0
        if usage.kernel.startswith(("lora_shrink", "lora_expand", "grouped")):
            assert usage.shared > 0, "its products go through shared memory"


@pytest.mark.parametrize(
    ("kernel", "arch", "spills", "shared"),
    [
        ("kv_write[bf16]", "sm_90", 0, 64 << 10),
        ("attend[bf16,bf16,rows1,dim128,none]", "sm_90", 16, 76 << 10),
        ("attend[bf16,bf16,rows512,dim128,none]", "sm_90", 16, 144 << 10),
        ("attend_groups[int4,bf16,rows512,dim128,none]", "sm_90", 0, 64 << 10),
        ("coded[bf16,int8,rows1]", "sm_90", 0, 76 << 10),
        ("coded[bf16,int8,rows512]", "sm_80", 0, 96 << 10),
        ("coded[bf16,int8,rows512]", "sm_90", 0, 112 << 10),
    ],
)
def test_what_exceeds_a_limit_is_named(kernel: str, arch: str, spills: int, shared: int) -> None:
    usage = KernelUsage(kernel, arch, 255, spills, shared)
    assert excess(usage) is None
    for name in ("registers", "spills", "shared"):
        beyond = replace(usage, **{name: getattr(usage, name) + 1})
        assert name in str(excess(beyond))
