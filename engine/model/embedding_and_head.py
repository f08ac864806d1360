"""The input embedding and the output head, if adapters may change them.

In a step whose adapters change them, hooks change their results, as PEFT's wrappers do. This is
correct only for a plain table and a plain linear layer that the model calls once per forward pass:
the table with the step's tokens, the head with the logits rows. Any other module supports no
adapters, and the reason is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
    fixed_vocabulary: str = ""
    """See `BaseLayout.fixed_vocabulary`."""

    @contextmanager
    def changed_by(self, adapters: StepAdapters, token_ids: Tensor) -> Iterator[Tensor]:
        """Both have the changes of the step's adapters during the step's forward pass of `token_ids
        [num_tokens]`. The model is given others: it has no rows for tokens that adapters add."""
        with ExitStack() as changes:
            if self.embedding and adapters.embedding:
                hook = self.embedding.change(adapters.embedding, token_ids)
                changes.callback(hook.remove)
                token_ids = token_ids.clamp(max=self.embedding.num_tokens - 1)
            if self.head and (adapters.head or adapters.num_added_tokens):
                num_added = adapters.num_added_tokens
                changes.enter_context(self.head.changed_by(adapters.head, num_added))
            yield token_ids

    @property
    def is_head_divided(self) -> bool:
        """Whether each rank computes the logits of some tokens."""
        return self.head is not None and self.head.is_divided


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
    return ModelEnds(
        embedding,
        head,
        refused,
        are_tied=linear.weight is table.weight,
        fixed_vocabulary="" if refused else _objection_to_tokens(model, table, linear),
    )


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
        fixed_vocabulary=_bias_objection(linear),
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


def _objection_to_tokens(model: PreTrainedModel, table: nn.Module, head: nn.Module) -> str:
    """Why no token can be added: a few tokens are run as others, with the embedding's result for
    the right ones and a wider one of the head."""
    if objection := _bias_objection(head):
        return objection
    device = next(model.parameters()).device
    tokens = torch.tensor(_PROBE_TOKENS, device=device)
    kept = torch.tensor(_PROBE_KEPT, device=device)
    expected = run_model(model, LayerProbe(), tokens, tokens, kept)
    hooks = [
        table.register_forward_hook(lambda module, _args, _y: module.forward(tokens[None])),
        head.register_forward_hook(lambda _module, _args, y: F.pad(y, (0, 1))),
    ]
    try:
        found = run_model(model, LayerProbe(), tokens.roll(1), tokens, kept)
    except RuntimeError:  # shapes that do not fit
        return "the base computes with its vocabulary after the output head"
    finally:
        for hook in hooks:
            hook.remove()
    if found.shape[1] != expected.shape[1] + 1:
        return "the base cuts its logits to its vocabulary"
    if not torch.allclose(found[:, :-1], expected, atol=1e-5 * float(expected.abs().max())):
        return "the base reads token ids elsewhere than in its input embedding"
    return ""


def _bias_objection(head: nn.Module) -> str:
    return "the base's output head has a bias" if getattr(head, "bias", None) is not None else ""


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
    weight = module.weight
    assert isinstance(weight, Tensor)
    rounded = torch.as_tensor(scale, device=weight.device, dtype=torch.float32).to(weight.dtype)
    return float(rounded) if rounded.numel() == 1 else 1.0
