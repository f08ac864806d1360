"""Damaged quantized checkpoints are refused with a code, or harmless."""

from __future__ import annotations

from pathlib import Path

from benchmarks.quantized_mutations import try_mutations


def test_damage_is_refused_with_a_code_or_harmless(tmp_path: Path) -> None:
    """`make quantization-evidence` tries thousands."""
    found = try_mutations(tmp_path, range(400))
    assert not found.crashes, found.crashes[0]
    assert found.outcomes.keys() >= {"base_damaged", "base_shape_mismatch", "base_quantized"}
    assert found.peak_growth_mib < 500
