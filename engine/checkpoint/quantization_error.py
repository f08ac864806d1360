"""How far quantized weights are from those of an unquantized checkpoint, one weight at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.quantize import WeightFormat, quantize
from ...kernels.quantized_weight import QuantizedWeight
from ..errors import InvalidParameter
from ..gguf.file import GgufTensor
from ..gguf.kinds import DENSE_KINDS
from .load_progress import report_progress
from .stored_weights import AnyStoredWeight, StoredPackedWeight, dense, stored_weights
from .weight_forms import read_weight_forms

_CPU = torch.device("cpu")


class QuantizedAtLoad(NamedTuple):
    """How a weight is quantized while it is loaded."""

    form: WeightFormat
    is_transposed: bool
    """It is stored as `[in, out]`."""
    group_size: int | None = None
    """As of `quantize`."""


class ProjectionErrors(NamedTuple):
    """The relative errors ‖W - W'‖ / ‖W‖ of the weights of one kind of projection."""

    mean: float
    worst: float
    worst_name: str
    num_weights: int


class QuantizationErrors(NamedTuple):
    """The errors of all quantized weights."""

    projections: Mapping[str, ProjectionErrors]
    """By the end of the weights' names, such as q_proj."""
    num_not_compared: int
    """Quantized weights that the reference does not have under their names."""


def measure_errors(
    folder: Path, reference: Path, at_load: Mapping[str, QuantizedAtLoad]
) -> QuantizationErrors:
    """The errors of a base's quantized weights, in its files and `at_load`.

    Raises InvalidParameter for a reference that is quantized or of other shapes, and a subclass of
    UnsupportedModel for files that cannot be read.
    """
    stored, originals = stored_weights(folder), stored_weights(reference)
    names = [name for name, form in read_weight_forms(folder).items() if form.format is not None]
    names += at_load
    compared = [name for name in names if name in originals]
    errors: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
    with report_progress("comparing weights", len(compared)) as advance:
        for name in compared:
            original = _read_original(originals[name], stored[name].shape, name)
            values = stored[name].read()
            if name in at_load and isinstance(values, Tensor):
                values = _quantized(values, at_load[name])
            errors[_projection(name)].append((_relative_error(original, values), name))
            advance()
    return QuantizationErrors(
        {kind: _summary(each) for kind, each in sorted(errors.items())},
        len(names) - len(compared),
    )


def _read_original(weight: AnyStoredWeight, shape: tuple[int, ...], name: str) -> Tensor:
    if weight.shape != shape:
        raise InvalidParameter(
            "reference", f"its {name} is {list(weight.shape)}, not {list(shape)}: another model"
        )
    is_quantized_gguf = isinstance(weight, GgufTensor) and weight.kind not in DENSE_KINDS
    if isinstance(weight, StoredPackedWeight) or is_quantized_gguf:
        raise InvalidParameter("reference", f"its {name} is quantized itself")
    values = weight.read()
    assert isinstance(values, Tensor)
    return values.float()


def _quantized(values: Tensor, at_load: QuantizedAtLoad) -> Tensor:
    """fp32, in the shape of `values`."""
    if values.ndim == 3:  # experts
        return torch.stack([_quantized(matrix, at_load) for matrix in values])
    rows = values.T if at_load.is_transposed else values
    numbers = quantize(rows, at_load.form, at_load.group_size).dequantize()
    return numbers.T if at_load.is_transposed else numbers


def _relative_error(original: Tensor, values: Tensor | QuantizedWeight) -> float:
    """0 for weights that are both 0."""
    difference = dense(values, dtype=torch.float32, device=_CPU).sub_(original).norm()
    size = original.norm()
    return float(difference / size) if size else float(difference)


def _projection(name: str) -> str:
    path = name.removesuffix(".weight")
    leaf = path.rpartition(".")[2]
    return f"experts.{leaf}" if ".experts." in path else leaf


def _summary(errors: list[tuple[float, str]]) -> ProjectionErrors:
    worst, name = max(errors)
    mean = sum(error for error, _ in errors) / len(errors)
    return ProjectionErrors(mean, worst, name, len(errors))
