"""Mistakes of new users: each ends with one message that says what to do, and its exit code."""

from __future__ import annotations

import io
import json
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from loraplex.api import cli
from loraplex.api.cli.exit_codes import ExitCode
from loraplex.api.server import planes, runtime
from loraplex.api.telemetry import logs
from support.server import Caller, ServerUnderTest

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NOBODY = "nobody"
TENANT = "tenant"
OPERATOR = "operator"


class Mistake(NamedTuple):
    """A command and what answers it. Words and variables may name the places of `places`."""

    command: str
    exit_code: ExitCode
    message: str
    """A part of the error."""
    caller: str = NOBODY
    stdin: str = ""
    variables: Mapping[str, str] = {}


SERVE = "serve {base} --data-dir {unused} --port 0 "
WITHOUT_BASE = "--data-dir {unused} --port 0 "
_USAGE, _ADAPTER = ExitCode.USAGE, ExitCode.INVALID_ADAPTER

COMMANDS = [
    Mistake("serv", _USAGE, "No such command 'serv'. Did you mean 'serve'"),
    Mistake("adapter list", _USAGE, "Did you mean 'adapters'?"),
    Mistake("adapters lst", _USAGE, "Did you mean 'list'"),
    Mistake("adapters pus", _USAGE, "Did you mean 'push'"),
    Mistake("tenant create acme", _USAGE, "Did you mean 'tenants'?"),
    Mistake("xyzzy", _USAGE, "No such command 'xyzzy'."),
    Mistake("--vesion", _USAGE, "No such option: --vesion"),
    Mistake("adapters push", _USAGE, "Missing argument"),
    Mistake("adapters list --api-key x", _USAGE, "No such option: --api-key"),
]
SERVERS = [
    Mistake("serve", _USAGE, "Missing model. Give MODEL or --model"),
    Mistake("agent --certificates x", _USAGE, "Missing model. Give MODEL or --model"),
    Mistake("agent {base}", _USAGE, "Missing option --certificates"),
    Mistake("serve a b", _USAGE, "unexpected extra argument"),
    Mistake("serve a --model b", _USAGE, "Two models are given: a and --model b."),
    Mistake(SERVE + "--quantise int8", _USAGE, "No such option: --quantise"),
    Mistake(SERVE + "--max_model_len 9", _USAGE, "--max-model-len"),
    Mistake(SERVE + "--quantize int3", _USAGE, "'int3' is not one of 'none', 'int8', 'int4'"),
    Mistake(SERVE + "--quantization awq", _USAGE, "A checkpoint in this format is served as it is"),
    Mistake(SERVE + "--kv-cache-dtype fp8_e5m2", _USAGE, "fp8 is e4m3."),
    Mistake(SERVE + "--gpu-memory-utilization 0.9", _USAGE, "--memory-gib limits the memory"),
    Mistake(SERVE + "--enable-lora --max-loras 4", _USAGE, "a batch mixes any number of adapters"),
    Mistake(SERVE + "--lora-modules a=b", _USAGE, "`loraplex adapters import NAME=PATH ...`"),
    Mistake(SERVE + "--chat-template x.jinja", _USAGE, "chat_template.jinja in the model's folder"),
    Mistake(SERVE + "--revision main", _USAGE, "hf download OWNER/NAME --revision"),
    Mistake(SERVE + "--ssl-ca-certs x.pem", _USAGE, "A proxy in front of the server does this"),
    Mistake(SERVE + "--generation-config vllm", _USAGE, "It is named none"),
    Mistake(SERVE + "--reasoning-parser seed_oss9", _USAGE, "'seed_oss9' is not one of 'none'"),
    Mistake(SERVE + "--enable-reasoning", _USAGE, "--reasoning-parser"),
    Mistake(SERVE + "--api-key x", _USAGE, "`loraplex keys create --tenant SLUG`"),
    Mistake(SERVE + "--trust-remote-code", _USAGE, "Code of a checkpoint is never run"),
    Mistake(SERVE + "--data-parallel-size 2", _USAGE, "Use a fleet of replicas"),
    Mistake(
        SERVE + "--tool-call-parser pythonesque", _USAGE, "'pythonesque' is not one of 'deepseek"
    ),
    Mistake(
        SERVE + "--speculation lookahead", _USAGE, "lookahead is not one of ngram, suffix, draft"
    ),
    Mistake(SERVE + "--port 99999", _USAGE, "less than or equal to 65535"),
    Mistake(SERVE + "--port http", _USAGE, "Invalid value for --port"),
    Mistake(SERVE + "--max-num-seqs 0", _USAGE, "greater than or equal to 1"),
    Mistake(SERVE + "--max-num-seqs 64 --max-num-batched-tokens 64", _USAGE, "must exceed"),
    Mistake(SERVE + "--kv-policy snapkv", _USAGE, "--kv-policy snapkv is not snapkv:TOKENS"),
    Mistake(SERVE + "--log-level verbose", _USAGE, "'verbose' is not one of 'debug', 'info'"),
    Mistake(SERVE + "--config none.yaml", _USAGE, "--config none.yaml: No such file"),
    Mistake(SERVE + "--config typo.yaml", _USAGE, "typo.yaml:1: max-num-seq: There is no such"),
    Mistake(
        SERVE, _USAGE, "Invalid value for LORAPLEX_MAX_PINS", variables={"LORAPLEX_MAX_PINS": "x"}
    ),
    Mistake(SERVE + "--replicas 2", _USAGE, "--replicas and --ray need each other"),
    Mistake(SERVE + "--port {port}", ExitCode.UNAVAILABLE, "choose another --port"),
    Mistake(SERVE + "--host 203.0.113.1", ExitCode.UNAVAILABLE, "choose another --host"),
    Mistake(
        SERVE + "--database postgres://u@h/d",
        _USAGE,
        "Write postgresql+psycopg://USER@HOST/NAME in place of postgres://",
    ),
    Mistake(SERVE + "--database mysql://u@h/d", _USAGE, "sqlite:///PATH or postgresql+psycopg://"),
    Mistake("serve ./bses/tiny " + WITHOUT_BASE, _USAGE, "is neither a local directory nor"),
    Mistake("serve ./bert-bse " + WITHOUT_BASE, _USAGE, "Did you mean bert-base?"),
    Mistake("serve empty " + WITHOUT_BASE, _USAGE, "empty has no config.json"),
    Mistake("serve file.txt " + WITHOUT_BASE, _USAGE, "file.txt is a file: give the folder"),
    Mistake("serve adapter " + WITHOUT_BASE, _USAGE, "serve its base, then push the adapter"),
    Mistake("serve pickled-base " + WITHOUT_BASE, _USAGE, "convert it to safetensors"),
    Mistake("serve bert-base " + WITHOUT_BASE, _USAGE, "which fills in masked tokens"),
]
CHECKS = [
    Mistake("models check nope", _USAGE, "is neither a local directory"),
    Mistake("models check bert-base", _USAGE, "give a causal language model"),
    Mistake("models check {base} --kl", _USAGE, "--kl compares with --reference"),
    Mistake("models check {base} --memory-gib 0.01", _USAGE, "greater than or equal to 0.1"),
]
LOCAL = [*COMMANDS, *SERVERS, *CHECKS]
CLIENTS = [
    Mistake("adapters list", ExitCode.AUTHENTICATION, "run `loraplex login`, or set LORAPLEX_API"),
    Mistake("adapters list --profile work", _USAGE, "Profile not found: work. Create it with"),
    Mistake(
        "adapters list",
        ExitCode.AUTHENTICATION,
        "The API key is malformed or unknown.",
        variables={"LORAPLEX_API_KEY": "sk-wrong"},
    ),
    Mistake("login", ExitCode.AUTHENTICATION, "malformed or unknown", stdin="nonsense\n"),
    Mistake("login", ExitCode.AUTHENTICATION, "No key was given."),
    Mistake(
        "adapters list --url http://127.0.0.1:9",
        ExitCode.UNAVAILABLE,
        "Check that the server is running",
        TENANT,
    ),
    Mistake("adapters list --url 127.0.0.1:8000", _USAGE, "must begin with http://", TENANT),
    Mistake("adapters list --url {stranger}", ExitCode.UNAVAILABLE, "as a Loraplex server", TENANT),
    Mistake("adapters show bto", ExitCode.NOT_FOUND, "Did you mean 'bot'?", TENANT),
    Mistake("chat bto Hello", ExitCode.NOT_FOUND, "Did you mean 'bot'?", TENANT),
    Mistake("chat tiyn Hello", ExitCode.NOT_FOUND, "Did you mean 'tiny'?", TENANT),
    Mistake("chat gpt-4 Hello", ExitCode.NOT_FOUND, "'gpt-4' does not exist", TENANT),
    Mistake("adapters alias set bot prod 99", ExitCode.NOT_FOUND, "no version 99", TENANT),
    Mistake("adapters rollback bot nope", ExitCode.NOT_FOUND, "has no alias 'nope'", TENANT),
    Mistake("adapters rm bot --yes", ExitCode.CONFLICT, "Remove the alias first", TENANT),
    Mistake("adapters rm bot --version 1", _USAGE, "Not confirmed: add --yes", TENANT),
    Mistake("adapters push nope new", _ADAPTER, "nope is not a folder", TENANT),
    Mistake("adapters push adapter/" + WEIGHTS + " new", _ADAPTER, "is not a folder", TENANT),
    Mistake("adapters push pickle new", _ADAPTER, "is a pickle, which could execute", TENANT),
    Mistake("adapters push no-config new", _ADAPTER, f"has no {CONFIG}", TENANT),
    Mistake("adapters push no-weights new", _ADAPTER, f"has no {WEIGHTS}", TENANT),
    Mistake("adapters push bad-json new", _ADAPTER, "is not JSON", TENANT),
    Mistake("adapters push half new", _ADAPTER, "it was truncated", TENANT),
    Mistake("adapters push {base} new", _ADAPTER, "holds a whole model and no adapter", TENANT),
    Mistake("adapters push other-base new", _ADAPTER, "the base it was trained on", TENANT),
    Mistake("adapters push adapter My_Bot/1", _USAGE, "is not an adapter name", TENANT),
    Mistake("adapters push bot ./adapter", _USAGE, "is not an adapter name", TENANT),
    Mistake("adapters push adapter new --alias 1", _USAGE, "cannot be a number", TENANT),
    Mistake("tenants create other", ExitCode.AUTHENTICATION, "This is for operators", TENANT),
    Mistake("tenants create Acme", _USAGE, "A slug has 1 to 63 characters", OPERATOR),
    Mistake("tenants create resident", ExitCode.CONFLICT, "'resident' already exists", OPERATOR),
    Mistake("keys create", _USAGE, "Add --tenant SLUG", OPERATOR),
    Mistake("keys create --tenant resdent", ExitCode.NOT_FOUND, "Did you mean", OPERATOR),
    Mistake("operators show rot-operator", ExitCode.NOT_FOUND, "Did you mean 'root-op", OPERATOR),
    Mistake("adapters list", _USAGE, "Add --tenant SLUG", OPERATOR),
]


