"""The supported and refused PEFT features, with the reason and the alternative.

`python -m loraplex.adapters.formats` prints the published list, `docs/formats.md`. Tests create one
adapter per row with PEFT and check the row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .rejections import REJECTIONS


class ServedFeature(NamedTuple):
    """Something PEFT can do that is served in mixed batches."""

    name: str
    """As in an adapter's report."""
    peft: str
    """How to enable it in PEFT."""
    how: str


class RefusedFeature(NamedTuple):
    """Something PEFT can do that is refused."""

    name: str
    peft: str
    code: str
    """One of `rejections.REJECTIONS`."""
    why: str
    way_out: str


SERVED: tuple[ServedFeature, ...] = (
    ServedFeature(
        "lora",
        "`target_modules` names linear layers, all or some, of all or some blocks; `all-linear`; "
        "`layers_to_transform`; `exclude_modules`",
        "The tensors say which layers are touched; an untouched layer costs nothing. Fused layers "
        "(`qkv_proj`, `query_key_value`) and `Conv1D` have the names PEFT gives them.",
    ),
    ServedFeature(
        "rslora",
        "`use_rslora=True`",
        "B is scaled by alpha ÷ √rank when it is loaded.",
    ),
    ServedFeature(
        "rank_pattern",
        "`rank_pattern`",
        "Every matrix keeps its own rank, nothing is padded. Keys must be literal names, with `^` "
        "or `.*\\.` before them at most: they are never run as regular expressions.",
    ),
    ServedFeature(
        "alpha_pattern",
        "`alpha_pattern`",
        "The scale of each layer is folded into its B; keys as for `rank_pattern`.",
    ),
    ServedFeature(
        "initialization",
        "`init_lora_weights` of `True`, `False`, `gaussian`, `orthogonal`, `eva`, `mica`",
        "Only the start of training differs; the base's weights are what they were.",
    ),
    ServedFeature(
        "output_head",
        "`target_modules` with `lm_head`",
        "As any linear layer, on the rows that are sampled from. With tied embeddings the input "
        "side stays the base's, as in PEFT.",
    ),
    ServedFeature(
        "embedding",
        "`target_modules` with `embed_tokens`",
        "Two gathered rows per token. PEFT also saves a copy of the base's own matrix: see "
        "`base_weights`.",
    ),
    ServedFeature(
        "tied_adapters",
        "`ensure_weight_tying=True`",
        "PEFT writes the tensors of both the embedding and the head; each is served as it stands.",
    ),
    ServedFeature(
        "router",
        "`target_parameters=['gate.weight']`; `all-linear` on a mixture of experts",
        "As any linear layer, before the experts are chosen.",
    ),
    ServedFeature(
        "experts",
        "`target_parameters` of stacked experts, such as `experts.gate_up_proj`",
        "One A and one B per expert, applied to the tokens routed to it. Which parameter a nested "
        "tensor belongs to follows from `target_parameters` and from its shape.",
    ),
    ServedFeature(
        "lora_bias",
        "`lora_bias=True`",
        "The bias of B, times the scale, is added to the rows of the adapter.",
    ),
    ServedFeature(
        "bias",
        "`bias='lora_only'` or `'all'`, as long as only linear layers have biases",
        "The difference to the base's bias is added to the rows of the adapter.",
    ),
    ServedFeature(
        "dora",
        "`use_dora=True`, on any linear layer, the output head and `embed_tokens`",
        "The factor of each output, magnitude ÷ norm of the changed weight, is computed once "
        "when the adapter is loaded.",
    ),
    ServedFeature(
        "full_matrix",
        "`modules_to_save` with `lm_head` or `embed_tokens`",
        "A whole matrix of its own for the rows of the adapter, where the operator allows the "
        "size with `--max-full-matrix-mib` (default: not at all).",
    ),
    ServedFeature(
        "token_rows",
        "`trainable_token_indices`",
        "Only the trained rows are held, and replace the base's; with tied embeddings in the "
        "output head, too, as in PEFT.",
    ),
)

_MERGE = "Merge it into its own base model."
_CONVERT = (
    "Convert it to plain LoRA: `save_pretrained(..., path_initial_model_for_weight_conversion=...)`"
)

