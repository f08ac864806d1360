"""The input embedding and the output head, if adapters may change them.

In a step whose adapters change them, hooks change their results, as PEFT's wrappers do. This is
correct only for a plain table and a plain linear layer that the model calls once per forward pass:
the table with the step's tokens, the head with the logits rows. Any other module supports no
adapters, and the reason is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from .attention_windows import LayerProbe
from .forward import StepAdapters, run_model
from .input_embedding import InputEmbedding
from .output_head import OutputHead

_PROBE_TOKENS = (0, 1, 2)
_PROBE_KEPT = (1,)


@dataclass(frozen=True, slots=True)
class ModelEnds:
    """The ends that adapters may change, and the reasons for the others."""

    embedding: InputEmbedding | None
    head: OutputHead | None
    refused: dict[str, str]
    """Module name to reason."""
    are_tied: bool
    """The head multiplies by the embedding's own table."""

    @contextmanager
    def changed_by(self, adapters: StepAdapters) -> Iterator[None]:
        """Both have the changes of the step's adapters during the step's forward pass."""
        hooks = []
        if self.embedding and adapters.embedding:
            hooks.append(self.embedding.change(adapters.embedding))
        if self.head and adapters.head:
            hooks.append(self.head.change(adapters.head))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def adapt_ends(model: PreTrainedModel) -> ModelEnds:
    """The ends by what a few tokens show of them."""
    table, linear = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    calls = _record_calls(model, table, linear)
    refused = {}
    embedding = head = None
    if reason := _embedding_objection(table, calls[table]):
        refused[names[table]] = f"LoRA on this embedding is not served: {reason}"
    else:
        embedding = InputEmbedding(names[table], table, scale=_scale(table))
    if reason := _head_objection(linear, calls[linear]):
        refused[names[linear]] = f"LoRA on this output head is not served: {reason}"
    else:
        head = OutputHead(names[linear], linear)
    return ModelEnds(embedding, head, refused, are_tied=linear.weight is table.weight)


def declare_ends(model: PreTrainedModel) -> ModelEnds:
    """The ends by their types only, for a model without weights, which cannot run."""
    table, linear = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    is_table, is_head = isinstance(table, nn.Embedding), type(linear) is nn.Linear
    refused = {}
    if not is_table:
        refused[names[table]] = _type_objection(table)
    if not is_head:
        refused[names[linear]] = _type_objection(linear)
    return ModelEnds(
        InputEmbedding(names[table], table, scale=1.0) if is_table else None,
        OutputHead(names[linear], linear) if is_head else None,
        refused,
        are_tied=linear.weight is table.weight,
    )


def _type_objection(module: nn.Module) -> str:
    return f"it is a {type(module).__name__}"


@dataclass(frozen=True, slots=True)
class _Call:
    arguments: tuple[Any, ...]
    result: Tensor


def _record_calls(model: PreTrainedModel, *modules: nn.Module) -> dict[nn.Module, list[_Call]]:
    """Run a few tokens; keep each module's arguments and result."""
    calls: dict[nn.Module, list[_Call]] = {module: [] for module in modules}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        calls[module].append(_Call((*args, *kwargs.values()), result))

    hooks = [module.register_forward_hook(record, with_kwargs=True) for module in modules]
    device = next(model.parameters()).device
    tokens = torch.tensor(_PROBE_TOKENS, device=device)
    try:
        run_model(model, LayerProbe(), tokens, tokens, torch.tensor(_PROBE_KEPT, device=device))
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _embedding_objection(module: nn.Module, calls: list[_Call]) -> str | None:
    if not isinstance(module, nn.Embedding):
        return _type_objection(module)
    if [tuple(_shape(call)) for call in calls] != [(1, len(_PROBE_TOKENS))]:
        return "the model does not call it exactly once with the step's tokens"
    token_ids, result = calls[0].arguments[0], calls[0].result
    plain = F.embedding(token_ids, module.weight) * _scale(module)
    if not torch.allclose(result, plain, rtol=2 * torch.finfo(plain.dtype).eps, atol=0.0):
        return "it returns something else than the scaled rows of its table"
    return None


def _head_objection(module: nn.Module, calls: list[_Call]) -> str | None:
    if type(module) is not nn.Linear:
        return _type_objection(module)
    if [tuple(_shape(call)) for call in calls] != [(1, len(_PROBE_KEPT), module.in_features)]:
        return "the model does not call it exactly once with the logits rows"
    return None


def _shape(call: _Call) -> torch.Size:
    """The shape of the only argument; the shape of a scalar for another number of arguments."""
    arguments = call.arguments
    return arguments[0].shape if len(arguments) == 1 else torch.Size()


def _scale(module: nn.Module) -> float:
    """The factor with which some families' embeddings multiply their rows, with their rounding."""
    scale = getattr(module, "embed_scale", 1.0)
    assert isinstance(module.weight, Tensor)
    rounded = torch.as_tensor(scale, device=module.weight.device).to(module.weight.dtype)
    return float(rounded) if rounded.numel() == 1 else 1.0
