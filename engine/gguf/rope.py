"""The rotary embedding of a GGUF file's model. Imports no torch."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

from ..errors import DamagedBase
from .settings import Settings

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
CONFIG_TENSORS = frozenset({ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS})
"""Tensors that belong to the configuration, not to the model."""
_LLAMA3_CONTEXTS = (8192, 4096, 2048, 16384, 32768)
"""Llama 3.1 to 3.3 scale from a context of 8192."""
_MAX_FACTORS = 4096


def rope(settings: Settings) -> dict[str, Any]:
    """`rope_parameters` of the architectures that rotate whole heads.

    Raises UnsupportedModel for a scaling that is not supported.
    """
    head_dim = settings.head_dim
    settings.must_be("rope.dimension_count", head_dim)
    theta = settings.number("rope.freq_base", 10000.0)
    parameters = {"rope_theta": theta, **rope_scaling(settings)}
    if ROPE_FACTORS in settings.header.tensors:
        if parameters["rope_type"] != "default":
            raise settings.unsupported(f"it has both a rope scaling and {ROPE_FACTORS}")
        factors = _factors(settings, ROPE_FACTORS)
        parameters |= _llama3_scaling(settings, factors, theta, head_dim)
    return parameters


def rope_scaling(settings: Settings) -> dict[str, Any]:
    """`rope_type` and its settings, as far as the metadata has them."""
    kind = settings.text("rope.scaling.type", "linear")
    factor = settings.number("rope.scaling.factor", settings.number("rope.scale_linear", 1.0))
    settings.must_be("rope.scaling.attn_factor", 1.0)
    if kind == "none" or (kind == "linear" and factor == 1):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": settings.integer(
                "rope.scaling.original_context_length"
            ),
            "beta_fast": settings.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": settings.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    raise settings.unsupported(f"its rope scaling {kind} is not supported")


def long_rope(settings: Settings, original_context: int) -> dict[str, Any]:
    """`rope_parameters` of Phi-3, which may rotate a part of each head only."""
    head_dim = settings.head_dim
    rotary = settings.integer("rope.dimension_count", head_dim)
    parameters: dict[str, Any] = {
        "rope_theta": settings.number("rope.freq_base", 10000.0),
        "rope_type": "default",
        "partial_rotary_factor": rotary / head_dim,
    }
    present = {LONG_FACTORS, SHORT_FACTORS} & settings.header.tensors.keys()
    if not present:
        return parameters
    if len(present) == 1:
        raise DamagedBase(f"{settings.header.path} lacks {LONG_FACTORS} or {SHORT_FACTORS}")
    if (kind := settings.text("rope.scaling.type", "longrope")) != "longrope":
        raise settings.unsupported(f"its rope scaling is {kind}, with factors for longrope")
    return parameters | {
        "rope_type": "longrope",
        "long_factor": _factors(settings, LONG_FACTORS),
        "short_factor": _factors(settings, SHORT_FACTORS),
        "attention_factor": settings.number("rope.scaling.attn_factor", 1.0),
        "original_max_position_embeddings": original_context,
    }


def _llama3_scaling(
    settings: Settings, factors: Sequence[float], theta: float, head_dim: int
) -> dict[str, Any]:
    """The settings of Llama 3.1's scaling, of which the file has the result: a factor for each
    frequency."""
    factor = max(factors)
    if factor == min(factors) == 1:
        return {}
    key = "rope.scaling.original_context_length"
    known = (settings.integer(key),) if settings.has(key) else _LLAMA3_CONTEXTS
    contexts = known if 2 * len(factors) == head_dim else ()
    for context in contexts:
        expected = _llama3_factors(theta, head_dim, factor=factor, context=context)
        pairs = zip(factors, expected, strict=True)
        if all(math.isclose(found, other, rel_tol=1e-3) for found, other in pairs):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": context,
            }
    raise settings.unsupported(f"its {ROPE_FACTORS} is not the scaling of Llama 3.1")


def _llama3_factors(theta: float, head_dim: int, *, factor: float, context: int) -> list[float]:
    factors = []
    for dimension in range(0, head_dim, 2):
        turns = context / (2 * math.pi * theta ** (dimension / head_dim))
        smooth = min(max((turns - 1.0) / (4.0 - 1.0), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _factors(settings: Settings, name: str) -> list[float]:
    header = settings.header
    tensor = header.tensors[name]
    if tensor.kind != "F32" or tensor.num_bytes > 4 * _MAX_FACTORS:
        raise settings.unsupported(f"its tensor {name} is {list(tensor.shape)} of {tensor.kind}")
    try:
        with header.path.open("rb") as file:
            file.seek(tensor.offset)
            values = struct.unpack(f"<{tensor.num_bytes // 4}f", file.read(tensor.num_bytes))
    except (OSError, struct.error) as exc:
        raise DamagedBase(f"{header.path}: {name} cannot be read: {exc}") from exc
    if not all(0 < value < math.inf for value in values):
        raise DamagedBase(f"{header.path}: {name} has factors that are no positive numbers")
    return list(values)
