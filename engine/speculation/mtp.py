"""The head that a base ships for this purpose: multi-token prediction (DeepSeek-AI 2024).

It is one decoder layer of the base's own class in the base's files. Where its embedding and output
head are copies of the base's, it shares those. It reads a token's embedding and the base's last
hidden state, after the final norm, of the token before. Further draft tokens are drafted from its
own hidden state, also after its norm. `EagleProposer` drafts with it, as with an EAGLE head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...kernels.attention import AttentionBatch, AttentionOptions, paged_attention
from ...kernels.kv_pages import write_pages
from ...kernels.linear import Linear
from ...kernels.linear_packing import pack_linear
from ...kernels.quantized_weight import QuantizedWeight
from ...kernels.rms_norm import NormForm, rms_norm
from ..checkpoint.files import locate_base
from ..checkpoint.next_token_layer import INPUT_NAMES, EndWeights, InputWeights, NextTokenLayer
from ..checkpoint.stored_weights import AnyStoredWeight, StoredWeight, Values, dense, stored_weights
from ..config import EngineConfig, KvDtype, Quantization, source_of
from ..errors import InvalidParameter, ShapesDiffer, UnsupportedModel
from ..model.base_model import BaseModel, weight_format
from ..model.forward import current_forward
from ..model.layer_features import LayerFeatures
from ..model.load_quantization import LoadQuantization
from ..model.whole_base import load_base_model
from .draft_head import Pages, Rotation
from .eagle import LoadedEagle

NAME = "mtp"


class HeadInput:
    """Makes the layer's input of pairs."""

    def __init__(self, weights: InputWeights[Tensor], projection: Linear, eps: float) -> None:
        self._embedding_norm, self._state_norm = weights.embedding_norm, weights.state_norm
        self._projection = projection
        self._eps = eps

    @property
    def weight_bytes(self) -> int:
        norms = self._embedding_norm.nbytes + self._state_norm.nbytes
        return self._projection.weight_bytes + norms

    def of(self, embedded: Tensor, features: Tensor) -> Tensor:
        """`[num_pairs, hidden_size]`, as its arguments."""
        normed = (
            self._normed(embedded, self._embedding_norm),
            self._normed(features, self._state_norm),
        )
        projected: Tensor = self._projection(torch.cat(normed, dim=-1))
        return projected

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._eps, NormForm.ROUNDED_FIRST)


@dataclass(frozen=True, slots=True)
class HeadForward:
    """A forward pass of the layer over its own pages, for `current_forward`."""

    pages: Pages
    batch: AttentionBatch
    lora: None = None
    is_captured: bool = False
    states: None = None
    rotary_rows: None = None

    def attend(
        self, _layer_index: int, q: Tensor, k: Tensor, v: Tensor | int, options: AttentionOptions
    ) -> Tensor:
        """See `ForwardContext.attend`."""
        write_pages(*self.pages, self.batch.slot_mapping, k, None if isinstance(v, int) else v)
        return paged_attention(q, *self.pages, self.batch, options)


