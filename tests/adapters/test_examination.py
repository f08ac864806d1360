"""Adapters written by PEFT itself, examined, and their blocks compared with PEFT's own merge."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from loraplex.adapters import canonical
from loraplex.adapters.block import NUMPY_DTYPES, BlockPlan, read_block_header
from loraplex.adapters.errors import AdapterRejected
from loraplex.adapters.examination import IntakeReport, examine
from loraplex.adapters.layout import BaseLayout, Projection, Slice, SliceKind
from loraplex.adapters.weights import to_float32
from support.layouts import BASE_ID, layout_of
from support.models import ATTENTION_TARGETS, make_adapter, save_byte_tokenizer
from support.safetensors_files import make_lora, write_adapter

Matrix = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def layout(tiny_base: Path) -> BaseLayout:
    return layout_of(tiny_base)


def examine_folder(
    adapter: Path, layout: BaseLayout, output: Path, **settings: Any
) -> IntakeReport:
    return examine(
        adapter / "adapter_config.json",
        adapter / "adapter_model.safetensors",
        output,
        layout=layout,
        **{"serving_dtype": "float32", **settings},
    )


def refusal(adapter: Path, layout: BaseLayout, output: Path, **settings: Any) -> AdapterRejected:
    with pytest.raises(AdapterRejected) as caught:
        examine_folder(adapter, layout, output, **settings)
    assert not output.exists()
    return caught.value


def deltas_of_block(path: Path, layout: BaseLayout) -> dict[str, Matrix]:
    """scale·B·A `[out, in]` by module, read from a block."""
    header = read_block_header(path)
    assert header.base_id == layout.base_id
    data = np.fromfile(path, NUMPY_DTYPES[header.dtype], offset=header.payload_offset)
    payload = to_float32(data, header.dtype)
    deltas = {}
    for index, rank in header.ranks.items():
        part = layout.slices[index]
        a_offset, b_offset, _ = BlockPlan(layout, header.ranks).table[index]
        a = payload[a_offset : a_offset + rank * part.in_features].reshape(rank, -1)
        b = payload[b_offset : b_offset + rank * part.out_features].reshape(rank, -1)
        deltas[part.name] = np.float32(header.scales[index]) * (b.T @ a)
    return deltas


def deltas_of_peft(base: Path, adapter: Path) -> dict[str, Matrix]:
    """The change PEFT itself would merge `[out, in]`, by module."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    deltas = {}
    for name, module in model.base_model.model.named_modules():
        if isinstance(module, LoraLayer):
            delta = module.get_delta_weight("default").detach().float().numpy()
            deltas[name] = delta.T if getattr(module, "fan_in_fan_out", False) else delta
    return deltas


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank 1": {"r": 1},
    "rslora": {"use_rslora": True, "r": 6, "lora_alpha": 12},
    "rank pattern": {"rank_pattern": {"q_proj": 7, "0.mlp.up_proj": 2}},
    "alpha pattern": {"alpha_pattern": {"v_proj": 32, "layers.1.mlp.down_proj": 3}},
    "anchored pattern": {"alpha_pattern": {"^model.layers.0.self_attn.k_proj": 64}},
    "overlapping patterns": {
        "rank_pattern": {"1.self_attn.q_proj": 3, "q_proj": 5},
        "alpha_pattern": {"q_proj": 5, "0.self_attn.q_proj": 50},
        "use_rslora": True,
    },
    "one layer": {"layers_to_transform": [1]},
    "q and v": {"target_modules": ["q_proj", "v_proj"]},
    "pattern target": {"target_modules": r".*\.(q|down)_proj"},
    "all-linear": {"target_modules": "all-linear"},
    "causal task": {"task_type": "CAUSAL_LM"},
}


@pytest.mark.parametrize("lora", VARIANTS.values(), ids=VARIANTS.keys())
def test_block_holds_the_change_that_peft_merges(
    lora: dict[str, Any], tiny_base: Path, layout: BaseLayout, tmp_path: Path
) -> None:
    adapter = make_adapter(tiny_base, tmp_path / "adapter", seed=1, **lora)
    report = examine_folder(adapter, layout, tmp_path / "block")
    expected = deltas_of_peft(tiny_base, adapter)
    actual = deltas_of_block(tmp_path / "block", layout)
    assert actual.keys() == expected.keys()
    for module, delta in expected.items():
        np.testing.assert_allclose(actual[module], delta, atol=1e-6)
    norms = {module: float(np.linalg.norm(delta)) for module, delta in expected.items()}
    assert report.num_modules == len(expected)
    assert report.delta_norm == pytest.approx(np.linalg.norm(list(norms.values())), rel=1e-5)
    largest = report.largest_deltas[0]
    assert largest.norm == pytest.approx(max(norms.values()), rel=1e-5)
    assert norms[largest.module] == max(norms.values())
    assert report.warnings == ()


