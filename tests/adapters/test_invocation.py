from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.lora.variants import calculate_alora_offsets

from loraplex.adapters.errors import AdapterRejected
from loraplex.adapters.examination import IntakeReport, examine
from loraplex.adapters.invocation import FIELD, adapter_start, invocation_of
from loraplex.adapters.layout import BaseLayout
from loraplex.adapters.served_features import check_activated
from support.layouts import full_layout_of
from support.models import make_adapter, make_tiny_llama, read_adapter_config

INVOCATION = (7, 3, 101)
TOKENS = st.integers(0, 3)
"""Few, so that invocations occur, overlap and begin without an end."""

Examine = Callable[..., IntakeReport]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def layout(base: Path) -> BaseLayout:
    return full_layout_of(base, with_digests=True)


@pytest.fixture
def examined(base: Path, layout: BaseLayout, tmp_path: Path) -> Examine:
    """Examines an adapter with these fields of LoraConfig; `written`: fields that PEFT would not
    combine with them, set in its file."""

    def run(written: Mapping[str, Any] | None = None, **lora: Any) -> IntakeReport:
        folder = make_adapter(base, tmp_path / "adapter", seed=1, **lora)
        fields = {**read_adapter_config(folder), **(written or {})}
        (folder / "adapter_config.json").write_text(json.dumps(fields))
        return examine(
            folder / "adapter_config.json",
            folder / "adapter_model.safetensors",
            tmp_path / "block",
            layout=layout,
            serving_dtype="float32",
            max_full_matrix_bytes=1 << 20,
        )

    return run


@given(st.lists(TOKENS, min_size=1, max_size=30), st.lists(TOKENS, min_size=1, max_size=4))
def test_start_is_that_of_peft(prompt: list[int], invocation: list[int]) -> None:
    config = LoraConfig(alora_invocation_tokens=invocation, task_type="CAUSAL_LM")
    (from_end,) = calculate_alora_offsets({"a": config}, "a", torch.tensor([prompt]))
    expected = None if from_end is None else len(prompt) - from_end
    assert adapter_start(prompt, tuple(invocation)) == expected


def test_an_adapter_without_invocation_acts_from_the_start() -> None:
    assert adapter_start([1, 2, 3], ()) == 0


def test_the_report_names_the_invocation_and_survives_the_database(examined: Examine) -> None:
    report = examined(alora_invocation_tokens=list(INVOCATION), task_type="CAUSAL_LM")
    assert report.invocation_token_ids == INVOCATION
    assert report.features == ("lora", "activated_lora")
    stored = json.loads(json.dumps({"invocation_token_ids": report.invocation_token_ids}))
    assert invocation_of(stored) == INVOCATION


def test_a_report_from_before_the_feature_has_no_invocation() -> None:
    assert invocation_of({"max_rank": 4}) == ()


def test_the_invocation_is_part_of_the_digest(examined: Examine) -> None:
    digests = {
        examined(alora_invocation_tokens=tokens, task_type="CAUSAL_LM").digest
        for tokens in (None, [7, 3], [3, 7])
    }
    assert len(digests) == 3


def test_an_invocation_outside_the_vocabulary_is_refused(examined: Examine, base: Path) -> None:
    num_tokens = json.loads((base / "config.json").read_text())["vocab_size"]
    with pytest.raises(AdapterRejected) as caught:
        examined(alora_invocation_tokens=[3, num_tokens], task_type="CAUSAL_LM")
    assert caught.value.reason == "invalid_invocation"
    assert caught.value.pointer == f"/{FIELD}"


@pytest.mark.filterwarnings("ignore")  # PEFT warns of saved embeddings
@pytest.mark.parametrize(
    "feature",
    [
        {"use_dora": True},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [3, 5]},
        {"target_modules": ["q_proj", "embed_tokens"]},
    ],
    ids=lambda feature: next(iter(feature)),
)
def test_what_acts_on_all_tokens_is_refused(examined: Examine, feature: dict[str, Any]) -> None:
    with pytest.raises(AdapterRejected) as caught:
        examined(**feature, written={FIELD: list(INVOCATION)})
    assert caught.value.reason == "unsupported_feature"
    assert caught.value.pointer == f"/{FIELD}"


@pytest.mark.parametrize("feature", ["router", "experts", "bias", "added_tokens"])
def test_features_that_only_other_bases_have_are_refused_too(feature: str) -> None:
    with pytest.raises(AdapterRejected, match=feature):
        check_activated(("lora", feature, "activated_lora"))
    check_activated(("lora", feature))
