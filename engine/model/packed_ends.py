"""Packs the output head, and with it a quantized input embedding.

Quantized ends are packed in a form that the head multiplies and whose rows the embedding reads, so
that tied ends share one weight. Their inputs are never rounded to 8 bits: an error of the head is
an error of the logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from ...kernels.linear import Linear, QuantizedLinear
from ...kernels.linear_packing import LinearKind, choose_readable, pack_readable
from ...kernels.quantize import WeightFormat, quantize
from ...kernels.quantized_weight import QuantizedWeight
from ..checkpoint.stored_weights import Values, format_of, stored_weight, weight_values
from ..errors import InvalidParameter
from .embedding_and_head import ModelEnds
from .output_head import OutputHead
from .row_matrix import RowMatrix


class ServedEnd(NamedTuple):
    """An end's weight as it is served."""

    format: str
    """Such as int8 or gguf-q6_k; none: not quantized."""
    num_bytes: int
    """0: the embedding's weight serves both."""


class PackedEnds(NamedTuple):
    """The layers that hold the ends' weights in place of the model's own modules."""

    table: QuantizedLinear | None
    """None: the embedding is the model's own."""
    head: Linear | None
    """None: the head is the model's own. The table's own layer if they are tied and quantized."""
    served_table: ServedEnd
    served_head: ServedEnd

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Each once."""
        return tuple(dict.fromkeys(end for end in (self.table, self.head) if end is not None))


def name_formats(linears: str, table: str, head: str) -> str:
    """The formats of a base's weights, such as `int4, embedding and output head int8`."""
    ends = {"embedding": table, "output head": head}
    if table == head:
        ends = {"embedding and output head": head}
    named = [f"{end} {form}" for end, form in ends.items() if form != "none"]
    return ", ".join([*([] if linears == "none" and named else [linears]), *named])


def model_ends(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The input embedding and the output head by their paths."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return {name: module for name, module in model.named_modules() if module in ends}


def check_ends(
    weight_format: WeightFormat | None, stored_formats: Iterable[str | None], refused: Iterable[str]
) -> None:
    """Raise InvalidParameter if no end can be quantized to this format.

    `stored_formats`: those of the ends in the files. `refused`: the names of the ends that no other
    module can replace.
    """
    if weight_format is None:
        return
    if names := " and ".join(refused):
        raise InvalidParameter(
            "embedding_quantization", f"{names} computes more than its weight, so it stays dense"
        )
    formats = list(stored_formats)
    if None not in formats:
        raise InvalidParameter(
            "embedding_quantization",
            f"the embedding and the output head are quantized already: {formats[-1]}",
        )


def pack_ends(
    model: PreTrainedModel, ends: ModelEnds, weight_format: WeightFormat | None
) -> PackedEnds:
    """Replace the quantized ends in the model, and on the CPU every head.

    `weight_format`: the form of an end that is not quantized in its file; None: it stays dense.
    Raises InvalidParameter as `check_ends`.
    """
    own_table, own_head = model.get_input_embeddings(), model.get_output_embeddings()
    stored = [_stored_format(module) for module in (own_table, own_head)]
    check_ends(weight_format, stored, ends.refused)
    table_format, head_format = (each or weight_format or "none" for each in stored)
    table, head = _quantized_ends(model, ends, weight_format)
    if ends.embedding and table:
        ends.embedding.read_from(table, model)
    packed = _place_head(model, ends.head, head)
    table_bytes = own_table.weight.nbytes if table is None else table.weight_bytes
    head_bytes = own_head.weight.nbytes if packed is None else packed.weight_bytes
    is_shared = ends.are_tied and (packed is None or packed is table)
    return PackedEnds(
        table,
        packed,
        ServedEnd(table_format if table else "none", table_bytes),
        ServedEnd(head_format if head else "none", 0 if is_shared else head_bytes),
    )


def round_head(
    model: PreTrainedModel, ends: ModelEnds, weight_format: WeightFormat
) -> QuantizedLinear | None:
    """The output head in this format, before `pack_ends`; None: its file's form or its class leaves
    it as it is."""
    head = model.get_output_embeddings()
    can_be_replaced = ends.head is not None and _stored_format(head) is None
    return _quantized(head, weight_format) if can_be_replaced else None


def _stored_format(module: nn.Module) -> str | None:
    stored = stored_weight(module)
    return None if stored is None else format_of(stored)


def _quantized_ends(
    model: PreTrainedModel, ends: ModelEnds, weight_format: WeightFormat | None
) -> tuple[QuantizedLinear | None, QuantizedLinear | None]:
    """The layers of the table and the head, one and the same for tied ends; None: dense."""
    own_table, own_head = model.get_input_embeddings(), model.get_output_embeddings()
    if ends.are_tied:
        can_share = ends.embedding is not None and ends.head is not None
        shared = _quantized(own_head, weight_format) if can_share else None
        return shared, shared
    return (
        _quantized(own_table, weight_format) if ends.embedding else None,
        _quantized(own_head, weight_format) if ends.head else None,
    )


def _quantized(module: nn.Module, weight_format: WeightFormat | None) -> QuantizedLinear | None:
    def codes(values: Values) -> Values:
        if weight_format is None or isinstance(values, QuantizedWeight):
            return values
        return quantize(values, weight_format)

    own = module.weight
    form = codes(own.form) if isinstance(own, RowMatrix) else codes(weight_values(module))
    if isinstance(form, Tensor):
        return None
    if choose_readable(form, device_type=form.codes.device.type) is LinearKind.DENSE:
        return None
    weight = own.stored(codes) if isinstance(own, RowMatrix) else form
    assert isinstance(weight, QuantizedWeight), "all rows have one form"
    bias = getattr(module, "bias", None)
    return pack_readable(weight, None if bias is None else bias.detach())


def _place_head(
    model: PreTrainedModel, head: OutputHead | None, quantized: QuantizedLinear | None
) -> Linear | None:
    """The layer that is now the head; None: still the model's own."""
    if head is None:
        return None
    if quantized is not None:
        head.multiply_by(quantized, model)
        return quantized
    # PyTorch's own matmul of 16 rows takes three times as long on the CPU.
    is_on_cpu = model.get_output_embeddings().weight.device.type == "cpu"
    return head.pack(model) if is_on_cpu else None
