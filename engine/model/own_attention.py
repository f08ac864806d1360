"""Families that compute attention in their own modules, not through transformers' interface.

In a served step, such a module's projections are followed by Loraplex's attention, or by a
recurrence. Everything else, such as a dense reference, gets the module's own code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.attention_window import AttentionWindow
from ...kernels.recurrence import Recurrence
from ..errors import UnsupportedModel
from .attention_windows import LayerProbe
from .forward import attention, current_forward

Forward = Callable[..., tuple[Tensor, None]]


def replace_own_attention(model: nn.Module) -> None:
    """Let modules of the families below attend within served steps.

    Raises UnsupportedModel for settings that have no exact equivalent.
    """
    for module in model.modules():
        if form := _FORMS.get(type(module).__name__):
            module.__dict__["forward"] = _served(module, form(module))


def _served(module: nn.Module, forward: Forward) -> Callable[..., Any]:
    own: Callable[..., Any] = type(module).forward.__get__(module)

    def served(*args: Any, **others: Any) -> Any:
        return (own if current_forward.get() is None else forward)(*args, **others)

    return served


def _attend(
    module: Any,
    qkv: tuple[Tensor, Tensor, Tensor],
    *,
    scaling: float,
    window: AttentionWindow | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """`[1, num_tokens, heads · dim]` for queries, keys and values `[1, num_tokens, heads, dim]`."""
    probe = current_forward.get()
    if isinstance(probe, LayerProbe):
        probe.window = window
    q, k, v = (part.transpose(1, 2) for part in qkv)
    out, _ = attention(module, q, k, v, None, scaling=scaling, slopes=slopes)
    return out.flatten(2)


def _bloom(module: Any) -> Forward:
    slopes = _Slopes(lambda device: _family(module)._get_alibi_slopes(module.num_heads, device))

    def forward(hidden_states: Tensor, residual: Tensor, **_others: Any) -> tuple[Tensor, None]:
        fused = module.query_key_value(hidden_states)
        fused = fused.view(*fused.shape[:2], module.num_heads, 3, module.head_dim)
        out = _attend(
            module,
            fused.unbind(3),
            scaling=module.inv_norm_factor,
            slopes=slopes.on(hidden_states.device),
        )
        return module.dense(out) + residual, None

    return forward


def _falcon(module: Any) -> Forward:
    if module.config.alibi:
        raise UnsupportedModel("falcon rounds the biases of its ALiBi to bfloat16")

    def forward(
        hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_others: Any
    ) -> tuple[Tensor, None]:
        fused = module.query_key_value(hidden_states)
        num_kv_heads = module.num_kv_heads
        # Each key/value head follows the query heads that share it.
        fused = fused.view(*fused.shape[:2], num_kv_heads, -1, module.head_dim)
        q, k, v = fused[..., :-2, :].flatten(2, 3), fused[..., -2, :], fused[..., -1, :]
        cos, sin = position_embeddings
        q, k = _family(module).apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        qkv = q.transpose(1, 2), k.transpose(1, 2), v
        return module.dense(_attend(module, qkv, scaling=module.inv_norm_factor)), None

    return forward


def _gpt_neo(module: Any) -> Forward:
    module.layer_idx = module.layer_id
    is_local = module.attention_type == "local"
    window = AttentionWindow(module.config.window_size) if is_local else None

    def forward(hidden_states: Tensor, **_others: Any) -> tuple[Tensor, None]:
        qkv = _projected(module, hidden_states)
        return module.out_proj(_attend(module, qkv, scaling=1.0, window=window)), None

    return forward


def _minimax(module: Any) -> Forward:
    """Lightning attention: a state per head that decays by one factor."""

    def forward(hidden_states: Tensor, *_args: Any, **_others: Any) -> tuple[Tensor, None]:
        step = current_forward.get()
        assert step is not None, "the model's own forward serves elsewhere"
        assert step.states is not None, "the probe has found the layer"
        fused = module.act_fn(module.qkv_proj(hidden_states))[0]
        fused = fused.view(len(fused), module.num_attention_heads, 3, module.head_dim)
        q, k, v = (part.contiguous() for part in fused.unbind(2))
        log_decay = -module.slope_rate.float().flatten().expand(q.shape[:2])
        step.states.enter(module.layer_idx, module)
        out = step.states.recur(
            Recurrence(
                q=q,
                k=k,
                v=v,
                log_decay=log_decay.contiguous(),
                beta=torch.ones_like(log_decay),
                out_dtype=hidden_states.dtype,
            )
        )
        out = module.norm(out.view(1, len(out), -1))
        return module.out_proj(module.output_gate(hidden_states).sigmoid() * out), None

    return forward


def _mpt(module: Any) -> Forward:
    _keep_masks(_family(module))
    slopes = _Slopes(lambda device: _mpt_slopes(module, device))

    def forward(hidden_states: Tensor, **_others: Any) -> tuple[Tensor, None]:
        fused = module.Wqkv(hidden_states)
        if module.clip_qkv:
            fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        fused = fused.view(*fused.shape[:2], 3, module.n_heads, module.head_dim)
        out = _attend(
            module,
            fused.unbind(2),
            scaling=module.softmax_scale,
            slopes=slopes.on(hidden_states.device),
        )
        return module.out_proj(out), None

    return forward


def _mpt_slopes(module: Any, device: torch.device) -> Tensor:
    """The difference between the biases of the last two positions."""
    biases = _family(module).build_mpt_alibi_tensor(module.n_heads, 2, device=device)
    slopes: Tensor = (biases[..., 1] - biases[..., 0]).flatten()
    return slopes


def _xglm(module: Any) -> Forward:
    def forward(hidden_states: Tensor, **_others: Any) -> tuple[Tensor, None]:
        qkv = _projected(module, hidden_states)
        return module.out_proj(_attend(module, qkv, scaling=module.scaling)), None

    return forward


def _projected(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What three separate projections make of the hidden states, by head."""
    size = (*hidden_states.shape[:2], -1, module.head_dim)
    q, k, v = module.q_proj, module.k_proj, module.v_proj
    return q(hidden_states).view(size), k(hidden_states).view(size), v(hidden_states).view(size)


_FORMS: dict[str, Callable[[Any], Forward]] = {
    "BloomAttention": _bloom,
    "FalconAttention": _falcon,
    "GPTNeoSelfAttention": _gpt_neo,
    "MiniMaxLightningAttention": _minimax,
    "MptAttention": _mpt,
    "XGLMAttention": _xglm,
}
"""By the names of transformers' classes."""


class _Slopes:
    """ALiBi's slopes of one layer, made once for each device."""

    def __init__(self, compute: Callable[[torch.device], Tensor]) -> None:
        self._compute = compute
        self._on: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """fp32 `[num_heads]`."""
        if device not in self._on:
            self._on[device] = self._compute(device).float().contiguous()
        return self._on[device]


def _family(module: nn.Module) -> Any:
    """The module of transformers that defines this one's class."""
    return sys.modules[type(module).__module__]


def _keep_masks(family: Any) -> None:
    """Let a family that converts its mask have one in served steps too, where none is built."""
    if not isinstance(family.create_causal_mask, _KeptMask):
        family.create_causal_mask = _KeptMask(family.create_causal_mask)


class _KeptMask:
    """Stands for a family's function that creates its mask: it returns one in every case."""

    def __init__(self, own: Callable[..., Tensor | None]) -> None:
        self._own = own

    def __call__(self, *args: Any, **others: Any) -> Tensor:
        mask = self._own(*args, **others)
        return torch.ones(1, 1, 1, 1, dtype=torch.bool) if mask is None else mask
