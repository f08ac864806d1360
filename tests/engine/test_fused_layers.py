"""Fused norms, rotary embeddings and gated activations: whose layers they replace, and whose not.

Bases on the CPU are fused as on CUDA here, with the plain ops in place of the kernels. Which layers
of each family keep their own code is in `test_families`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from loraplex.engine.config import EngineConfig, Quantization
from loraplex.engine.model import fused_layers, fused_rotary, whole_base
from loraplex.engine.model.agreement import agree
from loraplex.engine.model.attention_windows import LayerProbe
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.forward import current_forward
from loraplex.engine.model.fused_layers import NO_LAYERS, FusedLayers, Share
from loraplex.engine.model.whole_base import load_base_model
from loraplex.kernels.rms_norm import NormForm, plain_rms_norm, rms_norm
from support.cpu_kernels import needs_cpu_library, remove_cpu_library
from support.engine import LocalEngine
from support.families import SERVED, save_family
from support.fused import own_rotary_afterwards
from support.paged import paged_logits

SEQUENCES = [[1, 2, 3, 4, 5, 6, 7, 8], list(range(40, 70))]
LLAMA = FusedLayers(Share(5, 5), Share(2, 2), Share(2, 2))
"""Of two layers: two norms each and the last, an MLP each, and a rotary embedding each."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("llama"), *SERVED["llama"])


@pytest.fixture(autouse=True)
def _as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(whole_base, "fuses_layers", lambda _device: True)
    with own_rotary_afterwards():
        yield


def load(path: Path, **settings: Any) -> BaseModel:
    return load_base_model(EngineConfig(str(path), device="cpu", **settings))


def fused_parts(base: BaseModel) -> FusedLayers | None:
    """What is fused, but for whole layers, of which `test_decoder_layers` tells."""
    return base.fused and replace(base.fused, layers=NO_LAYERS)


