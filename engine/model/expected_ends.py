"""How the ends of a base that is not loaded would be packed, from the headers of its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...kernels.linear_packing import LinearKind, choose_readable
from ...kernels.quantize import WeightFormat
from ...kernels.quantized_weight import QuantizedWeight
from ..checkpoint.weight_forms import WeightForm, quantized_form
from ..checkpoint.weights import EmptyModel
from .embedding_and_head import declare_ends
from .packed_ends import check_ends, model_ends


class ExpectedEnd(NamedTuple):
    """A quantized end."""

    module: nn.Module
    stored_name: str | None
    """The stored weight that it is, if it is one."""
    format: str
    quantized_to: WeightFormat | None
    """None: it is quantized in its file."""
    weight: QuantizedWeight
    """On the meta device."""
    kind: LinearKind


class ExpectedEnds(NamedTuple):
    """The quantized ends; None: it is dense."""

    table: ExpectedEnd | None
    head: ExpectedEnd | None
    """If the ends are tied, the table's weight serves it."""
    are_tied: bool

    @property
    def stored_once(self) -> Iterator[ExpectedEnd]:
        """Those with a weight of their own."""
        if self.table is not None:
            yield self.table
        if self.head is not None and not self.are_tied:
            yield self.head


def expect_ends(
    empty: EmptyModel,
    forms: Mapping[str, WeightForm],
    weight_format: WeightFormat | None,
    *,
    device_type: str,
) -> ExpectedEnds:
    """As `pack_ends` packs them. Raises InvalidParameter as that does."""
    ends, finder = declare_ends(empty.model), _Finder(empty, forms, weight_format, device_type)
    table, head = empty.model.get_input_embeddings(), empty.model.get_output_embeddings()
    formats = [finder.stored_format(module) for module in (table, head)]
    check_ends(weight_format, formats, ends.refused)
    if ends.are_tied and ends.refused:
        return ExpectedEnds(None, None, are_tied=True)
    return ExpectedEnds(
        finder.expect(table) if ends.embedding else None,
        finder.expect(head) if ends.head else None,
        ends.are_tied,
    )


class _Finder(NamedTuple):
    empty: EmptyModel
    forms: Mapping[str, WeightForm]
    weight_format: WeightFormat | None
    device_type: str

    def stored_format(self, module: nn.Module) -> str | None:
        name = self._stored_name(module)
        return None if name is None else self.forms[name].format

    def expect(self, module: nn.Module) -> ExpectedEnd | None:
        name, stored = self._stored_name(module), self.stored_format(module)
        weight: Any = module.weight if not name or not stored else self.forms[name].values
        quantized_to = None
        if isinstance(weight, Tensor):
            if self.weight_format is None:
                return None
            quantized_to = self.weight_format
            weight = quantized_form(weight.detach(), quantized_to)
        kind = choose_readable(weight, device_type=self.device_type)
        if kind is LinearKind.DENSE:
            return None
        served = stored or str(self.weight_format)
        return ExpectedEnd(module, name, served, quantized_to, weight, kind)

    def _stored_name(self, module: nn.Module) -> str | None:
        paths = {end: path for path, end in model_ends(self.empty.model).items()}
        return self.empty.stored_names.get(paths[module])
