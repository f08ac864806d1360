"""transformers' functions for recurrences: their arguments as the kernels take them.

Each function here has the parameters of one of transformers' that matter in a served step. All
tokens of the step are one sequence of a batch of one. What depends on single tokens is computed as
in transformers, in the same dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from ...kernels.recurrence import Recurrence
from ...kernels.selective_scan import SelectiveScan

StateChange = Recurrence | SelectiveScan


class ServedRecurrence(NamedTuple):
    """What serves one of transformers' functions."""

    read: Callable[..., StateChange]
    """Of the function's arguments."""
    result: Callable[[Tensor], Any]
    """What the function returns, of the outputs `[num_rows, ...]`."""


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> Recurrence:
    """`query, key [1, num_tokens, num_key_heads, key_dim]`, `value [1, num_tokens, num_heads,
    value_dim]`, `g, beta [1, num_tokens, num_heads]`; Kimi's `g` has the key's channels as well."""
    return Recurrence(
        q=query[0],
        k=key[0],
        v=value[0],
        log_decay=g[0].float(),
        beta=beta[0].float(),
        is_delta_rule=True,
        is_normalized=use_qk_l2norm_in_kernel,
        scale=query.shape[-1] ** -0.5,
        out_dtype=query.dtype,
    )


def _mamba2(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Recurrence:
    """`hidden_states [1, num_tokens, num_heads, head_dim]`, `dt [1, num_tokens, num_heads]`,
    `A, D, dt_bias [num_heads]`, `B, C [1, num_tokens, num_groups, state_size]`."""
    steps = _steps(dt, dt_bias, softplus=dt_softplus).clamp(*dt_limit)[0].float()
    return Recurrence(
        q=C[0],
        k=B[0],
        v=hidden_states[0],
        log_decay=A.float() * steps,
        beta=steps,
        skip=None if D is None else D.float(),
    )


def _mamba(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> SelectiveScan:
    """`hidden_states, dt, z [1, num_channels, num_tokens]`, `A [num_channels, size]`, `B, C [1,
    size, num_tokens]`, `D, delta_bias [num_channels]`."""
    return SelectiveScan(
        x=hidden_states[0].T,
        b=B[0].T,
        c=C[0].T,
        steps=_steps(dt[0].T, delta_bias, softplus=delta_softplus).float(),
        rates=A.float(),
        skip=None if D is None else D.float(),
        gate=None if z is None else z[0].T,
    )


def _steps(dt: Tensor, bias: Tensor | None, *, softplus: bool) -> Tensor:
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


_DELTA_RULE = ServedRecurrence(_delta_rule, lambda out: (out[None], None))
RECURRENCES: Mapping[str, ServedRecurrence] = {
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": ServedRecurrence(_mamba2, lambda out: out[None]),
    "mamba_selective_scan": ServedRecurrence(_mamba, lambda out: out.T[None]),
}
"""By their names in the modules that define the families."""
