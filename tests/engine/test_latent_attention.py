"""Latent attention over cached latents: sizes, which layers it serves, and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from loraplex.engine.config import EngineConfig, KvDtype, Quantization
from loraplex.engine.kv.cache import kv_bytes_per_block
from loraplex.engine.kv.groups import LayerKvShape
from loraplex.engine.kv.layout import KvGroup
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.forward import StepAdaptersBuilder
from loraplex.engine.model.latent_attention import EXPANSION, replace_latents
from loraplex.engine.model.whole_base import load_base_model
from loraplex.kernels.kv_pages import KeyPrefix, make_pages
from loraplex.kernels.linear import DenseLinear
from loraplex.kernels.lora_batch import AdapterRun, LoraBatchBuilder
from support.families import SERVED, VOCAB_SIZE, YARN, save_family
from support.features import Feature, dense_logits, make_world
from support.marks import marked_slow
from support.paged import paged_logits

TOLERANCE = 1e-4
RANK, ROTARY = 16, 8
"""Those of the tiny configurations."""
MODEL_TYPE, SETTINGS = SERVED["deepseek_v3-mla"]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "queries-from-a-latent-and-yarn": (
        MODEL_TYPE,
        {
            **SETTINGS,
            "q_lora_rank": 32,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
    "rope-in-halves": (MODEL_TYPE, {**SETTINGS, "rope_interleave": False}),
    "v2": SERVED["deepseek_v2-mla"],
}
EXPANDING = [EXPANSION, "o_proj"]
FEATURES: dict[str, Feature] = {
    "the expansion": {"target_modules": EXPANDING},
    "the expansion of one layer": {"target_modules": [EXPANSION], "layers_to_transform": [1]},
    "dora": {"target_modules": EXPANDING, "use_dora": True, "r": 5},
    "bias": {"target_modules": EXPANDING, "lora_bias": True},
    "dora of a high rank": {"target_modules": [EXPANSION], "use_dora": True, "r": 33},
    "all but the expansion": {"target_modules": ["q_proj", "kv_a_proj_with_mqa", "o_proj"]},
}


def random_sequences(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def load(path: Path, **settings: Any) -> BaseModel:
    return load_base_model(EngineConfig(str(path), device="cpu", **settings))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("tiny"), MODEL_TYPE, SETTINGS)


def expanded_logits(path: Path, sequences: list[list[int]]) -> list[Tensor]:
    """With keys and values of every head in the cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loraplex.engine.model.whole_base.replace_latents", lambda _model: [])
        base = load(path)
    assert not base.kv_shapes[0].is_latent
    return paged_logits(base, sequences)


@pytest.mark.parametrize("variant", marked_slow(VARIANTS, slow={"rope-in-halves", "v2"}))
def test_logits_equal_the_expanded_form_and_transformers(variant: str, tmp_path: Path) -> None:
    path = save_family(tmp_path, *VARIANTS[variant])
    base = load(path)
    assert all(shape.is_latent for shape in base.kv_shapes)
    sequences = random_sequences(41, 1, 26)
    dense = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    results = zip(
        paged_logits(base, sequences), expanded_logits(path, sequences), sequences, strict=True
    )
    for ours, expanded, tokens in results:
        assert (ours - expanded).abs().max() < TOLERANCE
        assert (ours - dense_logits(dense, tokens)).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("kv_dtype", "vector_bytes"),
    [(KvDtype.AUTO, 4 * (RANK + ROTARY)), (KvDtype.INT8, RANK + ROTARY + 2)],
)
def test_a_token_takes_one_latent_and_one_rotary_key_in_each_layer(
    tiny: Path, kv_dtype: KvDtype, vector_bytes: int
) -> None:
    base = load(tiny, kv_dtype=kv_dtype)
    group = KvGroup((0, 1), window=None, sinks=0, num_blocks=2)
    num_bytes = kv_bytes_per_block(group, base.kv_shapes, block_size=16, kv_format=base.kv_format)
    assert num_bytes == 2 * 16 * vector_bytes