@pytest.fixture(scope="module")
def places(
    adapters: list[Path], tiny_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """The current folder holds what mistakes name; the others are the values of this."""
    folder = tmp_path_factory.mktemp("mistakes")
    write_folders(folder, adapters[0], tiny_base)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        port = str(taken.getsockname()[1])
        yield {"base": str(tiny_base), "unused": str(folder / "unused"), "port": port}


@pytest.fixture(scope="module")
def operator_key(server: ServerUnderTest) -> str:
    return server.make_operator("root-operator")


def write_folders(folder: Path, adapter: Path, base: Path) -> None:
    """The adapters and bases that the mistakes name."""
    for name in ("empty", "pickle", "no-config", "no-weights", "bad-json", "half", "other-base"):
        (folder / name).mkdir()
    shutil.copytree(adapter, folder / "adapter")
    for name in ("pickle", "no-weights", "half", "other-base"):
        shutil.copy(adapter / CONFIG, folder / name)
    for name in ("no-config", "bad-json"):
        shutil.copy(adapter / WEIGHTS, folder / name)
    (folder / "pickle" / "adapter_model.bin").write_bytes(b"\x80\x02}")
    (folder / "bad-json" / CONFIG).write_text("{")
    whole = (adapter / WEIGHTS).read_bytes()
    (folder / "half" / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    # The name is in the header, whose length stays the same.
    (folder / "other-base" / WEIGHTS).write_bytes(whole.replace(b"layers.0", b"layers.7"))
    (folder / "file.txt").write_text("text")
    (folder / "typo.yaml").write_text("max-num-seq: 3\n")
    without_weights = shutil.ignore_patterns("*.safetensors*")
    shutil.copytree(base, folder / "pickled-base", ignore=without_weights)
    (folder / "pickled-base" / "pytorch_model.bin").write_bytes(b"\x80\x02}")
    (folder / "bert-base").mkdir()
    bert = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    (folder / "bert-base" / "config.json").write_text(json.dumps(bert))


def test_there_are_more_than_60_mistakes() -> None:
    assert len({mistake.command + mistake.caller for mistake in (*LOCAL, *CLIENTS)}) > 60


def run(
    mistake: Mistake,
    places: Mapping[str, str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    **variables: str,
) -> int:
    """The exit code of a command in this process, as a user who has no profile."""
    for name in ("URL", "API_KEY", "TENANT", "PROFILE"):
        monkeypatch.delenv(f"LORAPLEX_{name}", raising=False)
    for name, value in {**variables, **mistake.variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    monkeypatch.setattr(sys, "stdin", io.StringIO(mistake.stdin))
    words = [word.format(**places) for word in mistake.command.split()]
    monkeypatch.setattr(sys, "argv", ["loraplex", *words])
    try:
        return cli.main()
    except SystemExit as ended:
        return int(ended.code or 0)


def check(mistake: Mistake, exit_code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """One error with the message, on stderr."""
    out, err = capsys.readouterr()
    assert mistake.message in " ".join(err.split())
    assert exit_code == mistake.exit_code
    assert err.count("Error: ") == 1
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize("mistake", LOCAL, ids=lambda mistake: mistake.command.strip()[:60])
def test_a_mistake_is_answered_with_one_message(
    places: Mapping[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    mistake: Mistake,
) -> None:
    async def unchecked(**options: object) -> None:
        """Trying what confines examinations takes a second."""

    def no_engine(*rest: object, **more: object) -> None:
        pytest.fail("the command started an engine")

    monkeypatch.setattr(runtime, "check_confinement", unchecked)
    monkeypatch.setattr(planes, "EngineClient", no_engine)
    monkeypatch.setattr(logs, "configure_logging", lambda *options: None)
    check(mistake, run(mistake, places, tmp_path, monkeypatch), capsys)


@pytest.mark.parametrize("mistake", CLIENTS, ids=lambda mistake: mistake.command.strip()[:60])
def test_a_mistake_with_a_server_is_answered_with_one_message(
    server: ServerUnderTest,
    resident: Caller,
    places: Mapping[str, str],
    operator_key: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    mistake: Mistake,
) -> None:
    keys = {NOBODY: "", TENANT: resident.key, OPERATOR: operator_key}
    stranger = {"stranger": f"{server.url}/console"}
    exit_code = run(
        mistake,
        {**places, **stranger},
        tmp_path,
        monkeypatch,
        LORAPLEX_URL=server.url,
        LORAPLEX_API_KEY=keys[mistake.caller],
    )
    check(mistake, exit_code, capsys)