class MtpHead:
    """A `DraftHead` of one layer of the base's class."""

    def __init__(
        self,
        layer: BaseModel,
        head_input: HeadInput,
        output_head: nn.Module | None,
        base: BaseModel,
    ) -> None:
        """`layer`: the model of the layer alone, whose embedding is not kept. `output_head`: its
        own; None: the base's."""
        decoder = layer.model.base_model
        self._layer: nn.Module = decoder.layers[0]
        self._norm: nn.Module = decoder.norm
        self._rotary: nn.Module = decoder.rotary_emb
        self._input = head_input
        self._adapted = [
            *layer.projections,
            *(p for moe in layer.moe_layers for p in moe.projections),
        ]
        self._output: nn.Module = output_head or base.model.get_output_embeddings()
        (self.kv_shape,) = layer.kv_shapes
        self.token_ids = torch.arange(base.vocab_size, device=base.device)
        self._like = torch.empty(0, dtype=base.dtype, device=base.device)
        linears = sum(fused.linear.weight_bytes for fused in layer.projections)
        experts = sum(packed.weight_bytes for packed in layer.packed_experts)
        rest = sum(p.nbytes for part in (self._layer, self._norm) for p in part.parameters())
        head_bytes = 0 if output_head is None else layer.packed_ends.served_head.num_bytes
        self.weight_bytes = linears + experts + rest + head_input.weight_bytes + head_bytes
        self.feature_sizes = base.embedding_size, base.embedding_size

    def rotation(self, positions: Tensor) -> Rotation:
        """See `DraftHead`."""
        cos, sin = self._rotary(self._like, positions[None])
        return Rotation(cos[0], sin[0])

    def run(
        self,
        embedded: Tensor,
        features: Tensor,
        rotation: Rotation,
        kept: Tensor,
        pages: Pages,
        batch: AttentionBatch,
        *,
        is_captured: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """See `DraftHead`."""
        token = current_forward.set(HeadForward(pages, batch, is_captured=is_captured))
        try:
            x = self._layer(
                self._input.of(embedded, features)[None],
                attention_mask=None,
                position_embeddings=(rotation.cos[None], rotation.sin[None]),
            )
        except BaseException:
            for part in self._adapted:
                part.forget_step()
            raise
        finally:
            current_forward.reset(token)
        states = self._norm(x[:, kept])
        return states[0], self._output(states)[0].float()

    def whole_logits(self, draft_logits: Tensor) -> Tensor:
        """It drafts every token."""
        return draft_logits


def load_mtp(config: EngineConfig, base: BaseModel) -> LoadedEagle | None:
    """The head of `mtp` or `mtp_tree`, loaded before the memory plan, which includes it; None if
    the configuration has none. Raises InvalidParameter if the base ships none that is served."""
    name = next((each for each in config.proposers if source_of(each) == NAME), None)
    if name is None:
        return None
    try:
        head, embedding = _load_head(config, base)
        final_norm = base.model.base_model.norm
        features = LayerFeatures(
            base.model, base.config, [base.config.num_hidden_layers], final_norm
        )
        features.check(base.model, base.config)
    except UnsupportedModel as exc:
        raise InvalidParameter("speculation", f"{name}: {exc}") from exc
    return LoadedEagle(head, embedding, features, base, name)


def _load_head(config: EngineConfig, base: BaseModel) -> tuple[MtpHead, nn.Embedding | None]:
    """The head and its own embedding; None: that is the base's."""
    place = NextTokenLayer.of(base.config)
    stored = stored_weights(locate_base(config.model))
    inputs = place.inputs(stored)
    _check_shapes(inputs, base.embedding_size)
    layer = load_base_model(
        replace(
            config,
            quantization_exclude=(),  # these are the base's layers
            embedding_quantization=Quantization.NONE,  # what is shared is the base's
            kv_dtype=KvDtype.AUTO,
        ),
        base_id=base.layout.base_id,
        layer=place,
    )
    quantization = LoadQuantization(
        weight_format(config.quantization), config.quantization_group_size
    )
    projection = quantization.apply("", _placed(inputs.projection, base))
    head_input = HeadInput(
        InputWeights(
            *(dense(each.read(), dtype=base.dtype, device=base.device) for each in inputs)
        ),
        pack_linear(projection, dtype=base.dtype),
        base.config.rms_norm_eps,
    )
    table, output = place.ends(stored)
    embedding = None if _is_copy(table) else layer.model.get_input_embeddings()
    output_head = None if _is_copy(output) else layer.model.get_output_embeddings()
    return MtpHead(layer, head_input, output_head, base), embedding


def _is_copy(end: EndWeights[AnyStoredWeight]) -> bool:
    """Whether the base's can serve in its place."""
    if end.own is end.base:
        return True
    own, base = end
    if not isinstance(own, StoredWeight) or not isinstance(base, StoredWeight):
        return False
    return torch.equal(own.read(), base.read())


def _check_shapes(inputs: InputWeights[AnyStoredWeight], size: int) -> None:
    """Raises ShapesDiffer."""
    expected = InputWeights((size,), (size,), (size, 2 * size))
    for name, weight, shape in zip(INPUT_NAMES, inputs, expected, strict=True):
        if tuple(weight.shape) != shape:
            raise ShapesDiffer(f"{name} is {list(weight.shape)}, not {list(shape)}")


def _placed(stored: AnyStoredWeight, base: BaseModel) -> Values:
    """The weight's values on the base's device, in its dtype unless they are quantized."""
    values = stored.read()
    if isinstance(values, QuantizedWeight):
        return values.to(base.device)
    return values.to(base.device, base.dtype)
