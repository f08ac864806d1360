"""Multi-head latent attention that caches latents (DeepSeek-V2, arXiv 2405.04434, section 2.1).

The keys and values of all heads are products of one latent vector `c` per token, apart from a
rotary key `r` that the heads share: `k[h] = [W_UK[h] c, r]` and `v[h] = W_UV[h] c`. transformers
expands them for every token. Here the cache holds `[c, r]`, and the products move to the query and
to the result:

    q[h] · k[h] = (q_nope[h] W_UK[h]) · c + q_rope[h] · r      sum w v[h] = W_UV[h] (sum w c)

So a layer attends with one key/value head for all query heads, whose values are a part of its keys.

As in `admission`, no list of names decides: a layer is changed if its `expand_kv` computes the
first two products from `kv_b_proj`. It keeps its own code for everything else, and outside of a
step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.attention import MIN_ROWS, AttentionOptions
from ...kernels.linear import DenseLinear
from ...kernels.lora_batch import LoraBatch
from ..checkpoint.stored_weights import dense, weight_values
from ..errors import UnsupportedModel
from .forward import LATENT_NAME, ForwardContext, current_forward
from .linear import LinearChange, ProjectionSlice

EXPANSION = "kv_b_proj"
"""The linear layer that expands a latent: its outputs are each head's W_UK, then its W_UV."""
_NORM = "kv_a_layernorm"
"""The norm whose result is the latent."""
_SAMPLE_TOKENS = 3


class LatentSizes(NamedTuple):
    """The dimensions of a latent attention, whatever the number of its heads."""

    nope_dim: int
    """Of a head's query and key without position."""
    rope_dim: int
    value_dim: int
    rank: int
    """Of the latent."""

    @property
    def expanded_dims(self) -> list[int]:
        """Of what is expanded for a head."""
        return [self.nope_dim, self.value_dim]

    def by_head(self, expanded: Tensor, dim: int) -> Tensor:
        """The dimension of the expansion's outputs as two: `[heads, nope_dim + value_dim]`.

        A rank of a tensor-parallel group has some of the heads.
        """
        by_head: Tensor = expanded.unflatten(dim, (-1, sum(self.expanded_dims)))
        return by_head


def replace_latents(model: nn.Module, *, has_values: bool = True) -> list[str]:
    """Let the latent attentions of a model cache latents in the steps of a served model.

    For a model as transformers loads it; one without values is taken by the parts of its attention
    alone. Returns the paths of their `kv_b_proj`, whose weight must stay dense; other attentions
    are unchanged.
    """
    paths = []
    for path, module in model.named_modules():
        sizes = _sizes(module)
        if sizes is not None and (not has_values or _is_served(module, sizes)):
            _replace(module, sizes)
            paths.append(f"{path}.{EXPANSION}")
    return paths


def _replace(module: Any, sizes: LatentSizes) -> None:
    own = module.expand_kv

    def expand_kv(latent: Tensor, rope_key: Tensor) -> tuple[Tensor, Tensor]:
        if current_forward.get() is None:
            expanded: tuple[Tensor, Tensor] = own(latent, rope_key)
            return expanded
        return torch.cat((latent, rope_key), dim=-1), latent

    module.__dict__["expand_kv"] = expand_kv
    module.__dict__[LATENT_NAME] = AbsorbedAttention(module, sizes)


def _sizes(module: Any) -> LatentSizes | None:
    """None unless the module has the parts of a latent attention."""
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    values = [getattr(module, name, None) for name in names]
    expansion, norm = getattr(module, EXPANSION, None), getattr(module, _NORM, None)
    if not (isinstance(expansion, nn.Linear) and expansion.bias is None) or norm is None:
        return None
    nope_dim, rope_dim, value_dim, rank = (v if isinstance(v, int) else 0 for v in values)
    if not (nope_dim and rope_dim and value_dim and rank and hasattr(module, "expand_kv")):
        return None
    if expansion.out_features % (nope_dim + value_dim) or expansion.in_features != rank:
        return None
    return LatentSizes(nope_dim, rope_dim, value_dim, rank)


def _is_served(module: Any, sizes: LatentSizes) -> bool:
    """Whether the module expands a sample exactly as the absorbed products assume."""
    weight = getattr(module, _NORM).weight
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(
        1, 1, _SAMPLE_TOKENS, sizes.rank + sizes.rope_dim, generator=generator, dtype=torch.float32
    )
    latent, rope_key = sample.to(weight.device, weight.dtype).split(
        [sizes.rank, sizes.rope_dim], dim=-1
    )
    with torch.inference_mode():
        try:
            keys, values = module.expand_kv(latent, rope_key)
        except Exception:  # arguments of this kind may mean nothing to it
            return False
        expanded = getattr(module, EXPANSION)(latent)
    heads = sizes.by_head(expanded[0], dim=-1).transpose(1, 2)
    nope_keys, expected_values = heads.split(sizes.expanded_dims, dim=-1)
    rope_keys = rope_key.expand(-1, heads.shape[1], -1, -1)
    expected_keys = torch.cat((nope_keys, rope_keys), dim=-1)
    return torch.equal(keys, expected_keys) and torch.equal(values, expected_values)


