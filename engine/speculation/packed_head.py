"""An EAGLE head as it is served: its weights in the base's form, in few calls for each pass.

`EagleHead` defines what it computes. A pass of one pair multiplies little, so that on a small base
the calls themselves are most of its time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.attention import AttentionBatch, AttentionOptions, paged_attention
from ...kernels.draft_layer_cpu import DraftLayerOnCpu, DraftNorms, serves_draft_layer
from ...kernels.gated_activation import Activation, gated_activation
from ...kernels.kv_pages import write_pages
from ...kernels.linear import DenseLinear, Linear
from ...kernels.linear_packing import pack_linear
from ...kernels.rms_norm import NormForm, rms_norm
from ...kernels.rotary import rotary
from ..kv.groups import LayerKvShape
from ..model.load_quantization import LoadQuantization
from .draft_head import Pages, Rotation
from .eagle_head import EagleHead

UNDRAFTED = -1e9
"""The logit of a token that the head cannot draft: finite, as samplers require."""


class PackedHead:
    """The layer of an EagleHead, whose sibling projections are one."""

    def __init__(
        self, head: EagleHead, quantization: LoadQuantization, *, fc: Linear | None = None
    ) -> None:
        """`head`: its weights are copied one after another. `quantization`: how the base's linear
        layers are quantized while they are loaded. `fc`: of another head with the same features,
        which gives them to this one."""
        self.config = config = head.config
        self.token_ids = head.token_ids
        self.fc = _packed([head.fc.weight], quantization) if fc is None else fc
        self.linears = [_packed(weights, quantization) for weights in head.sibling_weights]
        self.norms = DraftNorms(*(weight.detach().clone() for weight in _norms(head)))
        self._norms_before_residual = head.norms_before_residual
        self._rotary = head.midlayer.self_attn.rotary
        self._options = AttentionOptions(scale=config.head_dim**-0.5)
        self._on_cpu = self._as_one_call()

    @torch.inference_mode()
    def fill(self, head: EagleHead) -> None:
        """Take over the weights of another head of the same form, all but the features' projection.
        This one is not quantized.

        On CUDA into the memory that is there, which captured passes read. No pass may run
        meanwhile, and none after an error, until it is filled again.
        """
        for place, weights in enumerate(head.sibling_weights):
            linear = self.linears[place]
            if isinstance(linear, DenseLinear):
                linear.refill(weights)
            else:  # a layout of the CPU, where no pass is captured
                self.linears[place] = _packed(weights, LoadQuantization())
        for own, weight in zip(self.norms, _norms(head), strict=True):
            own.copy_(weight)
        self._on_cpu = self._as_one_call()

    @property
    def weight_bytes(self) -> int:
        linears = sum(linear.weight_bytes for linear in (self.fc, *self.linears))
        return linears + sum(norm.nbytes for norm in self.norms)

    @property
    def kv_shape(self) -> LayerKvShape:
        config = self.config
        return LayerKvShape(config.num_key_value_heads, config.head_dim, config.head_dim)

    @property
    def feature_sizes(self) -> tuple[int, int]:
        """See `DraftHead`."""
        return self.fc.in_features, self.fc.out_features

    @torch.inference_mode()
    def erase(self) -> None:
        """Zero the weights of a head that is not quantized, all but the features' projection. It
        must not run until it is filled again."""
        for linear in self.linears:
            linear.erase()
        for norm in self.norms:
            norm.zero_()

    def rotation(self, positions: Tensor) -> Rotation:
        """For `positions [num_pairs]`, int64."""
        cos, sin = self._rotary(self.norms.output, positions[None])
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
        is_captured: bool = False,  # its kernels are those of any pass
    ) -> tuple[Tensor, Tensor]:
        """Compute pairs of `embedded` tokens and `features [num_pairs, hidden_size]`, and store
        their keys and values.

        Returns the hidden states of the pairs `kept`, int64, and fp32 logits of what follows them:
        `[len(kept), draft_vocab_size]`.
        """
        if self._on_cpu is not None:
            computed = self._on_cpu.run(
                embedded, features, rotation, kept, pages, batch, self._options
            )
            if computed is not None:
                return computed
        return self.run_plainly(embedded, features, rotation, kept, pages, batch)

    def run_plainly(
        self,
        embedded: Tensor,
        features: Tensor,
        rotation: Rotation,
        kept: Tensor,
        pages: Pages,
        batch: AttentionBatch,
    ) -> tuple[Tensor, Tensor]:
        """The same, an operation at a time."""
        qkv, o, gate_up, down, output_head = self.linears
        normed = self._normed(features, self.norms.features)
        pairs = torch.cat([self._normed(embedded, self.norms.embedding), normed], dim=-1)
        q, k, v = self._rotated(qkv(pairs), rotation)
        write_pages(*pages, batch.slot_mapping, k, v)
        x = normed if self._norms_before_residual else features
        x = x + o(paged_attention(q, *pages, batch, self._options).flatten(1))
        x = x[kept]
        gate, up = gate_up(self._normed(x, self.norms.mlp)).chunk(2, dim=-1)
        states = x + down(gated_activation(gate, up, Activation.SILU))
        return states, output_head(self._normed(states, self.norms.output)).float()

    def whole_logits(self, draft_logits: Tensor) -> Tensor:
        """fp32 `[num_pairs, vocab_size]`."""
        if draft_logits.shape[-1] == self.config.vocab_size:
            return draft_logits
        size = len(draft_logits), self.config.vocab_size
        return draft_logits.new_full(size, UNDRAFTED).index_copy_(1, self.token_ids, draft_logits)

    def _as_one_call(self) -> DraftLayerOnCpu | None:
        """The layer as the library computes it; None if it does not."""
        if not serves_draft_layer(self.linears, self.norms):
            return None
        return DraftLayerOnCpu(
            self.linears,
            self.norms,
            num_heads=self.config.num_attention_heads,
            head_dim=self.config.head_dim,
            eps=self.config.rms_norm_eps,
            norms_before_residual=self._norms_before_residual,
        )

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.config.rms_norm_eps, NormForm.ROUNDED_FIRST)

    def _rotated(self, qkv: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        heads = qkv.view(len(qkv), -1, config.head_dim)
        q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        cos, sin = rotation
        q, k = rotary(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
        return q[0].transpose(0, 1), k[0].transpose(0, 1), v


def _norms(head: EagleHead) -> DraftNorms:
    layer = head.midlayer
    norms = layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm, head.norm
    return DraftNorms(*(norm.weight for norm in norms))


def _packed(weights: Sequence[Tensor], quantization: LoadQuantization) -> Linear:
    """The layer of these weights, one below another."""
    weight = torch.cat(list(weights))
    # The layers that are excluded are the base's.
    linear = pack_linear(quantization.apply("", weight), dtype=weight.dtype)
    if not isinstance(linear, DenseLinear):  # which keeps it
        weight.zero_()  # freed memory keeps its content
    return linear
