"""Classes of transformers' modules in a form that all other code knows.

Some classes with stacked experts lack transformers' experts interface, and some linear layers have
classes of their own.

Llama 4 multiplies what its experts are given by their scores, not what they return, and gives every
expert all tokens, most of them zeros. Here its experts get each token with the experts that were
chosen for it, as those of other families do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class WeightedInputExperts(nn.Module):
    """Llama 4's experts, with the attributes and the arguments of the interface."""

    has_gate, has_bias, is_transposed, is_concatenated = True, False, True, True
    weights_inputs = True
    """A token's weights multiply what its experts are given, not what they return."""
    is_turned = True
    """PEFT sees transformers' own class, which does not say that it is transposed."""
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    act_fn: nn.Module

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`[num_tokens, hidden]`: each token through the experts chosen for it, added."""
        out = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            rows, choices = (top_k_index == expert).nonzero(as_tuple=True)
            x = hidden_states[rows] * top_k_weights[rows, choices, None]
            y = self._apply_gate(x @ self.gate_up_proj[expert]) @ self.down_proj[expert]
            out.index_add_(0, rows, y)
        return out

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        applied: Tensor = up * self.act_fn(gate)
        return applied


class WeightedInputMoe(nn.Module):
    """Llama 4's MoE layer, around such experts."""

    router: nn.Module
    experts: nn.Module
    shared_expert: nn.Module
    top_k: int

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """`[num_tokens, hidden]` and the router's logits `[num_tokens, experts]`."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = self.router(x)
        weights, chosen = scores.topk(self.top_k, dim=-1)  # the scores of the others are 0
        return self.shared_expert(x) + self.experts(x, chosen, weights), logits


_FORMS: dict[str, type[nn.Module]] = {
    "FalconLinear": nn.Linear,
    "Llama4TextExperts": WeightedInputExperts,
    "Llama4TextMoe": WeightedInputMoe,
}
"""By the names of transformers' classes, which are not imported for other models."""


def give_known_classes(model: Any) -> None:
    """Give the modules of such classes the known form; their weights stay."""
    for module in model.modules():
        own = type(module)
        form = _FORMS.get(own.__name__)
        if form is not None:
            is_whole = issubclass(own, form)
            module.__class__ = form if is_whole else type(form.__name__, (form, own), {})
