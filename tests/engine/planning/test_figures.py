"""The sizes of a model card make a Llama of that size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from loraplex.engine.errors import InvalidParameter
from loraplex.engine.planning.figures import Figures, parse_params

LLAMA_8B = Figures(8_030_261_248, 32, 4096, 8, 128, 128_256)
MISTRAL_7B = Figures(7_241_732_096, 32, 4096, 8, 128, 32_000)


@pytest.mark.parametrize(
    ("figures", "width"), [(LLAMA_8B, 14_336), (MISTRAL_7B, 14_336)], ids=["llama", "mistral"]
)
def test_published_models_get_the_width_of_their_mlp(figures: Figures, width: int) -> None:
    assert figures.config(8192)["intermediate_size"] == width


def test_transformers_counts_the_parameters_that_were_given() -> None:
    settings = replace(LLAMA_8B, num_parameters=8_000_000_000).config(8192)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() == pytest.approx(8e9, rel=0.002)


@pytest.mark.parametrize(
    ("text", "number"), [("8b", 8 * 10**9), ("0.5B", 5 * 10**8), ("350m", 350 * 10**6), ("12", 12)]
)
def test_a_number_of_parameters_has_a_unit(text: str, number: int) -> None:
    assert parse_params(text) == number


@pytest.mark.parametrize("text", ["", "b", "many", "-8b", "nanb", "infb", "0"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidParameter, match="not a number such as 8b") as refusal:
        parse_params(text)
    assert refusal.value.param == "params"


@pytest.mark.parametrize(
    ("param", "figures"),
    [
        ("params", replace(LLAMA_8B, num_parameters=10**9)),
        ("hidden", replace(LLAMA_8B, head_dim=96)),
        ("kv_heads", replace(LLAMA_8B, num_kv_heads=5)),
    ],
)
def test_figures_of_no_model_are_refused(param: str, figures: Figures) -> None:
    with pytest.raises(InvalidParameter) as refusal:
        figures.config(8192)
    assert refusal.value.param == param