REFUSED: tuple[RefusedFeature, ...] = (
    RefusedFeature(
        "other_type",
        "LoHa, LoKr, OFT, VeRA, IA³, prompt and prefix tuning, every other PEFT type",
        "unsupported_feature",
        "Only the type LORA is served.",
        f"Train a LoRA. Where PEFT can merge the type: {_MERGE[0].lower()}{_MERGE[1:]}",
    ),
    RefusedFeature(
        "other_task",
        "`task_type` other than `CAUSAL_LM`",
        "unsupported_feature",
        "There is no classification head here.",
        "Train with `task_type='CAUSAL_LM'`.",
    ),
    RefusedFeature(
        "changed_base",
        "`init_lora_weights` of `pissa`, `pissa_niter_*`, `olora`, `corda`, `loftq`, `lora_ga`",
        "unsupported_feature",
        "The initialization changed the base's weights, which others share.",
        f"{_CONVERT}; of LoftQ: merge it into its own base model.",
    ),
    RefusedFeature(
        "pattern_expression",
        "keys of `rank_pattern` and `alpha_pattern` that are more than a name",
        "pattern_not_literal",
        "A regular expression can take hours on a single name.",
        "Name the modules, such as `q_proj` or `layers.3.mlp.down_proj`.",
    ),
    RefusedFeature(
        "layer_replication",
        "`layer_replication`",
        "unsupported_feature",
        "The base has the blocks it has.",
        _MERGE,
    ),
    RefusedFeature(
        "activated_lora",
        "`alora_invocation_tokens`",
        "unsupported_feature",
        "The adapter would have to begin in the middle of a prompt.",
        "Retrain without `alora_invocation_tokens`.",
    ),
    RefusedFeature(
        "arrow",
        "`arrow_config`",
        "unsupported_feature",
        "A request names one adapter.",
        "Push the adapters one by one.",
    ),
    RefusedFeature(
        "qalora",
        "`use_qalora=True`",
        "unsupported_feature",
        "Its A reads averaged inputs.",
        "Retrain without `use_qalora`.",
    ),
    RefusedFeature(
        "bdlora",
        "`use_bdlora`",
        "unsupported_feature",
        "Its matrices are block-diagonal and stored as blocks.",
        "Retrain without `use_bdlora`.",
    ),
    RefusedFeature(
        "kasa",
        "`kasa_config`",
        "unsupported_feature",
        "It truncates the base's weights, which others share.",
        _MERGE,
    ),
    RefusedFeature(
        "monteclora",
        "`monteclora_config`",
        "unsupported_feature",
        "Its weights are a distribution.",
        "Retrain without `monteclora_config`.",
    ),
    RefusedFeature(
        "velora",
        "`velora_config`",
        "unsupported_feature",
        "Its checkpoints hold the state of its training.",
        "Retrain without `velora_config`.",
    ),
    RefusedFeature(
        "megatron",
        "`megatron_config`, another `megatron_core`, `auto_mapping` outside transformers",
        "code_reference_refused",
        "They name code to import.",
        "Remove the field: nothing that an adapter brings is executed.",
    ),
    RefusedFeature(
        "parameter_of_a_linear_layer",
        "`target_parameters` of an ordinary linear layer, such as `q_proj.weight`",
        "unsupported_feature",
        "Its orientation depends on the class of the layer.",
        "Name the layer in `target_modules`.",
    ),
    RefusedFeature(
        "separate_experts",
        "one pair of matrices per expert, such as `experts.0.w1`, from before transformers 5",
        "unsupported_feature",
        "The experts of this base are stacked in one parameter.",
        "Load it with a current PEFT, which stacks them, and save it again.",
    ),
    RefusedFeature(
        "experts_of_one_shape",
        "`target_parameters` of several stacked parameters of one shape and one rank",
        "ambiguous_experts",
        "PEFT names their matrices by depth, not by parameter.",
        "Give them different ranks in `rank_pattern`, or name only one of them.",
    ),
    RefusedFeature(
        "router_extras",
        "`bias='all'` where a router has a bias",
        "unsupported_feature",
        "Routers take A and B only.",
        "Train with `bias='none'` or `bias='lora_only'`.",
    ),
    RefusedFeature(
        "norm_bias",
        "`bias='all'` where a normalization has a bias",
        "unsupported_module",
        "Only linear layers change per row.",
        "Train with `bias='lora_only'`.",
    ),
    RefusedFeature(
        "other_modules_to_save",
        "`modules_to_save` of anything but the output head and the input embedding",
        "unsupported_module",
        "Only these two have room for a matrix per adapter.",
        "Train without it, or merge it into its own base model.",
    ),
    RefusedFeature(
        "full_matrix_not_allowed",
        "`modules_to_save` where the operator allows no whole matrices",
        "full_matrix_not_allowed",
        "It costs a whole matrix of device memory.",
        "Train `lm_head` and `embed_tokens` with LoRA, or ask the operator for "
        "`--max-full-matrix-mib`.",
    ),
    RefusedFeature(
        "full_matrix_too_large",
        "`modules_to_save` beyond the size that the operator allows",
        "full_matrix_too_large",
        "It costs a whole matrix of device memory.",
        "Train `lm_head` and `embed_tokens` with LoRA, or ask the operator for a larger "
        "`--max-full-matrix-mib`.",
    ),
    RefusedFeature(
        "base_weights",
        "a copy of the base's own matrix, which `save_embedding_layers='auto'` adds to adapters of "
        "`embed_tokens` or `lm_head`",
        "base_weights_included",
        "It may be trained, and would then be lost. Accepted, and left out, where it equals the "
        "base's to the bit.",
        "Save with `save_embedding_layers=False`.",
    ),
    RefusedFeature(
        "resized_vocabulary",
        "`resize_token_embeddings` before training",
        "resized_vocabulary",
        "All adapters share one vocabulary.",
        "Train on the base as it is: new meanings can go to its reserved tokens through "
        "`trainable_token_indices`. Or merge it into its own base model.",
    ),
)

