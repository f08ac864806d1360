"""The supported and refused PEFT features, with the reason and the alternative.

`python -m loraplex.adapters.formats` generates `docs/formats.md`. Tests create one
adapter per row with PEFT and check the row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .rejections import REJECTIONS


class ServedFeature(NamedTuple):
    """A PEFT feature that is served in mixed batches."""

    name: str
    """The name in an adapter's intake report."""
    peft: str
    """How to enable it in PEFT."""
    how: str
    """How it is served."""


class RefusedFeature(NamedTuple):
    """A PEFT feature that is refused."""

    name: str
    peft: str
    code: str
    """One of `rejections.REJECTIONS`."""
    why: str
    """Why it is refused."""
    way_out: str
    """What the caller can do instead."""


SERVED: tuple[ServedFeature, ...] = (
    ServedFeature(
        "lora",
        "`target_modules` with any linear layers, or `all-linear`; `layers_to_transform`; "
        "`exclude_modules`",
        "The adapter applies to the layers that its tensors name. The other layers take no time "
        "and no memory. Fused layers (`qkv_proj`, `query_key_value`) and `Conv1D` keep PEFT's "
        "names.",
    ),
    ServedFeature(
        "rslora",
        "`use_rslora=True`",
        "B is scaled by alpha ÷ √rank at load.",
    ),
    ServedFeature(
        "rank_pattern",
        "`rank_pattern`",
        "Every matrix keeps its own rank; nothing is padded. A key must be a literal name, with an "
        "optional prefix `^` or `.*\\.`. It is never run as a regular expression.",
    ),
    ServedFeature(
        "alpha_pattern",
        "`alpha_pattern`",
        "The scale of each layer is folded into its B. Keys are as in `rank_pattern`.",
    ),
    ServedFeature(
        "initialization",
        "`init_lora_weights` of `True`, `False`, `gaussian`, `orthogonal`, `eva`, `mica`",
        "These change the start of training only, not the base's weights.",
    ),
    ServedFeature(
        "output_head",
        "`target_modules` with `lm_head`",
        "It is applied like any linear layer, to the rows that are sampled. With tied embeddings, "
        "the input embedding stays the base's, as in PEFT.",
    ),
    ServedFeature(
        "embedding",
        "`target_modules` with `embed_tokens`",
        "Two rows are gathered per token. PEFT also saves a copy of the base's matrix; see "
        "`base_weights`.",
    ),
    ServedFeature(
        "tied_adapters",
        "`ensure_weight_tying=True`",
        "PEFT writes tensors for the embedding and for the head. Each is served as written.",
    ),
    ServedFeature(
        "router",
        "`target_parameters=['gate.weight']`; `all-linear` on a mixture of experts",
        "It is applied like any linear layer, before the experts are chosen.",
    ),
    ServedFeature(
        "experts",
        "`target_parameters` of stacked experts, such as `experts.gate_up_proj`",
        "Each expert has its own A and B, which apply to the tokens routed to it. The parameter of "
        "a nested tensor is derived from `target_parameters` and the tensor's shape; if several "
        "have this shape, PEFT's order counts. Adapters of PEFT before 0.19, which took inputs for "
        "outputs, are told by their shapes.",
    ),
    ServedFeature(
        "separate_experts",
        "one pair of matrices per expert, such as `experts.0.w1` or `experts.0.gate_proj` (before "
        "transformers 5)",
        "The matrices are placed in those of the stacked experts. Experts, and either of gate and "
        "up, may be missing. The block around the experts may have its name before transformers 5, "
        "such as `block_sparse_moe`.",
    ),
    ServedFeature(
        "stacked_experts",
        "not written by PEFT: `experts.gate_proj`, `experts.w1` or `experts.gate_up_proj` with A "
        "`[experts, rank, in]` and B `[experts, out, rank]`, or `[1, …]` where all experts share "
        "A or B (Tinker, Megatron-Bridge, vLLM, SGLang)",
        "A shared matrix is applied with each expert's own other one. One adapter may mix these "
        "tensors with pairs per expert.",
    ),
    ServedFeature(
        "lora_bias",
        "`lora_bias=True`",
        "The bias of B times the scale is added to the adapter's rows.",
    ),
    ServedFeature(
        "bias",
        "`bias='lora_only'` or `'all'`, if only linear layers have biases",
        "The difference from the base's bias is added to the adapter's rows.",
    ),
    ServedFeature(
        "dora",
        "`use_dora=True`, on any linear layer, the output head and `embed_tokens`",
        "The factor of each output is magnitude ÷ norm of the changed weight. It is computed once, "
        "at load.",
    ),
    ServedFeature(
        "full_matrix",
        "`modules_to_save` with `lm_head` or `embed_tokens`",
        "The adapter's rows use its own matrix. The operator must allow its size with "
        "`--max-full-matrix-mib`; by default none is allowed.",
    ),
    ServedFeature(
        "token_rows",
        "`trainable_token_indices`",
        "Only the trained rows are stored. They replace the base's rows; with tied embeddings, "
        "also those of the output head, as in PEFT.",
    ),
    ServedFeature(
        "added_tokens",
        "`resize_token_embeddings` before training, by at most 1,024 rows, with "
        "`trainable_token_indices`, `modules_to_save`, or neither",
        "Only requests of the adapter can use and sample its tokens. Of matrices that were not "
        "trained, only the rows beyond the base's are stored. `adapters push` reads the tokens' "
        "texts from the `tokenizer.json` beside the adapter.",
    ),
    ServedFeature(
        "classification",
        "`task_type='SEQ_CLS'`, with a head named `score` of at most 1,024 labels",
        "The head is applied to the last token's final hidden state, as in transformers, by "
        "`/v1/classify`, `/v1/score` and `/v1/rerank`. The labels are `id2label` and "
        "`problem_type` of the model's configuration; `adapters push` reads them from the "
        "`config.json` beside the adapter.",
    ),
    ServedFeature(
        "draft_head",
        "not written by PEFT: `loraplex drafts attach` adds a tensor `draft_head.<id>`",
        "The adapter's own EAGLE head drafts for its requests, if the server has the head of the "
        "base that it continues and `--adapter-draft-heads` admits it. Answers do not depend on "
        "it.",
    ),
    ServedFeature(
        "activated_lora",
        "`alora_invocation_tokens`, with linear layers and `lm_head`",
        "The adapter acts from the last occurrence of these tokens in the prompt on. Adapters and "
        "base share the KV cache of the tokens before it. A prompt without them is answered by the "
        "base, as in PEFT.",
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
        "Only PEFT type LORA is served.",
        f"Train a LoRA. If PEFT can merge the type, {_MERGE[0].lower()}{_MERGE[1:]}",
    ),
    RefusedFeature(
        "other_task",
        "`task_type` other than `CAUSAL_LM` and `SEQ_CLS`",
        "unsupported_feature",
        "The server has no heads for other tasks.",
        "Train with `task_type='CAUSAL_LM'` or `task_type='SEQ_CLS'`.",
    ),
    RefusedFeature(
        "changed_base",
        "`init_lora_weights` of `pissa`, `pissa_niter_*`, `olora`, `corda`, `loftq`, `lora_ga`",
        "unsupported_feature",
        "The initialization changed the base's weights, which others share.",
        f"{_CONVERT}. A LoftQ adapter must be merged into its own base model.",
    ),
    RefusedFeature(
        "pattern_expression",
        "keys of `rank_pattern` or `alpha_pattern` that are not literal names",
        "pattern_not_literal",
        "A regular expression can take hours on a single name.",
        "Name the modules, such as `q_proj` or `layers.3.mlp.down_proj`.",
    ),
    RefusedFeature(
        "layer_replication",
        "`layer_replication`",
        "unsupported_feature",
        "All adapters share the base's layers, so an adapter cannot repeat them.",
        _MERGE,
    ),
    RefusedFeature(
        "activated_extras",
        "`alora_invocation_tokens` with `use_dora`, `lora_bias`, `bias`, `modules_to_save`, "
        "`trainable_token_indices`, added tokens, `embed_tokens`, or experts and their router",
        "unsupported_feature",
        "PEFT refuses these, or applies them before the invocation too, where all adapters share "
        "the base's KV cache.",
        "Train matrices of linear layers and of `lm_head` only, or without "
        "`alora_invocation_tokens`.",
    ),
    RefusedFeature(
        "arrow",
        "`arrow_config`",
        "unsupported_feature",
        "A request uses one adapter.",
        "Push each adapter separately.",
    ),
    RefusedFeature(
        "qalora",
        "`use_qalora=True`",
        "unsupported_feature",
        "Its A is multiplied by averaged inputs.",
        "Retrain without `use_qalora`.",
    ),
    RefusedFeature(
        "bdlora",
        "`use_bdlora`",
        "unsupported_feature",
        "Its matrices are block-diagonal and stored in another format.",
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
        "Its weights are a distribution, not fixed values.",
        "Retrain without `monteclora_config`.",
    ),
    RefusedFeature(
        "velora",
        "`velora_config`",
        "unsupported_feature",
        "Its checkpoints contain training state.",
        "Retrain without `velora_config`.",
    ),
    RefusedFeature(
        "megatron",
        "`megatron_config`, another `megatron_core`, `auto_mapping` outside transformers",
        "code_reference_refused",
        "These fields name code to import.",
        "Remove the field. The server never executes code from an adapter.",
    ),
    RefusedFeature(
        "parameter_of_a_linear_layer",
        "`target_parameters` of an ordinary linear layer, such as `q_proj.weight`",
        "unsupported_feature",
        "The orientation of the weight depends on the layer's class.",
        "Name the layer in `target_modules`.",
    ),
    RefusedFeature(
        "other_part",
        "LoRA on another part of a model for text and images, such as its vision tower",
        "unsupported_module",
        "Only the text part of this base is served.",
        "Train on the language model alone: its layers have `language_model` in their names.",
    ),
    RefusedFeature(
        "expert_extras",
        "`use_dora`, `lora_bias` or `bias` on separate experts",
        "unsupported_feature",
        "Experts support A and B only.",
        "Train with `use_dora=False`, `lora_bias=False` and `bias='none'`, or leave the experts "
        "out of `target_modules`.",
    ),
    RefusedFeature(
        "router_extras",
        "`bias='all'` where a router has a bias",
        "unsupported_feature",
        "A router supports A and B only.",
        "Train with `bias='none'` or `bias='lora_only'`.",
    ),
    RefusedFeature(
        "norm_bias",
        "`bias='all'` where a normalization has a bias",
        "unsupported_module",
        "Only linear layers are applied per row.",
        "Train with `bias='lora_only'`.",
    ),
    RefusedFeature(
        "other_modules_to_save",
        "`modules_to_save` with other modules than the output head, the input embedding and, with "
        "`task_type='SEQ_CLS'`, a classification head named `score`",
        "unsupported_module",
        "Only these can have a matrix per adapter. Heads named `classifier` follow layers that "
        "the served base does not have.",
        "Train without these modules, or merge the adapter into its own base model.",
    ),
    RefusedFeature(
        "full_matrix_not_allowed",
        "`modules_to_save` if the operator allows no full matrices",
        "full_matrix_not_allowed",
        "Each adapter would use device memory for a full matrix.",
        "Train `lm_head` and `embed_tokens` with LoRA, or ask the operator for "
        "`--max-full-matrix-mib`.",
    ),
    RefusedFeature(
        "full_matrix_too_large",
        "`modules_to_save` larger than the operator allows",
        "full_matrix_too_large",
        "Each adapter would use device memory for a full matrix.",
        "Train `lm_head` and `embed_tokens` with LoRA, or ask the operator for a larger "
        "`--max-full-matrix-mib`.",
    ),
    RefusedFeature(
        "base_weights",
        "a copy of the base's matrix, which `save_embedding_layers='auto'` adds to adapters of "
        "`embed_tokens` or `lm_head`",
        "base_weights_included",
        "The copy may be trained, and the change would be lost. A copy that equals the base's "
        "matrix bit for bit is accepted and dropped.",
        "Save with `save_embedding_layers=False`.",
    ),
    RefusedFeature(
        "resized_vocabulary",
        "`resize_token_embeddings` before training with LoRA on `embed_tokens` or `lm_head`, or to "
        "another number of rows in each",
        "resized_vocabulary",
        "Added tokens are rows beyond the base's matrices, the same in the embedding and the "
        "output head.",
        "Leave the two out of `target_modules`, and train the new rows with "
        "`trainable_token_indices`. Or merge the adapter into its own base model.",
    ),
)

