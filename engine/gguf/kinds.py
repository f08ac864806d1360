"""The kinds of tensors in a GGUF file: their numbers, names and sizes. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple


class BlockSize(NamedTuple):
    """A row is a sequence of blocks of one size."""

    values: int
    num_bytes: int


DENSE_KINDS = {"F32": BlockSize(1, 4), "F16": BlockSize(1, 2), "BF16": BlockSize(1, 2)}
QUANTIZED_KINDS = {
    "Q4_0": BlockSize(32, 18),
    "Q4_1": BlockSize(32, 20),
    "Q5_0": BlockSize(32, 22),
    "Q5_1": BlockSize(32, 24),
    "Q8_0": BlockSize(32, 34),
    "Q2_K": BlockSize(256, 84),
    "Q3_K": BlockSize(256, 110),
    "Q4_K": BlockSize(256, 144),
    "Q5_K": BlockSize(256, 176),
    "Q6_K": BlockSize(256, 210),
    "IQ4_NL": BlockSize(32, 18),
    "IQ4_XS": BlockSize(256, 136),
}
BLOCK_SIZES = DENSE_KINDS | QUANTIZED_KINDS
"""Every kind that is read."""
KIND_NAMES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1"},
    **{10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K"},
    **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S"},
    **{22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}
"""The kinds that have a name, by their number in the file."""
