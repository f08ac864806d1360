"""Bases that ship a multi-token head, and an independent reference of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask

from support.families import EXPERTS, MLA, SERVED, save_family

GLM = {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1}
SHIPPING: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": SERVED["deepseek_v3-mla"],
    "glm4_moe": ("glm4_moe", {**GLM, "use_qk_norm": True, "partial_rotary_factor": 0.5}),
    "glm4_moe_lite": ("glm4_moe_lite", {**EXPERTS, **MLA, "q_lora_rank": 24, "n_group": 1}),
}
"""Model type to its tiny form."""


def save_shipping(
    path: Path, family: str, *, repeats: bool = False, own_ends: bool = False
) -> Path:
    """A tiny random base of this family with a head in its files, as published ones have it.

    `repeats`: the head says what the base said of the token before, so that it is right where the
    base's output repeats. `own_ends`: its embedding and output head are no copies of the base's.
    """
    model_type, differences = SHIPPING[family]
    save_family(path, model_type, {**differences, "num_hidden_layers": 3})
    tensors = load_file(path / "model.safetensors")
    place, size = 2, tensors["model.norm.weight"].shape[0]
    generator = torch.Generator().manual_seed(5)

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    prefix = f"model.layers.{place}."
    head = {
        "enorm.weight": norm(),
        "hnorm.weight": norm(),
        "eh_proj.weight": 0.2 * torch.randn(size, 2 * size, generator=generator),
        "shared_head.norm.weight": norm(),
        "shared_head.head.weight": tensors["lm_head.weight"].clone(),
        "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
    }
    if own_ends:
        for name in ("shared_head.head.weight", "embed_tokens.weight"):
            head[name] = 0.5 * torch.randn(head[name].shape, generator=generator)
    if repeats:
        head |= {f"{name}.weight": torch.ones(size) for name in ("hnorm", "shared_head.norm")}
        head["eh_proj.weight"] = torch.cat([torch.zeros(size, size), torch.eye(size)], dim=1)
        for name in [name for name in tensors if name.startswith(prefix)]:
            if "o_proj" in name or "down_proj" in name:
                tensors[name] = torch.zeros_like(tensors[name])
    tensors |= {prefix + name: tensor for name, tensor in head.items()}
    tensors["model.norm.weight"] = norm()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config |= {"num_hidden_layers": place, "num_nextn_predict_layers": 1}
    if "mlp_layer_types" in config:
        config["mlp_layer_types"] = config["mlp_layer_types"][:place]
    (path / "config.json").write_text(json.dumps(config))
    return path


def _load(base: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, experts_implementation="eager", **options)


class DenseMtp:
    """What such a head computes, in fp64: transformers' own layer over all pairs at once, without a
    cache, pages or Loraplex's modules."""

    def __init__(self, base: Path) -> None:
        self.base: Any = _load(base).double()
        config = AutoConfig.from_pretrained(base)
        self._place = config.num_hidden_layers
        config.num_hidden_layers += 1
        if hasattr(config, "mlp_layer_types"):
            config.mlp_layer_types = [*config.mlp_layer_types, "sparse"]
        whole: Any = _load(base, config=config)
        self._config = whole.config
        self._layer = whole.model.layers[self._place].double()
        self._rotary = whole.model.rotary_emb
        prefix = f"model.layers.{self._place}."
        self._weights = {
            name.removeprefix(prefix): tensor.double()
            for name, tensor in load_file(base / "model.safetensors").items()
            if name.startswith(prefix)
        }

    def features(self, token_ids: list[int]) -> Tensor:
        """`[num_tokens, hidden_size]`: the base's last hidden states, after the final norm."""
        with torch.no_grad():
            states: Tensor = self.base.model(torch.tensor([token_ids])).last_hidden_state[0]
        return states

    def states(self, token_ids: list[int], features: Tensor) -> Tensor:
        """`[num_pairs, hidden_size]` of pairs that are a whole context."""
        embedded = self._weights["embed_tokens.weight"][token_ids]
        normed = [self._norm(embedded, "enorm"), self._norm(features, "hnorm")]
        x = (torch.cat(normed, dim=-1) @ self._weights["eh_proj.weight"].T)[None]
        positions = torch.arange(len(token_ids))[None]
        mask = create_causal_mask(
            config=self._config,
            inputs_embeds=x,
            attention_mask=None,
            cache=None,
            position_ids=positions,
        )
        with torch.no_grad():
            y = self._layer(
                x,
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=self._rotary(x, positions),
            )
        return self._norm(y[0], "shared_head.norm")

    def logits(self, state: Tensor) -> Tensor:
        """`[vocab_size]`."""
        logits: Tensor = self._weights["shared_head.head.weight"] @ state
        return logits

    def _norm(self, x: Tensor, name: str) -> Tensor:
        mean_square = x.pow(2).mean(-1, keepdim=True) + self._config.rms_norm_eps
        normed: Tensor = x / mean_square.sqrt() * self._weights[f"{name}.weight"]
        return normed
