"""How the linear layers and experts of a base are quantized while it is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from ...kernels.quantize import WeightFormat, quantize
from ...kernels.quantized_weight import QuantizedWeight
from ..checkpoint.stored_weights import Values
from ..checkpoint.weight_forms import quantized_form


@dataclass(frozen=True, slots=True)
class LoadQuantization:
    """What `--quantize` and the options beside it ask for, of one model."""

    weight_format: WeightFormat | None = None
    """None: nothing is quantized."""
    group_size: int | None = None
    """As of `quantize`."""
    excluded: frozenset[str] = frozenset()
    """The paths of the linear layers and experts that stay in the serving dtype."""

    @property
    def name(self) -> str:
        """For people, such as `int4, groups of 32, 3 layers excluded`; none: nothing is changed."""
        if self.weight_format is None:
            return "none"
        parts = [str(self.weight_format)]
        if self.group_size is not None:
            size = self.group_size
            parts.append(f"groups of {size}" if size else "a scale per output")
        if num_excluded := len(self.excluded):
            parts.append(f"{num_excluded} {'layer' if num_excluded == 1 else 'layers'} excluded")
        return ", ".join(parts)

    def format_of(self, path: str) -> WeightFormat | None:
        """The format that this layer is quantized to; None: it stays as it is."""
        return None if path in self.excluded else self.weight_format

    def apply(self, path: str, values: Values) -> Values:
        """The weight `[out, in]` of this layer as it is packed. One that is quantized in its file
        stays so; one on the meta device gives a form without values."""
        weight_format = self.format_of(path)
        if weight_format is None or isinstance(values, QuantizedWeight):
            return values
        make = quantized_form if values.is_meta else quantize
        return make(values, weight_format, self.group_size)