class AbsorbedAttention:
    """The products of one layer that are absorbed into queries and results."""

    def __init__(self, module: nn.Module, sizes: LatentSizes) -> None:
        self._module = module
        self._sizes = sizes

    def attend(
        self,
        step: ForwardContext,
        layer_index: int,
        q: Tensor,
        k: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """See `forward.LatentAttention`.

        Raises UnsupportedModel for options that depend on the size of the scores: a bias of an
        adapter adds the same to all scores of a query, which is left out.
        """
        if options.softcap is not None or options.sinks is not None:
            raise UnsupportedModel("latent attention with softcap or sinks is not served")
        key_weight, value_weight = self._weights(q)
        changes = list(self._changes(step.lora))
        nope_q, rope_q = q.split([self._sizes.nope_dim, self._sizes.rope_dim], dim=-1)
        latent_q = _by_head(nope_q, key_weight)
        for rows, change in changes:
            change.change_queries(latent_q[rows], nope_q[rows], key_weight)
        latent_q = torch.cat((latent_q, rope_q), dim=-1)
        sums = step.attend(layer_index, latent_q, k, self._sizes.rank, options)
        out = _by_head(sums, value_weight.transpose(1, 2))
        for rows, change in changes:
            change.change_results(out[rows], sums[rows])
        return out

    def _weights(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """W_UK `[heads, nope_dim, rank]` and W_UV `[heads, value_dim, rank]`."""
        expansion = getattr(self._module, EXPANSION)
        if isinstance(expansion, ProjectionSlice):
            linear = expansion.fused.linear
            assert isinstance(linear, DenseLinear)
            weight = linear.weight
        else:  # while the model is loaded
            weight = dense(weight_values(expansion), dtype=like.dtype, device=like.device)
        by_head = self._sizes.by_head(weight, dim=0)
        key_weight, value_weight = by_head.split(self._sizes.expanded_dims, dim=1)
        return key_weight, value_weight

    def _changes(self, lora: LoraBatch | None) -> Iterator[tuple[slice, _Change]]:
        """The rows of the step whose adapters change the expansion, and how."""
        expansion = getattr(self._module, EXPANSION)
        adapters = expansion.fused.adapters if isinstance(expansion, ProjectionSlice) else None
        if lora is None or adapters is None:
            return
        found = {row: adapters.change_of(row) for row in lora.adapter_rows}
        if not any(found.values()):
            return
        for segment in lora.adapter_segments:
            if (change := found[segment.row]) is not None:
                yield slice(segment.start, segment.end), _Change.of(change, self._sizes)


class _Change(NamedTuple):
    """How an adapter changes the expansion, by head: each output is multiplied by 1 + its factor,
    then A, B and the bias are added."""

    a: Tensor | None
    """`[adapter's rank, rank]`; None: neither A nor B."""
    key_b: Tensor | None
    """`[adapter's rank, heads, nope_dim]`"""
    value_b: Tensor | None
    """`[adapter's rank, heads, value_dim]`"""
    key_factor: Tensor | None
    """`[heads, nope_dim]`"""
    value_factor: Tensor | None
    """`[heads, value_dim]`"""
    value_bias: Tensor | None
    """`[heads, value_dim]`. That of the keys adds the same to all scores of a query, and so
    nothing to their softmax."""

    @classmethod
    def of(cls, change: LinearChange, sizes: LatentSizes) -> _Change:
        def by_head(outputs: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
            if outputs is None:
                return None, None
            parts = sizes.by_head(outputs, dim=-1).split(sizes.expanded_dims, dim=-1)
            return parts[0], parts[1]

        key_b, value_b = by_head(change.b)
        key_factor, value_factor = by_head(change.magnitude)
        _, value_bias = by_head(change.bias)
        return cls(change.a, key_b, value_b, key_factor, value_factor, value_bias)

    def change_queries(self, latent_q: Tensor, nope_q: Tensor, key_weight: Tensor) -> None:
        """Change `latent_q [n, heads, rank]`, the base's for `nope_q [n, heads, nope_dim]`, in
        place; rows of this adapter."""
        if self.key_factor is not None:
            latent_q += _by_head(nope_q * self.key_factor, key_weight)
        if self.a is not None and self.key_b is not None:
            latent_q += _by_head(nope_q, self.key_b.permute(1, 2, 0)) @ self.a

    def change_results(self, out: Tensor, sums: Tensor) -> None:
        """Change `out [n, heads, value_dim]`, the base's for `sums [n, heads, rank]` of latents, in
        place; rows of this adapter."""
        if self.value_factor is not None:
            out.addcmul_(out, self.value_factor)
        if self.value_bias is not None:
            out += self.value_bias
        if self.a is not None and self.value_b is not None:
            out += _by_head(sums @ self.a.T, self.value_b.transpose(0, 1))


def _by_head(x: Tensor, weights: Tensor) -> Tensor:
    """`x [n, heads, k]` times `weights [heads, k, m]`: `[n, heads, m]`."""
    num_rows = len(x)
    if x.dtype is torch.float32 and num_rows < MIN_ROWS:  # for the bits, see MIN_ROWS
        x = torch.cat((x, x[-1:].expand(MIN_ROWS - num_rows, -1, -1)))
    return torch.bmm(x.transpose(0, 1), weights).transpose(0, 1)[:num_rows]
