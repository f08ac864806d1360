"""Binds an adapter's auxiliary tensors: magnitudes, biases, full matrices, token rows, heads.

Each kind must be enabled in the configuration: PEFT ignores a tensor that its configuration does
not announce, and fails if an announced tensor is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .added_tokens import MAX_ADDED_TOKENS
from .block import Extra, ExtraKind
from .bound import BaseCopy, BoundExtra, BoundSlice
from .classification import HEAD, MAX_LABELS, TASK
from .draft_head import is_head_id
from .errors import AdapterRejected
from .expert_names import find_expert_matrix
from .formats import refusal_message
from .layout import BaseLayout, Slice, SliceKind
from .peft_config import PeftConfig
from .resized_ends import check_resized, is_saved
from .safetensors_header import TensorEntry
from .tensor_names import TensorName, TensorRole

_KINDS = tuple(ExtraKind)


def bind_auxiliary(
    tensors: Iterable[tuple[TensorName, TensorEntry]],
    slices: Sequence[BoundSlice],
    config: PeftConfig,
    layout: BaseLayout,
) -> tuple[tuple[BoundExtra, ...], tuple[BaseCopy, ...]]:
    """Bind everything that is no A or B; `slices` are bound already.

    Raises AdapterRejected naming the tensor or the field at fault.
    """
    binder = _ExtraBinder(slices, config, layout)
    for name, tensor in tensors:
        binder.bind(name, tensor)
    binder.tie_token_rows()
    binder.check_complete()
    auxiliary = sorted(
        binder.auxiliary.values(),
        key=lambda part: (part.extra.slice_index, _KINDS.index(part.extra.kind)),
    )
    return tuple(auxiliary), tuple(binder.copies)


class _ExtraBinder:
    """Collects the extras of one adapter."""

    def __init__(
        self, slices: Sequence[BoundSlice], config: PeftConfig, layout: BaseLayout
    ) -> None:
        self.auxiliary: dict[tuple[int, ExtraKind], BoundExtra] = {}
        self.copies: list[BaseCopy] = []
        self._slices = {part.index: part for part in slices}
        self._config = config
        self._layout = layout

    def bind(self, name: TensorName, tensor: TensorEntry) -> None:
        match name.role:
            case TensorRole.MAGNITUDE:
                self._bind_magnitude(name, tensor)
            case TensorRole.LORA_BIAS:
                self._bind_lora_bias(name, tensor)
            case TensorRole.BIAS:
                self._bind_bias(name, tensor)
            case TensorRole.TOKEN_ROWS:
                self._bind_token_rows(name, tensor)
            case TensorRole.DRAFT_HEAD:
                self._bind_draft_head(name, tensor)
            case _:
                self._bind_matrix(name, tensor)

    def tie_token_rows(self) -> None:
        """Trained rows of a tied embedding are the head's, too, unless it has its own."""
        if not self._layout.ties_embeddings or self._layout.embedding is None:
            return
        rows = self.auxiliary.get((self._layout.embedding, ExtraKind.TOKEN_ROWS))
        head = self._layout.output_head
        if rows is None or (head, ExtraKind.TOKEN_ROWS) in self.auxiliary:
            return
        if head is None:
            raise AdapterRejected(
                "unsupported_module",
                f"{rows.tensor.name}: {refusal_message('tied_token_rows')}",
                pointer=rows.tensor.name,
            )
        extra = Extra(head, ExtraKind.TOKEN_ROWS, rows.extra.shape, rows.extra.token_ids)
        layer = self._layout.slices[head]
        self._add(BoundExtra(extra, layer, rows.tensor, rows.rows, is_derived=True))

    def check_complete(self) -> None:
        """Check that every tensor that the configuration announces exists."""
        for index, part in self._slices.items():
            if self._config.uses_dora:
                self._check_has(index, ExtraKind.MAGNITUDE, f"{part.module}.lora_magnitude_vector")
            if self._config.uses_lora_bias:
                self._check_has(index, ExtraKind.LORA_BIAS, f"{part.module}.lora_B.bias")
        head = (self._layout.output_head, ExtraKind.CLASSIFICATION_HEAD)
        if self._config.is_classifier and head not in self.auxiliary:
            raise AdapterRejected(
                "config_contradiction",
                f"the task_type {TASK} announces {HEAD}.weight, which is not there",
                pointer="/task_type",
            )
        for name, tokens in self._config.trained_tokens:
            if not self._has_rows(name, tokens):
                raise AdapterRejected(
                    "config_contradiction",
                    f"trainable_token_indices names {len(tokens)} tokens; their rows are not there",
                    pointer="/trainable_token_indices",
                )

    def _has_rows(self, name: str, tokens: tuple[int, ...]) -> bool:
        """Whether rows of just these tokens are bound to the module that this name means."""
        return any(
            part.extra.token_ids == tuple(sorted(tokens))
            and part.layer.name.endswith(name)
            and (bool(name) or part.extra.slice_index == self._layout.embedding)
            for part in self.auxiliary.values()
            if part.extra.kind is ExtraKind.TOKEN_ROWS
        )

    def _check_has(self, index: int, kind: ExtraKind, missing: str) -> None:
        layer = self._layout.slices[index]
        if (index, kind) not in self.auxiliary:
            raise AdapterRejected(
                "config_contradiction",
                f"the configuration announces {missing}, which is not there",
                pointer=layer.name,
            )

    def _bind_magnitude(self, name: TensorName, tensor: TensorEntry) -> None:
        index, layer = self._slice_of_vector(name, tensor)
        self._check_announced(tensor, self._config.uses_dora, "use_dora")
        self._check_has_pair(index, tensor)
        self._add(_vector(index, layer, ExtraKind.MAGNITUDE, tensor))

    def _bind_lora_bias(self, name: TensorName, tensor: TensorEntry) -> None:
        index, layer = self._slice_of_vector(name, tensor)
        self._check_announced(tensor, self._config.uses_lora_bias, "lora_bias")
        self._check_has_pair(index, tensor)
        scale = self._slices[index].scale
        self._add(_vector(index, layer, ExtraKind.LORA_BIAS, tensor, scale=scale))

    def _bind_bias(self, name: TensorName, tensor: TensorEntry) -> None:
        is_of_expert = find_expert_matrix(name.module, self._layout) is not None
        if name.module not in self._layout.slice_index and not is_of_expert:
            is_head = self._config.is_classifier and name.module in self._config.modules_to_save
            raise AdapterRejected(
                "unsupported_module",
                f"{tensor.name}: "
                + refusal_message("biased_classifier" if is_head else "norm_bias"),
                pointer=tensor.name,
            )
        index, layer = self._slice_of_vector(name, tensor)
        is_trained = self._config.bias != "none" or is_saved(index, self._config, self._layout)
        self._check_announced(tensor, is_trained, "bias")
        self._add(_vector(index, layer, ExtraKind.BIAS, tensor))

    def _bind_matrix(self, name: TensorName, tensor: TensorEntry) -> None:
        """A whole matrix of the embedding or the head: trained, or the base's own; or the matrix of
        a classification head."""
        if self._config.is_classifier and name == TensorName(HEAD, TensorRole.MATRIX, 0):
            self._bind_classification_head(tensor)
            return
        index = self._layout.slice_index.get(name.module)
        if index is None or index not in (self._layout.embedding, self._layout.output_head):
            raise AdapterRejected(
                "unsupported_module",
                f"{tensor.name}: {refusal_message('other_modules_to_save')}",
                pointer=tensor.name,
            )
        layer = self._layout.slices[index]
        is_embedding = layer.kind is SliceKind.EMBEDDING
        shape = (layer.out_features, layer.in_features)
        rows, width = shape[::-1] if is_embedding else shape
        if len(tensor.shape) == 2 and tensor.shape[0] != rows and tensor.shape[1] == width:
            check_resized(tensor, rows)
            rows = tensor.shape[0]
        _check_shape(tensor, (rows, width))
        if name.role is not TensorRole.MATRIX or not is_saved(index, self._config, self._layout):
            self.copies.append(BaseCopy(name.module, tensor))
            return
        extra = Extra(index, ExtraKind.MATRIX, (rows, width))
        self._add(BoundExtra(extra, layer, tensor))

    def _bind_classification_head(self, tensor: TensorEntry) -> None:
        index = self._layout.output_head
        if index is None:
            raise AdapterRejected(
                "unsupported_module",
                f"{tensor.name}: {refusal_message('classifier_of_this_base')}",
                pointer=tensor.name,
            )
        width = self._layout.slices[index].in_features
        num_labels = tensor.shape[0] if tensor.shape else 0
        _check_shape(tensor, (num_labels, width))
        if num_labels > MAX_LABELS:
            raise AdapterRejected(
                "unsupported_feature",
                f"{tensor.name} has {num_labels} labels: {refusal_message('too_many_labels')}",
                pointer=tensor.name,
            )
        extra = Extra(index, ExtraKind.CLASSIFICATION_HEAD, tensor.shape)
        self._add(BoundExtra(extra, Slice(HEAD, width, num_labels), tensor))

    def _bind_draft_head(self, name: TensorName, tensor: TensorEntry) -> None:
        index = self._layout.output_head
        if index is None:
            raise AdapterRejected(
                "unsupported_module",
                f"{tensor.name}: {refusal_message('draft_head_of_this_base')}",
                pointer=tensor.name,
            )
        if not is_head_id(name.module):
            raise AdapterRejected(
                "unbound_tensor", f"{tensor.name} does not end with an id", pointer=tensor.name
            )
        num_values = max(tensor.shape, default=1)
        _check_shape(tensor, (max(num_values, 1),))
        extra = Extra(index, ExtraKind.DRAFT_HEAD, tensor.shape, head_id=name.module)
        self._add(BoundExtra(extra, Slice(extra.kind, num_values, 1), tensor))

    def _bind_token_rows(self, name: TensorName, tensor: TensorEntry) -> None:
        index = self._layout.slice_index.get(name.module)
        if index is None or index not in (self._layout.embedding, self._layout.output_head):
            raise AdapterRejected(
                "unsupported_module",
                f"{tensor.name}: {refusal_message('other_token_rows')}",
                pointer=tensor.name,
            )
        layer = self._layout.slices[index]
        is_input = layer.kind is SliceKind.EMBEDDING
        num_tokens, width = layer.in_features, layer.out_features
        if not is_input:
            num_tokens, width = width, num_tokens
        tokens = self._config.tokens_of(name.module, is_input=is_input)
        self._check_announced(tensor, bool(tokens), "trainable_token_indices")
        if max(tokens) >= num_tokens + MAX_ADDED_TOKENS:
            raise AdapterRejected(
                "wrong_base",
                f"token {max(tokens)} was trained; this base has {num_tokens}",
                pointer="/trainable_token_indices",
            )
        _check_shape(tensor, (len(tokens), width))
        order = tuple(sorted(range(len(tokens)), key=tokens.__getitem__))
        extra = Extra(index, ExtraKind.TOKEN_ROWS, tensor.shape, tuple(sorted(tokens)))
        self._add(
            BoundExtra(extra, layer, tensor, () if order == tuple(range(len(order))) else order)
        )

    def _slice_of_vector(self, name: TensorName, tensor: TensorEntry) -> tuple[int, Slice]:
        """The slice of a vector's module: a linear layer that is no router, or for DoRA an
        embedding."""
        module = name.module
        if module in self._layout.refused:
            raise AdapterRejected(
                "unsupported_module",
                f"{module}: {self._layout.refused[module]}",
                pointer=tensor.name,
            )
        if find_expert_matrix(module, self._layout) is not None:
            raise AdapterRejected(
                "unsupported_feature",
                f"{tensor.name}: {refusal_message('expert_extras')}",
                pointer=tensor.name,
            )
        index = self._layout.slice_index.get(module)
        if index is None:
            raise AdapterRejected(
                "wrong_base", f"this base has no linear layer named {module}", pointer=tensor.name
            )
        layer = self._layout.slices[index]
        if index in self._layout.routers:
            raise AdapterRejected(
                "unsupported_feature",
                f"{tensor.name}: {refusal_message('router_extras')}",
                pointer=tensor.name,
            )
        is_embedding = layer.kind is SliceKind.EMBEDDING
        if layer.kind is not SliceKind.LINEAR and not (
            is_embedding and name.role is TensorRole.MAGNITUDE
        ):
            raise AdapterRejected(
                "unbound_tensor",
                f"{tensor.name} is not how PEFT names a tensor of this layer",
                pointer=tensor.name,
            )
        return index, layer

    def _check_announced(self, tensor: TensorEntry, is_announced: bool, field: str) -> None:
        if not is_announced:
            raise AdapterRejected(
                "config_contradiction",
                f"{tensor.name} has no effect with the configuration's {field}",
                pointer=tensor.name,
            )

    def _check_has_pair(self, index: int, tensor: TensorEntry) -> None:
        if index not in self._slices:
            raise AdapterRejected(
                "missing_pair", f"{tensor.name} has no lora_A and lora_B", pointer=tensor.name
            )

    def _add(self, part: BoundExtra) -> None:
        index, kind = part.extra.slice_index, part.extra.kind
        changes = {ExtraKind.MATRIX, ExtraKind.TOKEN_ROWS}
        held = {other for slice_index, other in self.auxiliary if slice_index == index}
        if kind in held or (kind in changes and (held & changes or index in self._slices)):
            raise AdapterRejected(
                "config_contradiction",
                f"{part.tensor.name} changes {part.layer.name}, which other tensors change",
                pointer=part.tensor.name,
            )
        self.auxiliary[index, kind] = part


def _vector(
    index: int, layer: Slice, kind: ExtraKind, tensor: TensorEntry, *, scale: float = 1.0
) -> BoundExtra:
    _check_shape(tensor, (layer.out_features,))
    return BoundExtra(Extra(index, kind, tensor.shape), layer, tensor, scale=scale)


def _check_shape(tensor: TensorEntry, expected: tuple[int, ...]) -> None:
    if tensor.shape != expected:
        raise AdapterRejected(
            "shape_mismatch",
            f"{tensor.name} is {list(tensor.shape)} where this base needs {list(expected)}",
            pointer=tensor.name,
        )
