from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import loraplex.kernels.report as report_module

CODED_BYTES = {"sm_80": 96 << 10, "sm_90": 112 << 10}
"""Of products with codes: a block fits even the small multiprocessors that run sm_80's code,
two fit an H100's."""
PACKAGE_PARENT = Path(report_module.__file__).parents[2]


@pytest.fixture(scope="module")
def usages() -> Sequence[dict[str, str | int]]:
    """The report as its command prints it, in a process without the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    printed = subprocess.run(
        [sys.executable, "-m", "loraplex.kernels.report"],
        env=environment | {"PYTHONPATH": str(PACKAGE_PARENT)},
        check=True,
        capture_output=True,
        text=True,
        timeout=280,
    ).stdout
    usages: list[dict[str, str | int]] = json.loads(printed)
    return usages


def test_reports_every_kernel_for_every_architecture(
    usages: Sequence[dict[str, str | int]],
) -> None:
    assert {usage["arch"] for usage in usages} == {"sm_80", "sm_90"}
    names = {str(usage["kernel"]).partition("[")[0] for usage in usages}
    expected = {"lora_shrink", "lora_expand", "attend", "attend_combine", "kv_write"}
    assert names == expected | {"coded", "dequantize", "sum_splits"}
    assert len(usages) == len({(usage["kernel"], usage["arch"]) for usage in usages})


def test_no_kernel_spills_registers_but_attention_at_most_four(
    usages: Sequence[dict[str, str | int]],
) -> None:
    for usage in usages:
        assert int(usage["spills"]) <= (16 if str(usage["kernel"]).startswith("attend[") else 0)


def test_every_kernel_fits_the_architectures(usages: Sequence[dict[str, str | int]]) -> None:
    for usage in usages:
        assert 0 < int(usage["registers"]) <= 255
        assert 0 <= int(usage["shared"]) <= most_shared(str(usage["kernel"]), str(usage["arch"]))
        if str(usage["kernel"]).startswith("lora"):
            assert int(usage["shared"]) > 0, "its products go through shared memory"


def most_shared(kernel: str, arch: str) -> int:
    """At least three blocks on a multiprocessor, but one of a prompt's chunk."""
    if not kernel.startswith(("attend[", "coded")):
        return 64 << 10
    most = 144 << 10 if "rows512" in kernel else 76 << 10
    return min(most, CODED_BYTES[arch]) if kernel.startswith("coded") else most
