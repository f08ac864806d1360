"""The reasons for which intake refuses an adapter: code, meaning and remedy.

`AdapterRejected.reason` is always one of these. The error reference is generated from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Rejection(NamedTuple):
    """One published reason."""

    meaning: str
    way_out: str


REJECTIONS: Mapping[str, Rejection] = {
    # the configuration
    "config_too_large": Rejection(
        "adapter_config.json is larger than 1 MiB, or a pattern has more than 4096 entries.",
        "Send the file that PEFT's save_pretrained wrote.",
    ),
    "malformed_config": Rejection(
        "adapter_config.json is not strict JSON, or a field has the wrong type.",
        "Save the adapter again with PEFT; NaN, Infinity and deep nesting are not accepted.",
    ),
    "duplicate_key": Rejection(
        "A JSON object has the same key twice.",
        "Remove one of them.",
    ),
    "unknown_config_field": Rejection(
        "adapter_config.json sets a field that this server does not know.",
        "Remove the field if it does not change the adapter's output, or upgrade the server.",
    ),
    "code_reference_refused": Rejection(
        "adapter_config.json refers to code or to a custom runtime.",
        "Remove the field: code from an adapter is never executed.",
    ),
    "unsupported_feature": Rejection(
        "The adapter uses a PEFT feature that changes the output and is not supported.",
        "Follow the message: train without the feature, convert the adapter, or merge it into "
        "its own base model.",
    ),
    "pattern_not_literal": Rejection(
        "A key of rank_pattern or alpha_pattern is a regular expression.",
        "Name modules literally, such as `q_proj` or `layers.3.mlp.down_proj`.",
    ),
    "config_contradiction": Rejection(
        "Tensors are missing or unexpected according to adapter_config.json, or several "
        "tensors replace the same weights.",
        "Send the adapter_config.json that was saved with these weights.",
    ),
    "invalid_invocation": Rejection(
        "alora_invocation_tokens is not a list of 1 to 256 token IDs of the base.",
        "Set it to the token IDs with which the base's tokenizer encodes the invocation.",
    ),
    "invalid_rank": Rejection(
        "A rank is not a positive whole number.",
        "Set r and every value of rank_pattern to 1 or more.",
    ),
    "rank_too_large": Rejection(
        "A rank exceeds 4096.",
        "Train with a lower rank, or merge the adapter into its own base model.",
    ),
    "invalid_alpha": Rejection(
        "An alpha is not a number above 0 and at most 1,000,000.",
        "Set lora_alpha and every value of alpha_pattern to the value used in training.",
    ),
    # the weights file
    "file_too_large": Rejection(
        "The weights file exceeds this server's limit for one adapter.",
        "Lower the rank, target fewer modules or save in bfloat16.",
    ),
    "pickle_refused": Rejection(
        "The weights are a pickle or a zip archive, which could execute code.",
        "Save as safetensors: `model.save_pretrained(path, safe_serialization=True)`.",
    ),
    "not_safetensors": Rejection(
        "The weights file does not begin with a safetensors header.",
        "Send adapter_model.safetensors as PEFT wrote it.",
    ),
    "header_too_large": Rejection(
        "The safetensors header exceeds 16 MiB.",
        "Send only the adapter's own tensors.",
    ),
    "malformed_header": Rejection(
        "The safetensors header is malformed.",
        "Save the adapter again; the file is damaged or was written by a faulty tool.",
    ),
    "too_many_tensors": Rejection(
        "The file contains more than 100,000 tensors, or too many trained tokens besides them.",
        "Send only the adapter's own tensors.",
    ),
    "no_tensors": Rejection(
        "The file contains no tensors.",
        "Save the adapter after training; sharded training must gather the weights first.",
    ),
    "invalid_tensor_name": Rejection(
        "A tensor's name exceeds 256 bytes or has characters other than A-Z a-z 0-9 . _ and -.",
        "Save the adapter again with PEFT.",
    ),
    "unsupported_dtype": Rejection(
        "A tensor is not float32, float16 or bfloat16.",
        "Convert the adapter's tensors before saving.",
    ),
    "invalid_shape": Rejection(
        "A tensor has more than three dimensions or no elements.",
        "Save the adapter again; sharded training must gather the weights first.",
    ),
    "invalid_offsets": Rejection(
        "A tensor's offsets in the file contradict its shape or another tensor's offsets.",
        "Save the adapter again; the file is damaged or was written by a faulty tool.",
    ),
    "file_size_mismatch": Rejection(
        "The file is shorter or longer than its header says.",
        "Upload it again; it was truncated or something was appended.",
    ),
    # binding to the base
    "base_mismatch": Rejection(
        "The adapter declares another base model than this server runs.",
        "Push it to a server of that base, or train it on this one.",
    ),
    "wrong_base": Rejection(
        "A tensor names a module that this base model does not have.",
        "Push it to a server of the base it was trained on.",
    ),
    "shape_mismatch": Rejection(
        "A tensor's shape does not fit the base model's layer of that name.",
        "Push it to a server of the base it was trained on.",
    ),
    "unbound_tensor": Rejection(
        "A tensor is not a LoRA matrix in PEFT's naming, so it would have no effect.",
        "Save with PEFT's save_pretrained, or convert the checkpoint to PEFT's names.",
    ),
    "unsupported_module": Rejection(
        "The base has this module, but LoRA on it is not supported.",
        "Leave the module out of target_modules.",
    ),
    "resized_vocabulary": Rejection(
        "The adapter's resized embedding and head cannot be served, or an added token's ID does "
        "not follow those of the base's tokenizer.",
        "Add tokens to the base's own tokenizer, give both ends the same rows, and train the new "
        "ones with trainable_token_indices; or merge the adapter into its own base model.",
    ),
    "base_weights_included": Rejection(
        "The file contains a full embedding or head that the configuration does not name as "
        "trained and that is not known to be the base's.",
        "Save with save_embedding_layers=False, or name the module in modules_to_save if it was "
        "trained.",
    ),
    "full_matrix_not_allowed": Rejection(
        "The adapter contains a full trained matrix, and the operator does not allow any.",
        "Train lm_head and embed_tokens with LoRA, or ask the operator for --max-full-matrix-mib.",
    ),
    "full_matrix_too_large": Rejection(
        "The adapter's full trained matrices exceed the size that the operator allows.",
        "Train lm_head and embed_tokens with LoRA, or ask the operator for a larger "
        "--max-full-matrix-mib.",
    ),
    "ambiguous_experts": Rejection(
        "The matrices around a module of experts fit several of its parameters.",
        "Name only the trained parameters in target_parameters.",
    ),
    "missing_pair": Rejection(
        "A lora_A has no lora_B, or the reverse, or an auxiliary tensor has neither.",
        "Save the adapter again; the file is incomplete.",
    ),
    "rank_mismatch": Rejection(
        "A matrix's rank differs from the configured one, so its scale would be wrong.",
        "Send the adapter_config.json that was saved with these weights.",
    ),
    # the values
    "non_finite_weights": Rejection(
        "A tensor contains NaN or infinity.",
        "Training diverged: use an earlier checkpoint.",
    ),
    "weights_overflow": Rejection(
        "With alpha applied, a value exceeds the range of the server's number format.",
        "Lower alpha or train with a smaller learning rate.",
    ),
    "no_effect": Rejection(
        "Every product B·A and every auxiliary tensor but a draft head is zero or equal to the "
        "base's: the adapter has no effect.",
        "Train it first; PEFT initializes B with zeros.",
    ),
    # the examination itself
    "intake_limit": Rejection(
        "Examining the adapter exceeded the limits on time, memory or output.",
        "Make the adapter smaller, or ask the operator for higher limits.",
    ),
    "intake_failed": Rejection(
        "The examination of the adapter crashed; if its process crashed, twice in a row.",
        "Save the adapter again with PEFT; if that fails too, ask the operator to report it.",
    ),
}
