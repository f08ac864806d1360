"""Our own plans, for layers that transformers' plans leave whole. Torch-free.

A family is here if transformers has no plan for it, or one that leaves out what it could divide. In
most families without any plan attention stays whole: it stores query, key and value in one matrix,
or it counts its heads by itself. So do layers with states (linear attention, state spaces) and
fused MLPs.
"""

from __future__ import annotations

from collections.abc import Mapping


def _mlp(first: str, second: str) -> dict[str, str]:
    """The plan of an MLP of two linear layers."""
    return {first: "colwise", second: "rowwise"}


def _gated_mlp(
    path: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> dict[str, str]:
    """The plan of a gated MLP with these linear layers in the module at `path`."""
    return {f"{path}.{gate}": "colwise", **_mlp(f"{path}.{up}", f"{path}.{down}")}


def _attention(path: str, out: str = "o_proj") -> dict[str, str]:
    """The plan of an attention that is divided by heads. `out`: its last linear layer."""
    columns = {f"{path}.{leaf}": "colwise" for leaf in ("q_proj", "k_proj", "v_proj")}
    return {**columns, f"{path}.{out}": "rowwise"}


_LATENT_ATTENTION = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.q_b_proj": "colwise",
    "layers.*.self_attn.kv_b_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
"""As transformers divides that of DeepSeek-V2."""

OWN_PLANS: Mapping[str, Mapping[str, str]] = {
    "bamba": _attention("layers.*.self_attn") | _gated_mlp("layers.*.feed_forward"),
    "biogpt": _mlp("layers.*.fc1", "layers.*.fc2"),
    "bloom": _mlp("h.*.mlp.dense_h_to_4h", "h.*.mlp.dense_4h_to_h"),
    "deepseek_v3": _LATENT_ATTENTION,
    "falcon": _mlp("h.*.mlp.dense_h_to_4h", "h.*.mlp.dense_4h_to_h"),
    "falcon_h1": _attention("layers.*.self_attn") | _gated_mlp("layers.*.feed_forward"),
    "gpt2": _mlp("h.*.mlp.c_fc", "h.*.mlp.c_proj"),
    "gpt_bigcode": _mlp("h.*.mlp.c_fc", "h.*.mlp.c_proj"),
    "gpt_neo": _mlp("h.*.mlp.c_fc", "h.*.mlp.c_proj"),
    "gpt_oss": _attention("layers.*.self_attn"),
    "granitemoe": _attention("layers.*.self_attn"),
    "granitemoehybrid": _attention("layers.*.self_attn"),
    "jamba": _attention("layers.*.self_attn") | _gated_mlp("layers.*.feed_forward"),
    "lfm2": _attention("layers.*.self_attn", "out_proj")
    | _gated_mlp("layers.*.feed_forward", "w1", "w3", "w2"),
    "lfm2_moe": _attention("layers.*.self_attn", "out_proj")
    | _gated_mlp("layers.*.feed_forward", "w1", "w3", "w2"),
    "lfm3": _gated_mlp("layers.*.feed_forward", "w1", "w3", "w2"),
    "mpt": _mlp("blocks.*.ffn.up_proj", "blocks.*.ffn.down_proj"),
    "nemotron_h": _attention("layers.*.mixer")
    | _mlp("layers.*.mixer.up_proj", "layers.*.mixer.down_proj")
    | _mlp("layers.*.mixer.shared_experts.up_proj", "layers.*.mixer.shared_experts.down_proj"),
    "opt": _mlp("decoder.layers.*.fc1", "decoder.layers.*.fc2"),
    "phimoe": _attention("layers.*.self_attn"),
    "qwen2_moe": _gated_mlp("layers.*.mlp.shared_expert"),
    "stablelm": _gated_mlp("layers.*.mlp"),
    "xglm": _mlp("layers.*.fc1", "layers.*.fc2"),
}
"""By model type: the styles of layers, by their paths in the decoder. A layer's number is `*`."""