UNUSUAL: tuple[RefusedFeature, ...] = (
    RefusedFeature(
        "dora_with_lora_bias",
        "`use_dora=True` with `lora_bias=True`",
        "unsupported_feature",
        "PEFT itself cannot combine the two.",
        "Train with `lora_bias=False`.",
    ),
    RefusedFeature(
        "lora_a_bias",
        "tensors named `lora_A.bias`",
        "unsupported_feature",
        "PEFT's LoRA has no bias on A.",
        "Train without it.",
    ),
    RefusedFeature(
        "adalora",
        "tensors named `lora_E`",
        "unsupported_feature",
        "They are AdaLoRA's.",
        _MERGE,
    ),
    RefusedFeature(
        "module_not_served",
        "`target_modules` with a module of a class that carries no adapters here",
        "unsupported_module",
        "The message says why this module is not served.",
        "Leave the module out of `target_modules`.",
    ),
    RefusedFeature(
        "other_token_rows",
        "`trainable_token_indices` of anything but the output head and the input embedding",
        "unsupported_module",
        "Only these two have rows of tokens.",
        "Name the embedding in `trainable_token_indices`.",
    ),
    RefusedFeature(
        "tied_token_rows",
        "`trainable_token_indices` of a tied embedding where the output head carries no adapters",
        "unsupported_module",
        "The rows belong to the output head, too.",
        "Train without `trainable_token_indices`.",
    ),
)
"""Also refused: tensors that PEFT does not write by itself, or that depend on the base."""

REFUSED_BY_NAME: Mapping[str, RefusedFeature] = {
    feature.name: feature for feature in (*REFUSED, *UNUSUAL)
}


def refusal_message(name: str) -> str:
    """The explanation of a refusal, after the name of the field or tensor."""
    feature = REFUSED_BY_NAME[name]
    return f"{feature.why} {feature.way_out}"


_INTRODUCTION = """\
# PEFT features

Adapters are what PEFT's `save_pretrained` writes: `adapter_config.json` and
`adapter_model.safetensors`, in float32, float16 or bfloat16. What PEFT can express is either
served exactly, in one batch with every other adapter, or refused with a code and a way out;
nothing is ignored. `loraplex adapters validate` says it without a server.

This page is printed by `python -m loraplex.adapters.formats`.
"""


def format_reference() -> str:
    """The text of `docs/formats.md`."""
    by_feature = {feature.code for feature in REFUSED_BY_NAME.values()}
    return (
        _INTRODUCTION
        + "\n## Served\n\n"
        + _table(("feature", "in PEFT", "how"), SERVED)
        + "\n## Refused\n\n"
        + _table(
            ("feature", "in PEFT", "code", "why", "way out"),
            (feature._replace(code=f"`{feature.code}`") for feature in REFUSED_BY_NAME.values()),
        )
        + "\n## Refused, whatever the feature\n\n"
        + _table(
            ("code", "what is wrong", "way out"),
            (
                (code, *rejection)
                for code, rejection in REJECTIONS.items()
                if code not in by_feature
            ),
        )
    )


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [titles, ("---",) * len(titles), *((f"`{row[0]}`", *row[1:]) for row in rows)]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


if __name__ == "__main__":
    sys.stdout.write(format_reference())
