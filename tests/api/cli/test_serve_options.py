"""`loraplex serve`: how its options configure the engine and the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loraplex.api.cli import serve
from loraplex.api.settings import Settings
from loraplex.api.tools.tool_format import ToolFormatName
from loraplex.engine.config import Acceptance, EngineConfig, KvDtype, Quantization

ENGINE_OPTIONS = {
    "--quantize": "int8",
    "--quantize-group-size": "64",
    "--quantize-embeddings": "int4",
    "--dtype": "float16",
    "--device": "cpu",
    "--max-model-len": "101",
    "--max-num-seqs": "102",
    "--max-num-batched-tokens": "103",
    "--memory-gib": "8",
    "--arena-gib": "2",
    "--kv-cache-gib": "3",
    "--host-cache-gib": "4",
    "--kv-dtype": "fp8",
    "--num-loader-threads": "104",
    "--loader-duty": "0.25",
    "--swap-gib": "5",
    "--prefix-disk-gib": "6",
    "--prefix-disk-dir": "prefixes",
    "--attention-window": "105",
    "--attention-sinks": "106",
    "--target-itl": "107",
    "--target-ttft": "110",
    "--speculation": "ngram,early_exit:4",
    "--max-draft-tokens": "7",
    "--acceptance": "rejection",
    "--max-queued": "108",
    "--max-queued-per-tenant": "109",
    "--tenant-cap": "0.75",
    "--num-threads": "110",
}
REPEATED = ("--quantize-exclude", "*.o_proj", "--quantize-exclude", "*.layers.0.*")
SWITCHES = ("--enforce-eager", "--no-async-scheduling")
GIB = 1 << 30


class Started:
    """Stands in for the server; keeps what it was to be started with."""

    config: EngineConfig
    settings: Settings
    where: dict[str, Any]

    def __call__(self, settings: Settings, config: EngineConfig, **where: Any) -> None:
        self.settings, self.config, self.where = settings, config, where


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    started = Started()
    monkeypatch.setattr(serve, "_run", started)
    return started


def run(*options: str) -> None:
    result = CliRunner().invoke(serve.app, ["--model", "base", *options])
    assert result.exit_code == 0, result.output


def test_every_option_of_the_engine_reaches_it(started: Started) -> None:
    run(*(word for option in ENGINE_OPTIONS.items() for word in option), *REPEATED, *SWITCHES)
    assert started.config == EngineConfig(
        model="base",
        quantization=Quantization.INT8,
        quantization_group_size=64,
        quantization_exclude=("*.o_proj", "*.layers.0.*"),
        embedding_quantization=Quantization.INT4,
        dtype="float16",
        device="cpu",
        max_model_len=101,
        max_num_seqs=102,
        max_num_batched_tokens=103,
        enforce_eager=True,
        async_scheduling=False,
        memory_bytes=8 * GIB,
        arena_bytes=2 * GIB,
        kv_cache_bytes=3 * GIB,
        host_cache_bytes=4 * GIB,
        kv_dtype=KvDtype.FP8,
        num_loader_threads=104,
        loader_duty=0.25,
        swap_bytes=5 * GIB,
        prefix_disk_bytes=6 * GIB,
        prefix_disk_dir="prefixes",
        attention_window=105,
        attention_sinks=106,
        target_itl_ms=107,
        target_ttft_ms=110,
        speculation=("ngram", "early_exit:4"),
        max_draft_tokens=7,
        acceptance=Acceptance.REJECTION,
        max_queued=108,
        max_queued_per_tenant=109,
        tenant_cap=0.75,
        num_threads=110,
    )


def test_one_host_memory_replaces_its_two_parts(started: Started) -> None:
    run("--host-gib", "3", "--prefix-disk-gib", "1")
    assert started.config.host_bytes == 3 * GIB
    ended = CliRunner().invoke(serve.app, ["--model", "m", "--host-gib", "3", "--swap-gib", "1"])
    assert ended.exit_code != 0
    assert "part of --host-gib" in str(ended.exception)


def test_without_options_the_engine_has_its_defaults_and_drafts(started: Started) -> None:
    run()
    assert started.config == EngineConfig(model="base", speculation=("ngram",))
    assert started.config.async_scheduling is None
    assert started.where == {"host": "127.0.0.1", "port": 8000, "replicas": None}


def test_every_option_of_the_server_reaches_it(started: Started, tmp_path: Path) -> None:
    run(
        *("--host", "::1", "--port", "0", "--served-model-name", "b", "--database", "sqlite:///x"),
        *("--data-dir", str(tmp_path), "--store", str(tmp_path / "s"), "--tool-format", "mistral"),
        *("--reference-base", "r", "--max-reference-kl", "0.5", "--max-full-matrix-mib", "1.5"),
    )
    settings = started.settings
    assert started.where == {"host": "::1", "port": 0, "replicas": None}
    assert (settings.served_model_name, settings.database) == ("b", "sqlite:///x")
    assert (settings.data_dir, settings.store) == (tmp_path, str(tmp_path / "s"))
    assert settings.tool_format is ToolFormatName.MISTRAL
    assert (settings.reference_base, settings.max_reference_kl) == ("r", 0.5)
    assert settings.max_full_matrix_bytes == 3 << 19


@pytest.mark.parametrize("option", [name for name in ENGINE_OPTIONS if name.endswith("-gib")])
def test_no_memory_is_infinite(started: Started, option: str) -> None:
    result = CliRunner().invoke(serve.app, ["--model", "base", option, "inf"])
    assert result.exit_code == 2
    assert "finite" in result.output
