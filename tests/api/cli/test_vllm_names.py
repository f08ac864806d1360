"""Options of vLLM on the command line of `loraplex serve`."""

from __future__ import annotations

import re
from typing import Any

import pytest
from typer.testing import CliRunner

from loraplex.api.cli import load_command, serve
from loraplex.api.cli.exit_codes import CommandFailed, ExitCode
from loraplex.api.tools.reasoning_format import ReasoningParser
from loraplex.api.tools.tool_format import ToolFormatName
from loraplex.api.vllm_names import OPTIONS, SHORT, VALUES
from loraplex.engine.config import EngineConfig, KvDtype, Quantization


def own_flags() -> set[str]:
    options = load_command("serve").params
    return {flag for each in options for flag in (*each.opts, *each.secondary_opts)}


def refusal(*arguments: str) -> str:
    ended = CliRunner().invoke(serve.app, ["base", *arguments])
    assert isinstance(ended.exception, CommandFailed), ended.output
    assert ended.exception.exit_code == ExitCode.USAGE
    return str(ended.exception)


def test_a_command_line_of_vllm_serves_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(
        serve, "_run", lambda settings, config, **where: started.append((settings, config, where))
    )
    words = [
        *("owner/base", "--dtype", "float16", "--max-model-len", "4096", "--max-num-seqs", "32"),
        *("--quantization", "fp8", "--max-num-batched-tokens", "2048", "--kv-cache-dtype", "fp8"),
        *("--swap-space", "4", "--enforce-eager", "--tensor-parallel-size", "1"),
        *("--served-model-name", "name", "--tool-call-parser", "llama3_json"),
        *("--reasoning-parser", "deepseek_r1"),
        *("--host", "0.0.0.0", "--port", "8001"),
    ]
    assert CliRunner().invoke(serve.app, words).exit_code == 0
    settings, config, where = started[0]
    assert config == EngineConfig(
        "owner/base",
        dtype="float16",
        max_model_len=4096,
        max_num_seqs=32,
        quantization=Quantization.FP8,
        max_num_batched_tokens=2048,
        kv_dtype=KvDtype.FP8,
        swap_bytes=4 << 30,
        enforce_eager=True,
        speculation=("ngram",),
    )
    assert settings.served_model_name == "name"
    assert settings.tool_format == ToolFormatName("llama3_json")
    assert settings.reasoning_parser == ReasoningParser("deepseek_r1")
    assert (where["host"], where["port"]) == ("0.0.0.0", 8001)


def test_no_option_is_refused_that_is_ours() -> None:
    assert not own_flags() & {f"--{name}" for name in OPTIONS}


def test_every_option_that_a_remedy_names_is_ours() -> None:
    others = {"--revision", "--local-dir", "--tenant", "--help"}
    remedies = (*OPTIONS.values(), *SHORT.values())
    named = {flag for remedy in remedies for flag in re.findall(r"--[a-z][a-z-]+", remedy)}
    assert named - others <= own_flags()


def test_each_option_is_answered_with_what_to_do() -> None:
    for name, remedy in OPTIONS.items():
        assert refusal(f"--{name}") == f"--{name}: {remedy}"
        assert remedy.endswith((".", "`."))
    for name, remedy in SHORT.items():
        assert refusal(name, "2") == f"{name}: {remedy}"


def test_all_of_them_are_named_at_once() -> None:
    message = refusal("--gpu-memory-utilization=0.9", "--enable_lora", "--max-loras", "4")
    assert len(message.splitlines()) == 4
    for flag in ("--gpu-memory-utilization", "--enable_lora", "--max-loras"):
        assert f"\n  {flag}: " in message


def test_a_value_that_only_vllm_knows_is_answered() -> None:
    for field, flag in (("quantization", "--quantization"), ("kv_dtype", "--kv-cache-dtype")):
        for value, remedy in VALUES[field].items():
            ended = CliRunner().invoke(load(), ["base", flag, value])
            assert ended.exit_code == ExitCode.USAGE
            assert " ".join(remedy.split()) in " ".join(ended.output.split())


def load() -> Any:
    """The command without Rich's boxes around its errors."""
    serve.app.rich_markup_mode = None
    return serve.app
