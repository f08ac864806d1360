"""Bases that ship a multi-token head, and an independent reference of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask

from support.families import COMMON, EXPERTS, MLA, SERVED, save_family

GLM = {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1}
Ends = Literal["copied", "own", "absent"]
SHIPPING: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": SERVED["deepseek_v3-mla"],
    "glm4_moe": ("glm4_moe", {**GLM, "use_qk_norm": True, "partial_rotary_factor": 0.5}),
    "glm4_moe_lite": ("glm4_moe_lite", {**EXPERTS, **MLA, "q_lora_rank": 24, "n_group": 1}),
}
"""Model type to its tiny form."""


def save_shipping(path: Path, family: str, *, repeats: bool = False, ends: Ends = "copied") -> Path:
    """A tiny random base of this family with a head in its files, as published ones have it.

    `repeats`: the head says what the base said of the token before, so that it is right where the
    base's output repeats. `ends`: whether its embedding and output head are copies of the base's.
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
    for name in ("shared_head.head.weight", "embed_tokens.weight"):
        copied = head.pop(name)
        if ends != "absent":
            other = 0.5 * torch.randn(copied.shape, generator=generator)
            head[name] = other if ends == "own" else copied
    if repeats:
        head |= {f"{name}.weight": torch.ones(size) for name in ("hnorm", "shared_head.norm")}
        head["eh_proj.weight"] = torch.cat([torch.zeros(size, size), torch.eye(size)], dim=1)
        for name in [name for name in tensors if name.startswith(prefix)]:
            if "o_proj" in name or "down_proj" in name:
                tensors[name] = torch.zeros_like(tensors[name])
    tensors["model.norm.weight"] = norm()
    return _ship(path, tensors, head)


def _ship(path: Path, tensors: dict[str, Tensor], head: dict[str, Tensor]) -> Path:
    """Let the last layer of the saved model, of these `tensors`, be that of a head."""
    config = json.loads((path / "config.json").read_text())
    place = config["num_hidden_layers"] - 1
    tensors = tensors | {f"model.layers.{place}.{name}": head[name] for name in head}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config |= {"num_hidden_layers": place, "num_nextn_predict_layers": 1}
    if "mlp_layer_types" in config:
        config["mlp_layer_types"] = config["mlp_layer_types"][:place]
    (path / "config.json").write_text(json.dumps(config))
    return path


class Chain:
    """Text of a random Markov chain of the second order: what follows depends on two tokens."""

    def __init__(self, num_tokens: int = 24, first: int = 8) -> None:
        """`first`: the smallest token id."""
        self._generator = torch.Generator().manual_seed(1)
        followers = [
            torch.randperm(num_tokens, generator=self._generator)[:3] for _ in range(num_tokens**2)
        ]
        self._followers = torch.stack(followers).view(num_tokens, num_tokens, 3)
        self._first = first

    def draw(self, num_texts: int, length: int) -> Tensor:
        """int64 `[num_texts, length]`."""
        num_tokens, shares = len(self._followers), torch.tensor([0.75, 0.2, 0.05])
        tokens = list(torch.randint(num_tokens, (2, num_texts), generator=self._generator))
        for _ in range(length - 2):
            drawn = torch.multinomial(shares.expand(num_texts, 3), 1, generator=self._generator)
            tokens.append(self._followers[tokens[-2], tokens[-1], drawn[:, 0]])
        return torch.stack(tokens, dim=1) + self._first


def train_shipping(path: Path, chain: Chain, *, num_steps: int) -> Path:
    """A tiny GLM-4 MoE base that was trained on a chain together with its head, in PyTorch."""
    model_type, differences = SHIPPING["glm4_moe"]
    settings = {**COMMON, **differences, "num_hidden_layers": 3, "initializer_range": 0.05}
    config = AutoConfig.for_model(model_type, **settings)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    layers, size, place = model.model.layers, config.hidden_size, config.num_hidden_layers - 1
    head = nn.ModuleDict(
        {
            "enorm": nn.RMSNorm(size, config.rms_norm_eps),
            "hnorm": nn.RMSNorm(size, config.rms_norm_eps),
            "eh_proj": nn.Linear(2 * size, size, bias=False),
            "output_norm": nn.RMSNorm(size, config.rms_norm_eps),
        }
    )
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=num_steps)
    for _ in range(num_steps):
        token_ids = chain.draw(16, 32)
        model.model.layers = layers[:place]
        states = model.model(token_ids).last_hidden_state
        model.model.layers = layers
        embedded = head["enorm"](model.model.embed_tokens(token_ids[:, 1:]))
        x = head["eh_proj"](torch.cat([embedded, head["hnorm"](states[:, :-1])], dim=-1))
        y = head["output_norm"](_run_layer(layers[place], model.model.rotary_emb, config, x))
        loss = F.cross_entropy(
            model.lm_head(states[:, :-1]).flatten(0, 1), token_ids[:, 1:].flatten()
        )
        further = model.lm_head(y[:, :-1]).flatten(0, 1), token_ids[:, 2:].flatten()
        (loss + 0.3 * F.cross_entropy(*further)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.save_pretrained(path)
    trained = {
        name.replace("output_norm", "shared_head.norm"): tensor
        for name, tensor in head.state_dict().items()
    }
    return _ship(path, load_file(path / "model.safetensors"), trained)


def _run_layer(layer: Any, rotary: Any, config: Any, x: Tensor) -> Tensor:
    """The layer's output `[batch, num_tokens, hidden_size]` of whole contexts."""
    positions = torch.arange(x.shape[1])[None]
    mask = create_causal_mask(
        config=config, inputs_embeds=x, attention_mask=None, cache=None, position_ids=positions
    )
    output: Tensor = layer(
        x,
        attention_mask=mask,
        position_ids=positions,
        position_embeddings=rotary(x, positions),
    )
    return output


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
            "embed_tokens.weight": whole.model.embed_tokens.weight.detach().double(),
            "shared_head.head.weight": whole.lm_head.weight.detach().double(),
        }
        self._weights |= {
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
        with torch.no_grad():
            y = _run_layer(self._layer, self._rotary, self._config, x)
        return self._norm(y[0], "shared_head.norm")

    def logits(self, state: Tensor) -> Tensor:
        """`[vocab_size]`."""
        logits: Tensor = self._weights["shared_head.head.weight"] @ state
        return logits

    def _norm(self, x: Tensor, name: str) -> Tensor:
        mean_square = x.pow(2).mean(-1, keepdim=True) + self._config.rms_norm_eps
        normed: Tensor = x / mean_square.sqrt() * self._weights[f"{name}.weight"]
        return normed