def test_deepseek_v3_stores_a_71st_of_expanded_heads() -> None:
    expanded = LayerKvShape(128, 192, 128)
    latent = LayerKvShape(1, 576, 512, is_latent=True)
    assert expanded.num_heads * sum(expanded.stored_dims) // sum(latent.stored_dims) == 71


def test_the_expansion_stays_dense_in_a_quantized_base(tmp_path: Path) -> None:
    without_routers = {**SETTINGS, "first_k_dense_replace": 2}  # they turn roundings into jumps
    tiny = save_family(tmp_path, MODEL_TYPE, without_routers)
    base = load(tiny, quantization=Quantization.INT8)
    kinds = {fused.projection.slices[0].name: type(fused.linear) for fused in base.projections}
    assert base.absorbed == tuple(name for name in kinds if name.endswith(EXPANSION))
    assert all((kind is DenseLinear) == (name in base.absorbed) for name, kind in kinds.items())
    sequences = random_sequences(30, 5)
    for ours, exact in zip(
        paged_logits(base, sequences), paged_logits(load(tiny), sequences), strict=True
    ):
        assert (ours - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.parametrize("change", ["another expansion", "a bias", "no expansion"])
def test_an_attention_that_computes_something_else_keeps_expanded_heads(
    tiny: Path, change: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    for layer in model.model.layers:
        attention: Any = layer.self_attn
        own = attention.expand_kv
        match change:
            case "another expansion":
                attention.expand_kv = lambda latent, key, own=own: own(2 * latent, key)
            case "a bias":
                attention.kv_b_proj.bias = torch.nn.Parameter(torch.ones(4 * 40))
            case _:
                attention.kv_b_proj = torch.nn.Identity()
    assert replace_latents(model) == []


def test_outside_of_a_step_the_model_is_transformers_own(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="eager").eval()
    (tokens,) = random_sequences(20)
    expected = dense_logits(model, tokens)
    assert len(replace_latents(model)) == 2
    assert torch.equal(dense_logits(model, tokens), expected)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_world(tmp_path_factory.mktemp("world"), "deepseek_v2-mla", list(FEATURES.values()))


@pytest.mark.slow
def test_adapters_of_the_expansion_equal_peft_in_one_mixed_batch(world: Any) -> None:
    sequences = world.sequences()
    logits = world.serve(sequences)
    rows = zip(FEATURES, world.tuned, sequences[1:-1], logits[1:-1], strict=True)
    for name, model, tokens, ours in rows:
        expected, plain = dense_logits(model, tokens), dense_logits(world.plain, tokens)
        assert (expected - plain).abs().max() > 100 * TOLERANCE, f"{name} must have an effect"
        assert (ours - expected).abs().max() < TOLERANCE, name
    unadapted = world.serve(sequences, with_adapters=False)
    for index in (0, -1):
        assert (logits[index] - unadapted[index]).abs().max() < 1e-5, (
            "a rounding of experts at most"
        )


def test_a_step_whose_adapters_change_the_expansion_is_no_graph(world: Any) -> None:
    base = world.base
    builder = StepAdaptersBuilder(
        LoraBatchBuilder(world.arena, base.device), base.layout, base.head_name, base.absorbed
    )
    needs = [builder.needs([AdapterRun(1, *adapter)]) for adapter in world.rows]
    assert [found is None for found in needs] == [
        name != "all but the expansion" for name in FEATURES
    ]


def test_values_are_a_view_of_keys(tiny: Path) -> None:
    size = (3, 4, 1, RANK + ROTARY)
    keys = make_pages(size, dtype=torch.float32, code_dtype=None, device=torch.device("cpu"))
    values = KeyPrefix(keys, RANK)
    vectors = torch.randn(2, 1, RANK + ROTARY)
    keys.write(torch.tensor([5, 11]), vectors)
    blocks = values.gather(torch.tensor([1, 2])).flatten(0, 1)
    assert torch.equal(blocks[[1, 7]], vectors[..., :RANK])
