"""Parses the names that PEFT gives to an adapter's tensors.

Names have the form `base_model.model.<module>.lora_A.weight`. If PEFT wraps a module several times,
as it does for several stacked parameters, it adds `.base_layer` per wrapper to the inner names.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from .errors import AdapterRejected
from .formats import refusal_message

PREFIX = "base_model.model."
DRAFT_HEAD_PREFIX = f"{PREFIX}draft_head."
_WRAPPER = ".base_layer"


class TensorRole(StrEnum):
    """The role of a tensor in its module: the end of its name. The first match counts."""

    A = "lora_A.weight"
    """`[rank, in]`; of stacked experts `[experts · rank, in]`, expert by expert."""
    B = "lora_B.weight"
    """`[out, rank]`; of stacked experts `[out, rank · experts]`, rank by rank."""
    EMBEDDING_A = "lora_embedding_A"
    """`[rank, vocabulary]`"""
    EMBEDDING_B = "lora_embedding_B"
    """`[out, rank]`"""
    MAGNITUDE = "lora_magnitude_vector"
    LORA_BIAS = "lora_B.bias"
    TOKEN_ROWS = "token_adapter.trainable_tokens_delta"
    """`[tokens, width]`: the rows themselves, regardless of the name."""
    ROWS_BASE = "token_adapter.base_layer.weight"
    """The base's own weight, saved together with trained rows."""
    BASE_COPY = "base_layer.weight"
    """The base's own weight, saved together with LoRA."""
    ORIGINAL = "original_module.weight"
    """The base's own weight, saved together with a trained one; without effect."""
    SAVED = "modules_to_save.weight"
    """The trained weight again, which PEFT saves under the module's own name too."""
    DRAFT_HEAD = "draft_head"
    """`[values]`, beside the model: `draft_head.<id>`; see `draft_head`."""
    BIAS = "bias"
    MATRIX = "weight"


class TensorName(NamedTuple):
    """A tensor's name, taken apart."""

    module: str
    """Path inside the base model; of a draft head its id."""
    role: TensorRole
    num_wrappers: int
    """The number of further wrappers around the one that the tensor belongs to."""


def parse_tensor_name(name: str) -> TensorName:
    """Take a name apart. Raises AdapterRejected if PEFT's LoRA does not name a tensor so."""
    if name.startswith(DRAFT_HEAD_PREFIX):
        return TensorName(name.removeprefix(DRAFT_HEAD_PREFIX), TensorRole.DRAFT_HEAD, 0)
    for part, feature in _UNSERVED_PARTS:
        if part in name:
            raise AdapterRejected(
                "unsupported_feature", f"{name}: {refusal_message(feature)}", pointer=name
            )
    role = next((role for role in TensorRole if name.endswith(f".{role}")), None)
    if not name.startswith(PREFIX) or role is None or _is_of_unknown_kind(name, role):
        raise AdapterRejected(
            "unbound_tensor",
            f"{name} is not named as PEFT names a LoRA tensor: {PREFIX}<module>.lora_A.weight",
            pointer=name,
        )
    path = name[len(PREFIX) : -len(role) - 1]
    module = path
    while module.endswith(_WRAPPER):
        module = module.removesuffix(_WRAPPER)
    num_wrappers = (len(path) - len(module)) // len(_WRAPPER)
    if role is TensorRole.BIAS:
        num_wrappers = 0  # `base_layer.bias` is the bias of the module that LoRA wraps
    return TensorName(module, role, num_wrappers)


_UNSERVED_PARTS = (
    (".lora_A.bias", "lora_a_bias"),
    (".lora_velora_embed", "velora"),
    (".lora_diag", "kasa"),
    (".lora_E", "adalora"),
)


def _is_of_unknown_kind(name: str, role: TensorRole) -> bool:
    """Whether the module's path still holds something of PEFT's, such as an adapter's name."""
    path = name[: -len(role)]
    return any(part in path for part in (".lora_", ".token_adapter.", ".modules_to_save."))
