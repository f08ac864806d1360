"""`make quantization-evidence` at a small size, and its bounds."""

from __future__ import annotations

import json

import pytest

from benchmarks import quantization_evidence


def test_each_figure_is_within_its_bound(capsys: pytest.CaptureFixture[str]) -> None:
    sections = ("--only", "formats", "mutations", "mla")
    options = ("--formats", "awq", "--mutations", "20")
    assert quantization_evidence.main([*sections, *options]) == 0
    evidence = json.loads(capsys.readouterr().out)
    (row,) = evidence["formats"]
    assert row["name"] == "awq"
    assert 0 < row["adapters_max_error"] < row["adapters_bound"]
    assert evidence["mutations"]["tried"] == 20
    assert evidence["mla"]["expanded_bytes_per_token"] // evidence["mla"]["bytes_per_token"] == 71


def test_figures_beyond_their_bounds_are_named() -> None:
    row = {"name": "gptq", "max_error": 1.0, "bound": 1e-3, "adapters_max_error": float("nan")}
    row |= {"adapters_bound": 1e-3, "bytes_over_bf16": 0.3}
    evidence = {
        "formats": [row],
        "kv": [{"format": "int4", "tokens_over_bf16": 3.4, "kl": 0.0}],
        "mla": {"max_error": 1.0},
        "eviction": [{"policy": "h2o", "budget": 64, "needle_right": 0.9, "full_right": 0.9}],
        "mutations": {"crashes": 1, "first_crash": "KeyError"},
    }
    faults = list(quantization_evidence.find_faults(evidence))
    assert [fault.partition(":")[0] for fault in faults] == [
        *("gptq", "gptq", "gptq", "--kv-dtype int4", "latent attention", "the full cache"),
        "a damaged checkpoint",
    ]
