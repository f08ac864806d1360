"""An EAGLE-3 head (Li et al. 2025): one decoder layer that continues the base's hidden states.

It computes one hidden state per pair of a token and what is known of the token before it: the
*features* of that one, projected from three of the base's layers, or for draft tokens the head's
own hidden state. Each hidden state gives the logits of the token after the pair's. The layer is
Llama's, but its attention reads the token's embedding beside the features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From rotated queries `[batch, num_tokens, heads, head_dim]` and the keys and values `[batch,
num_tokens, kv_heads, head_dim]` of the same pairs to the result for these queries."""


class EagleHead(nn.Module):
    """The parameters have the names of the original implementation."""

    d2t: Tensor
    """int64 `[draft_vocab_size]`: what to add to the index of a draft token for its token id."""

    def __init__(
        self,
        config: LlamaConfig,
        *,
        feature_size: int,
        draft_vocab_size: int,
        norm_before_residual: bool = False,
    ) -> None:
        """`feature_size`: of the three hidden states side by side. `norm_before_residual`: the
        residual stream begins with the normed features."""
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.fc = nn.Linear(feature_size, size, bias=False)
        self.midlayer = _Layer(config)
        self.norm = nn.RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))
        self.norms_before_residual = norm_before_residual

    @property
    def sibling_weights(self) -> tuple[tuple[Tensor, ...], ...]:
        """Of the layer and the output head; those that read the same input are together."""
        attention, mlp = self.midlayer.self_attn, self.midlayer.mlp
        return (
            (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight),
            (attention.o_proj.weight,),
            (mlp.gate_proj.weight, mlp.up_proj.weight),
            (mlp.down_proj.weight,),
            (self.lm_head.weight,),
        )

    @property
    def token_ids(self) -> Tensor:
        """int64 `[draft_vocab_size]`: the tokens that it drafts."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def forward(
        self, embedded: Tensor, features: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Hidden states `[batch, num_tokens, hidden_size]` of pairs: `embedded` tokens and
        `features`, of the same shape, at `positions [batch, num_tokens]`."""
        layer = self.midlayer
        normed = layer.hidden_norm(features)
        pairs = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
        x = normed if self.norms_before_residual else features
        x = x + layer.self_attn(pairs, positions, attend)
        output: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
        return output

    def draft_logits(self, hidden_states: Tensor) -> Tensor:
        """fp32 `[..., draft_vocab_size]`."""
        logits: Tensor = self.lm_head(self.norm(hidden_states))
        return logits.float()


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = _Attention(config)
        self.mlp = LlamaMLP(config)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, dim = config.hidden_size, config.head_dim
        self.head_dim = dim
        self.q_proj = nn.Linear(2 * size, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(2 * size, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(2 * size, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, size, bias=False)
        with torch.device("cpu"):  # its frequencies are no weights, which a head on meta awaits
            self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, pairs: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        q, k, v = (
            projection(pairs).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = self.rotary(pairs, positions)
        q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
        output: Tensor = self.o_proj(attend(q, k, v).flatten(-2))
        return output


def head_config(config: Mapping[str, Any]) -> LlamaConfig:
    """The layer's sizes and rotary embedding, as a checkpoint's `config.json` states them. Raises
    ValueError or TypeError if they are none."""
    return LlamaConfig.from_dict(dict(config))


def empty_head(
    config: LlamaConfig, *, feature_size: int, draft_vocab_size: int, norm_before_residual: bool
) -> EagleHead:
    """A head whose parameters have no storage yet."""
    with torch.device("meta"):
        return EagleHead(
            config,
            feature_size=feature_size,
            draft_vocab_size=draft_vocab_size,
            norm_before_residual=norm_before_residual,
        )
