"""The methods and formats of a calibrated checkpoint. Imports no torch."""

from __future__ import annotations

from enum import StrEnum


class Method(StrEnum):
    """How codes are chosen."""

    GPTQ = "gptq"
    """With the least error of each layer's outputs (`gptq.py`)."""
    AWQ = "awq"
    """The nearest ones, after inputs that matter more were scaled up (`awq.py`)."""
    RTN = "rtn"
    """The nearest ones."""


class CodeFormat(StrEnum):
    """What codes are."""

    INT4 = "int4"
    INT8 = "int8"
    FP8 = "fp8"
    """e4m3, a scale per output."""