def test_conv1d_layers_bind_like_linear_ones(tmp_path: Path) -> None:
    base = tmp_path / "gpt2"
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=save_byte_tokenizer(base), n_embd=32, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(base)
    adapter = make_adapter(
        base,
        tmp_path / "adapter",
        seed=3,
        target_modules=["c_attn", "c_fc", "c_proj"],
        fan_in_fan_out=True,
    )
    layout = layout_of(base)
    report = examine_folder(adapter, layout, tmp_path / "block")
    assert report.targets == ("c_attn", "c_fc", "c_proj")
    actual = deltas_of_block(tmp_path / "block", layout)
    expected = deltas_of_peft(base, adapter)
    assert actual.keys() == expected.keys()
    for module, delta in expected.items():
        np.testing.assert_allclose(actual[module], delta, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float32, "F32"), (torch.float16, "F16"), (torch.bfloat16, "BF16")],
)
def test_block_keeps_the_tenants_own_values_in_their_own_type(
    dtype: torch.dtype, name: str, tiny_base: Path, layout: BaseLayout, tmp_path: Path
) -> None:
    adapter = make_adapter(tiny_base, tmp_path / "adapter", seed=2)
    path = adapter / "adapter_model.safetensors"
    tensors = {key: value.to(dtype) for key, value in load_file(path).items()}
    save_file(tensors, path)
    report = examine_folder(adapter, layout, tmp_path / "block")
    assert report.dtype == name
    block = (tmp_path / "block").read_bytes()
    assert report.size_bytes == len(block)
    assert report.file_sha256 == hashlib.sha256(block).hexdigest()
    for module, delta in deltas_of_block(tmp_path / "block", layout).items():
        prefix = f"base_model.model.{module}.lora_"
        a, b = tensors[f"{prefix}A.weight"].float(), tensors[f"{prefix}B.weight"].float()
        np.testing.assert_allclose(delta, 2.0 * (b @ a).numpy(), atol=1e-6)


def test_mixed_types_become_float32_without_loss(
    tiny_base: Path, layout: BaseLayout, tmp_path: Path
) -> None:
    adapter = make_adapter(tiny_base, tmp_path / "adapter", seed=2)
    path = adapter / "adapter_model.safetensors"
    dtypes = itertools.cycle([torch.float32, torch.bfloat16, torch.float16])
    tensors = {key: value.to(next(dtypes)) for key, value in load_file(path).items()}
    save_file(tensors, path)
    assert examine_folder(adapter, layout, tmp_path / "block").dtype == "F32"
    expected = deltas_of_peft(tiny_base, adapter)
    for module, delta in deltas_of_block(tmp_path / "block", layout).items():
        np.testing.assert_allclose(delta, expected[module], atol=1e-6)


def test_digest_is_of_the_content_not_of_the_files_layout(
    tiny_base: Path, layout: BaseLayout, tmp_path: Path
) -> None:
    adapter = make_adapter(tiny_base, tmp_path / "adapter", seed=4)
    first = examine_folder(adapter, layout, tmp_path / "first")
    path = adapter / "adapter_model.safetensors"
    save_file(dict(reversed(load_file(path).items())), path, metadata={"other": "metadata"})
    second = examine_folder(adapter, layout, tmp_path / "second")
    assert first == second
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_digest_differs_with_weights_scale_and_base(
    tiny_base: Path, layout: BaseLayout, tmp_path: Path
) -> None:
    adapters = [
        make_adapter(tiny_base, tmp_path / "one", seed=4),
        make_adapter(tiny_base, tmp_path / "two", seed=5),
        make_adapter(tiny_base, tmp_path / "three", seed=4, lora_alpha=9),
    ]
    digests = {examine_folder(path, layout, path / "block").digest for path in adapters}
    other_base = BaseLayout("sha256:other", layout.projections)
    digests.add(examine_folder(adapters[0], other_base, tmp_path / "block").digest)
    assert len(digests) == 4


