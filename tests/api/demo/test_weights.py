"""The shipped weights match the manifest, and were made with the recipe in the code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loraplex.api.demo.manifest import WEIGHTS, hashes, read_manifest, recipe_as_json
from loraplex.api.demo.recipe import BASE_NAME, RECIPE
from loraplex.api.demo.task import ADAPTER_STYLES, NUM_HELD_OUT

MAX_BYTES = 3_500_000


def test_every_file_has_the_hash_that_the_manifest_lists() -> None:
    assert hashes(WEIGHTS) == read_manifest().sha256


def test_a_changed_byte_shows(tmp_path: Path) -> None:
    path = tmp_path / "sql" / "adapter_config.json"
    path.parent.mkdir()
    path.write_bytes(b"{}")
    before = hashes(tmp_path)
    path.write_bytes(b"[]")
    assert before.keys() == hashes(tmp_path).keys() == {"sql/adapter_config.json"}
    assert before != hashes(tmp_path)


def test_the_weights_are_those_of_the_recipe_in_the_code() -> None:
    assert read_manifest().recipe == recipe_as_json(RECIPE)


def test_weights_stay_small() -> None:
    assert sum(path.stat().st_size for path in WEIGHTS.rglob("*")) < MAX_BYTES


@pytest.mark.parametrize("style", ADAPTER_STYLES)
def test_measured_accuracies_leave_room_above_what_the_demo_demands(style: str) -> None:
    accuracy = read_manifest().accuracies[style]
    assert accuracy.num_requests == NUM_HELD_OUT
    assert min(accuracy.num_exact, accuracy.num_exact_int8) >= 0.95 * NUM_HELD_OUT


@pytest.mark.parametrize("style", ADAPTER_STYLES)
def test_adapters_name_no_place_on_the_machine_that_trained_them(style: str) -> None:
    config = json.loads((WEIGHTS / style / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == BASE_NAME
    assert config["peft_type"] == "LORA"