UNUSUAL: tuple[RefusedFeature, ...] = (
    RefusedFeature(
        "dora_with_lora_bias",
        "`use_dora=True` with `lora_bias=True`",
        "unsupported_feature",
        "PEFT cannot combine the two.",
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
        "These tensors belong to AdaLoRA.",
        _MERGE,
    ),
    RefusedFeature(
        "experts_of_one_shape",
        "`target_parameters` with several stacked parameters of one shape, and matrices for some "
        "of them only",
        "ambiguous_experts",
        "PEFT names the matrices by depth, not by parameter.",
        "Name only the trained parameters in `target_parameters`.",
    ),
    RefusedFeature(
        "module_not_served",
        "`target_modules` with a module of an unsupported class",
        "unsupported_module",
        "The message says why this module is not served.",
        "Leave the module out of `target_modules`.",
    ),
    RefusedFeature(
        "classifier_of_this_base",
        "`task_type='SEQ_CLS'` if the output head supports no adapters",
        "unsupported_module",
        "A classification head reads the input of the output head.",
        "Merge it into its own base model.",
    ),
    RefusedFeature(
        "draft_head_of_this_base",
        "a tensor `draft_head.<id>` if the output head supports no adapters",
        "unsupported_module",
        "A draft head is kept beside the output head.",
        "Push the adapter without its draft head.",
    ),
    RefusedFeature(
        "too_many_labels",
        "`task_type='SEQ_CLS'` with more than 1,024 labels",
        "unsupported_feature",
        "The number of labels of one adapter is limited.",
        "Train with fewer labels.",
    ),
    RefusedFeature(
        "biased_classifier",
        "`task_type='SEQ_CLS'` with a head that has a bias",
        "unsupported_module",
        "A classification head has a matrix only.",
        "Train a head without a bias, as transformers' `score` is.",
    ),
    RefusedFeature(
        "other_token_rows",
        "`trainable_token_indices` of other modules than the output head and the input embedding",
        "unsupported_module",
        "Only these two have rows of tokens.",
        "Name the embedding in `trainable_token_indices`.",
    ),
    RefusedFeature(
        "tied_token_rows",
        "`trainable_token_indices` of a tied embedding if the output head supports no adapters",
        "unsupported_module",
        "The rows are also rows of the output head.",
        "Train without `trainable_token_indices`.",
    ),
)
"""Also refused: tensors that PEFT does not write, or whose support depends on the base."""

REFUSED_BY_NAME: Mapping[str, RefusedFeature] = {
    feature.name: feature for feature in (*REFUSED, *UNUSUAL)
}


def refusal_message(name: str) -> str:
    """The explanation of a refusal, after the name of the field or tensor."""
    feature = REFUSED_BY_NAME[name]
    return f"{feature.why} {feature.way_out}"


_INTRODUCTION = """\
# PEFT features

An adapter consists of the files that PEFT's `save_pretrained` writes: `adapter_config.json` and
`adapter_model.safetensors`, in float32, float16 or bfloat16. A PEFT feature is either served
exactly, in mixed batches with other adapters, or refused with a code and an alternative. No field
or tensor is ignored. `loraplex adapters validate` checks an adapter without a server.

This page is generated by `python -m loraplex.adapters.formats`.
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
            ("feature", "in PEFT", "code", "reason", "alternative"),
            (feature._replace(code=f"`{feature.code}`") for feature in REFUSED_BY_NAME.values()),
        )
        + "\n## Other reasons for refusal\n\n"
        + _table(
            ("code", "problem", "solution"),
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