def test_digest_tells_apart_types_that_share_their_bytes(
    tiny_base: Path, layout: BaseLayout, tmp_path: Path
) -> None:
    adapter = make_adapter(tiny_base, tmp_path / "adapter", seed=4)
    path = adapter / "adapter_model.safetensors"
    halves = {name: value.half() for name, value in load_file(path).items()}
    digests = set()
    for dtype in (torch.float16, torch.bfloat16):
        save_file({name: value.view(dtype) for name, value in halves.items()}, path)
        digests.add(examine_folder(adapter, layout, tmp_path / "block").digest)
    assert len(digests) == 2


Q = "q_proj"
SMALL = BaseLayout(
    BASE_ID, (Projection((Slice(Q, 8, 8), Slice("v_proj", 8, 4))),), {"lm_head": "no"}
)


def matrices(value: float = 1.0) -> dict[str, tuple[Matrix, Matrix]]:
    return {Q: (np.full((2, 8), value, np.float32), np.full((8, 2), value, np.float32))}


def test_reports_what_it_found(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", make_lora(matrices()), r=2, lora_alpha=4)
    report = examine_folder(adapter, SMALL, tmp_path / "block")
    assert (report.min_rank, report.max_rank, report.num_modules) == (2, 2, 1)
    assert report.num_parameters == 2 * (8 + 8)
    assert report.targets == (Q,)
    assert report.base_id == BASE_ID
    assert report.delta_norm == pytest.approx(2.0 * 2.0 * 8.0)  # scale · entry of B·A · √64


def test_refuses_an_adapter_whose_products_are_all_zero(
    tiny_base: Path, layout: BaseLayout, tmp_path: Path
) -> None:
    untrained = make_adapter(tiny_base, tmp_path / "untrained", seed=1, scale=0.0)
    assert refusal(untrained, layout, tmp_path / "block").reason == "no_effect"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_refuses_values_that_are_not_finite(value: float, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", make_lora(matrices(value)))
    error = refusal(adapter, SMALL, tmp_path / "block")
    assert error.reason == "non_finite_weights"
    assert error.pointer == f"base_model.model.{Q}.lora_A.weight"


def test_refuses_what_overflows_the_serving_type_only_once_scaled(tmp_path: Path) -> None:
    # B reaches 40,000, which float16 holds; times the scale of 2 it does not
    adapter = write_adapter(
        tmp_path / "adapter",
        make_lora({Q: (np.ones((2, 8), np.float32), np.full((8, 2), 4e4, np.float32))}),
        lora_alpha=4,
    )
    error = refusal(adapter, SMALL, tmp_path / "block", serving_dtype="float16")
    assert error.reason == "weights_overflow"
    assert error.pointer == f"base_model.model.{Q}.lora_B.weight"
    examine_folder(adapter, SMALL, tmp_path / "block", serving_dtype="bfloat16")


FULL = BaseLayout(
    BASE_ID,
    (
        Projection((Slice("embed_tokens", 9, 8, SliceKind.EMBEDDING),)),
        Projection((Slice(Q, 8, 8), Slice("v_proj", 8, 4))),
        Projection((Slice("lm_head", 8, 9),)),
    ),
)
PREFIX = "base_model.model."
IDLE = make_lora({Q: (np.ones((2, 8), np.float32), np.zeros((8, 2), np.float32))})
EMBEDDING_MATRIX = np.arange(72, dtype=np.float32).reshape(9, 8)
WHOLE: dict[str, Any] = {"max_full_matrix_bytes": 1 << 20}
ACTING_ALONE: dict[str, tuple[dict[str, Matrix], dict[str, Any]]] = {
    "magnitude": (
        {f"{PREFIX}{Q}.lora_magnitude_vector": np.ones(8, np.float32)},
        {"use_dora": True},
    ),
    "lora bias": ({f"{PREFIX}{Q}.lora_B.bias": np.ones(8, np.float32)}, {"lora_bias": True}),
    "bias": ({f"{PREFIX}{Q}.bias": np.ones(8, np.float32)}, {"bias": "all"}),
    "matrix": (
        {f"{PREFIX}embed_tokens.weight": EMBEDDING_MATRIX},
        {"modules_to_save": ["embed_tokens"]},
    ),
    "rows": (
        {f"{PREFIX}embed_tokens.token_adapter.trainable_tokens_delta": np.ones((2, 8), np.float32)},
        {"trainable_token_indices": [4, 1]},
    ),
}


@pytest.mark.parametrize(("tensors", "config"), ACTING_ALONE.values(), ids=ACTING_ALONE.keys())
def test_what_acts_without_any_product_is_not_called_ineffective(
    tensors: dict[str, Matrix], config: dict[str, Any], tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "acts", IDLE | tensors, **config)
    report = examine_folder(adapter, FULL, tmp_path / "block", **WHOLE)
    assert report.delta_norm == 0.0
    is_of_the_layer = any(f".{Q}." in name for name in tensors)
    assert [warning.code for warning in report.warnings] == (
        [] if is_of_the_layer else ["modules_without_effect"]
    )
    zeros = {name: np.zeros_like(values) for name, values in tensors.items()}
    silent = write_adapter(tmp_path / "silent", IDLE | zeros, **config)
    assert refusal(silent, FULL, tmp_path / "other", **WHOLE).reason == "no_effect"


@pytest.mark.parametrize("others", [{}, IDLE], ids=["alone", "beside zeros"])
def test_a_draft_head_is_no_effect_of_an_adapter(others: dict[str, Matrix], tmp_path: Path) -> None:
    """Alone it would be an adapter of which most servers hold nothing."""
    head = {f"{PREFIX}draft_head.{'0' * 64}": np.ones(40, np.float32)}
    adapter = write_adapter(tmp_path / "adapter", others | head)
    assert refusal(adapter, FULL, tmp_path / "block").reason == "no_effect"


@pytest.mark.parametrize(("tensors", "config"), ACTING_ALONE.values(), ids=ACTING_ALONE.keys())
@pytest.mark.parametrize(
    ("value", "reason"), [(np.nan, "non_finite_weights"), (1e5, "weights_overflow")]
)
def test_every_extra_is_checked_for_its_range(
    tensors: dict[str, Matrix],
    config: dict[str, Any],
    value: float,
    reason: str,
    tmp_path: Path,
) -> None:
    (name,) = tensors
    broken = tensors[name].copy()
    broken.flat[3] = value
    adapter = write_adapter(tmp_path / "adapter", IDLE | {name: broken}, **config)
    error = refusal(adapter, FULL, tmp_path / "block", serving_dtype="float16", **WHOLE)
    assert (error.reason, error.pointer) == (reason, name)


def test_an_adapter_without_any_rank_is_served(tmp_path: Path) -> None:
    tensors = {f"{PREFIX}lm_head.weight": EMBEDDING_MATRIX}
    adapter = write_adapter(tmp_path / "adapter", tensors, modules_to_save=["lm_head"])
    report = examine_folder(adapter, FULL, tmp_path / "block", **WHOLE)
    assert (report.min_rank, report.max_rank, report.num_modules) == (0, 0, 1)
    assert (report.num_parameters, report.targets) == (72, ("lm_head",))
    assert report.features == ("full_matrix",)


def test_a_copy_of_the_bases_own_matrix_is_left_out(tmp_path: Path) -> None:
    copied = {f"{PREFIX}embed_tokens.base_layer.weight": EMBEDDING_MATRIX}
    adapter = write_adapter(tmp_path / "adapter", make_lora(matrices()) | copied)
    digest = hashlib.sha256(EMBEDDING_MATRIX.tobytes()).hexdigest()
    known = replace(FULL, digests={"embed_tokens": [digest]})
    report = examine_folder(adapter, known, tmp_path / "block")
    (warning,) = report.warnings
    assert (warning.code, "omitted: " in warning.message) == ("base_weights_left_out", True)
    assert "embed_tokens" in warning.message
    plain = write_adapter(tmp_path / "plain", make_lora(matrices()))
    assert examine_folder(plain, known, tmp_path / "other").digest == report.digest
    for layout in (FULL, replace(FULL, digests={"embed_tokens": ["0" * 64]})):
        error = refusal(adapter, layout, tmp_path / "third")
        assert error.reason == "base_weights_included"


def test_a_saved_matrix_that_was_never_trained_has_no_effect(tmp_path: Path) -> None:
    saved = {f"{PREFIX}embed_tokens.weight": EMBEDDING_MATRIX}
    config = {"modules_to_save": ["embed_tokens"]}
    digest = hashlib.sha256(EMBEDDING_MATRIX.tobytes()).hexdigest()
    known = replace(FULL, digests={"embed_tokens": [digest]})
    idle = write_adapter(tmp_path / "idle", IDLE | saved, **config)
    assert refusal(idle, known, tmp_path / "block", **WHOLE).reason == "no_effect"
    acting = write_adapter(tmp_path / "acting", make_lora(matrices()) | saved, **config)
    (warning,) = examine_folder(acting, known, tmp_path / "block", **WHOLE).warnings
    assert warning.code == "modules_without_effect"


def test_whole_matrices_are_bounded_together_in_the_serving_type(tmp_path: Path) -> None:
    tensors = {f"{PREFIX}{name}.weight": EMBEDDING_MATRIX for name in ("lm_head", "embed_tokens")}
    adapter = write_adapter(
        tmp_path / "adapter", tensors, modules_to_save=["lm_head", "embed_tokens"]
    )
    needed = 2 * 72 * 2
    for allowed, reason in ((0, "full_matrix_not_allowed"), (needed - 1, "full_matrix_too_large")):
        error = refusal(
            adapter,
            FULL,
            tmp_path / "block",
            serving_dtype="bfloat16",
            max_full_matrix_bytes=allowed,
        )
        assert error.reason == reason
        assert "--max-full-matrix-mib" in str(error)
    examine_folder(
        adapter,
        FULL,
        tmp_path / "block",
        serving_dtype="bfloat16",
        max_full_matrix_bytes=needed,
    )


def test_refuses_a_declared_base_that_is_not_this_one(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", make_lora(matrices()))
    error = refusal(adapter, SMALL, tmp_path / "block", declared_base_id="sha256:" + "c" * 64)
    assert error.reason == "base_mismatch"
    examine_folder(adapter, SMALL, tmp_path / "block", declared_base_id=BASE_ID)


def test_refuses_an_adapter_of_another_base(tiny_base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(
        tiny_base, tmp_path / "adapter", seed=1, target_modules=ATTENTION_TARGETS
    )
    assert refusal(adapter, SMALL, tmp_path / "block").reason == "wrong_base"


def warnings_of(adapter: Path, output: Path, **settings: Any) -> dict[str, str]:
    report = examine_folder(adapter, SMALL, output, **settings)
    return {warning.code: warning.message for warning in report.warnings}


def test_warns_of_what_has_no_effect_or_differs(tmp_path: Path) -> None:
    idle = {"v_proj": (np.ones((2, 8), np.float32), np.zeros((4, 2), np.float32))}
    adapter = write_adapter(
        tmp_path / "adapter",
        make_lora(matrices() | idle),
        base_model_name_or_path="someone/another-base",
        target_modules=[Q, "v_proj", "o_proj"],
        alpha_pattern={"k_proj": 8},
    )
    warnings = warnings_of(adapter, tmp_path / "block", base_model_name="owner/this-base")
    assert warnings == {
        "base_name_differs": "trained on 'someone/another-base', served on 'owner/this-base'",
        "pattern_unmatched": "no trained module matches 'k_proj'",
        "target_without_tensors": ("named as targets, but the file has no tensors for 'o_proj'"),
        "modules_without_effect": "zero or equal to the base's, so without effect: 'v_proj'",
    }


def test_does_not_warn_of_the_same_base_elsewhere(tmp_path: Path) -> None:
    adapter = write_adapter(
        tmp_path / "adapter",
        make_lora(matrices()),
        base_model_name_or_path="/data/models/Tiny-Base/",
        target_modules=[Q],
    )
    assert warnings_of(adapter, tmp_path / "block", base_model_name="owner/tiny-base") == {}


def test_refuses_a_block_whose_header_no_reader_would_accept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_adapter(tmp_path / "adapter", make_lora(matrices()))
    monkeypatch.setattr(canonical, "MAX_HEADER_BYTES", 512)
    assert refusal(adapter, SMALL, tmp_path / "block").reason == "too_many_tensors"


def test_replaces_what_an_earlier_examination_left(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", make_lora(matrices()))
    examine_folder(adapter, SMALL, tmp_path / "first")
    (tmp_path / "second").write_bytes(b"x" * 1_000_000)
    examine_folder(adapter, SMALL, tmp_path / "second")
    assert (tmp_path / "second").read_bytes() == (tmp_path / "first").read_bytes()
