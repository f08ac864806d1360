"""Options that the fields of a configuration declare."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import fields

import pytest

from loraplex.engine.config import GIB, EngineConfig
from loraplex.engine.errors import InvalidParameter
from loraplex.engine.option import options_of

NOT_OPTIONS = {
    "kv_block_size",
    "prefix_caching",
    "trainer_bytes",
    "trainer_cpus",
    "trainer_device",
}


def test_every_field_is_an_option_or_fixed() -> None:
    names = {field.name for field in fields(EngineConfig)}
    assert set(options_of(EngineConfig)) == names - NOT_OPTIONS


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("num_loader_threads", 0, "must be at least 1"),
        ("loader_duty", 0.0, "must be at least 0.01"),
        ("loader_duty", float("nan"), "must be at least 0.01"),
        ("attention_window", 0, "must be at least 1"),
        ("attention_sinks", -1, "must be at least 0"),
        ("max_draft_tokens", 65, "must be at most 64"),
        ("tenant_cap", 1.1, "must be at most 1.0"),
    ],
)
def test_a_value_outside_the_limits_is_refused(field: str, value: float, problem: str) -> None:
    with pytest.raises(InvalidParameter, match=problem):
        EngineConfig("m", **{field: value})  # type: ignore[arg-type]


def test_a_limit_in_gib_is_one_of_the_option_alone() -> None:
    assert options_of(EngineConfig)["arena_bytes"].unit == GIB
    assert EngineConfig("m", arena_bytes=0).arena_bytes == 0


def test_the_configuration_needs_no_library() -> None:
    code = "import sys, loraplex.engine.config; print([n for n in sys.modules if '.' not in n])"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert not {"pydantic", "typer", "torch", "msgspec"} & set(ast.literal_eval(found))