def dense_logits(path: Path, tokens: list[int]) -> Tensor:
    dense = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits: Tensor = dense(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


@needs_cpu_library
def test_bases_on_the_cpu_are_fused_where_its_library_is(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_base, "fuses_layers", fused_layers.fuses_layers)
    assert fused_parts(load(llama)) == LLAMA
    remove_cpu_library(monkeypatch)
    assert load(llama).fused is None
    assert fused_layers.fuses_layers(torch.device("cuda"))


@needs_cpu_library
def test_the_memory_plan_of_a_fused_base_says_so(llama: Path, tmp_path: Path) -> None:
    engine = LocalEngine(llama, tmp_path, dtype="float32")
    assert engine.core.info.memory_plan[-1] == (
        "fused: 5 of 5 RMS norms, 2 of 2 gated activations, 2 of 2 rotary embeddings, "
        "2 of 2 decoder layers"
    )


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_every_layer_of_a_llama_is_fused(llama: Path, settings: dict[str, str]) -> None:
    if "quantization" in settings:
        base = load(llama, quantization=Quantization(settings["quantization"]))
    else:
        base = load(llama, **settings)
    assert fused_parts(base) == LLAMA


def test_only_a_served_model_s_steps_use_the_replacements(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = load(llama)
    expected = dense_logits(llama, SEQUENCES[1])

    def no_call(*_args: object) -> None:
        raise AssertionError("replaced")

    for module, name in (
        (fused_layers, "rms_norm"),
        (fused_layers, "gated_activation"),
        (fused_rotary, "rotary"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, no_call)
            assert torch.equal(dense_logits(llama, SEQUENCES[1]), expected)
            with pytest.raises(AssertionError, match="replaced"):
                paged_logits(base, SEQUENCES)
            base.forget_step()


def scaled_norm(self: Any, hidden_states: Tensor) -> Tensor:
    return 1.001 * plain_rms_norm(
        hidden_states, self.weight, self.variance_epsilon, NormForm.ROUNDED_FIRST
    )


def norm_with_another_eps(self: Any, hidden_states: Tensor) -> Tensor:
    eps = 1.1 * self.variance_epsilon
    return plain_rms_norm(hidden_states, self.weight, eps, NormForm.ROUNDED_FIRST)


def gated_norm(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
    eps = self.variance_epsilon
    y = plain_rms_norm(hidden_states, self.weight, eps, NormForm.ROUNDED_FIRST)
    return y if gate is None else y * gate


def rectified_mlp(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.down_proj(F.relu(self.gate_proj(x)) * self.up_proj(x))
    return out


def scaled_mlp(self: Any, x: Tensor) -> Tensor:
    out: Tensor = 0.9 * self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
    return out


def swapped_mlp(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.down_proj(F.silu(self.up_proj(x)) * self.gate_proj(x))
    return out


def backward_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, ...]:
    return tuple(x * cos[:, None] - modeling_llama.rotate_half(x) * sin[:, None] for x in (q, k))


@pytest.mark.parametrize(
    ("owner", "name", "own", "kind"),
    [
        (modeling_llama.LlamaRMSNorm, "forward", scaled_norm, "norms"),
        (modeling_llama.LlamaRMSNorm, "forward", norm_with_another_eps, "norms"),
        (modeling_llama.LlamaRMSNorm, "forward", gated_norm, "norms"),
        (modeling_llama.LlamaMLP, "forward", rectified_mlp, "activations"),
        (modeling_llama.LlamaMLP, "forward", scaled_mlp, "activations"),
        (modeling_llama.LlamaMLP, "forward", swapped_mlp, "activations"),
        (modeling_llama, "apply_rotary_pos_emb", backward_rotary, "rotary"),
    ],
)
def test_a_layer_that_computes_something_else_keeps_its_own_code(
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    own: Callable[..., Any],
    kind: str,
) -> None:
    monkeypatch.setattr(owner, name, own)
    base = load(llama)
    for other in ("norms", "activations", "rotary"):
        share = getattr(LLAMA, other)
        expected = Share(0, share.num_layers) if other == kind else share
        assert getattr(base.fused, other) == expected
    (ours,) = paged_logits(base, SEQUENCES[1:])
    assert (ours - dense_logits(llama, SEQUENCES[1])).abs().max() < 1e-4


def test_calls_of_other_models_do_not_count_while_a_rotary_embedding_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, angle = torch.ones(1, 1, 2, 8), torch.full((1, 2, 8), 0.5)

    def run_probe(_model: object, probe: LayerProbe) -> None:
        for context in (probe, LayerProbe(), None):
            token = current_forward.set(context)
            modeling_llama.apply_rotary_pos_emb(q, q, angle, angle)
            current_forward.reset(token)

    monkeypatch.setattr(fused_rotary, "run_probe", run_probe)
    assert fused_rotary.fuse_rotary(modeling_llama.LlamaRMSNorm(8)) == (1, 1)


def test_a_replacement_that_rounds_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rounded_last(x: Tensor, weight: Tensor, eps: float, _form: NormForm) -> Tensor:
        return rms_norm(x, weight, eps, NormForm.ROUNDED_LAST)

    path = save_family(tmp_path, *SERVED["llama"])
    weights = load_file(path / "model.safetensors")
    for name, weight in weights.items():
        if "norm" in name:  # all ones, which leave nothing to round
            weight.uniform_(0.5, 1.5)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    assert fused_parts(load(path, dtype="bfloat16")) == LLAMA
    monkeypatch.setattr(fused_layers, "rms_norm", rounded_last)
    assert fused_parts(load(path, dtype="bfloat16")) == replace(LLAMA, norms=Share(0, 5))
    assert fused_parts(load(path)) == LLAMA, "in fp32 there is one rounding"


def test_a_norm_of_another_dtype_is_computed_by_its_own_code(llama: Path) -> None:
    norm = load(llama).model.get_submodule("model.norm")
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    expected = type(norm).forward(norm, x)
    assert torch.equal(norm(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_results_agree_if_few_elements_differ_in_their_last_bits(dtype: torch.dtype) -> None:
    theirs = torch.randn(8, 64).to(dtype)
    assert agree(theirs.clone(), theirs)
    near = torch.nextafter(theirs, torch.full_like(theirs, torch.inf))
    few = torch.arange(theirs.numel()).view_as(theirs) % 200 == 0
    assert agree(theirs.where(~few, near), theirs)
    assert agree(near, theirs) == (dtype is torch.float32), "too many"
    for wrong in (theirs * 1.05, theirs.where(~few, theirs + 0.1), theirs.where(~few, torch.nan)):
        assert not agree(wrong.to(dtype), theirs)
    assert not agree(theirs.double(), theirs)
    assert not agree(theirs[:4], theirs)
