"""Each option of `loraplex serve` and `loraplex agent` is a flag, a variable and a key of the file
of `--config`, from one declaration."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loraplex.api.cli import agent, load_command, serve
from loraplex.api.cli.exit_codes import CommandFailed, ExitCode
from loraplex.api.cli.settings_file import SECRETS
from loraplex.api.settings import Settings, environment_variable
from loraplex.engine.config import EngineConfig
from loraplex.engine.option import options_of

VALUES: Mapping[str, str | list[str]] = {
    "model": "./a-base",
    "quantize": "int4",
    "quantize-group-size": "64",
    "quantize-exclude": ["*.o_proj", "*.layers.0.*"],
    "quantize-embeddings": "int8",
    "dtype": "bfloat16",
    "device": "cpu",
    "tensor-parallel-size": "2",
    "enable-expert-parallel": "true",
    "pipeline-parallel-size": "3",
    "num-local-ranks": "4",
    "rank-address": "10.0.0.1:7080",
    "rank-secret": "rank.secret",
    "max-model-len": "512",
    "max-num-seqs": "65",
    "max-num-batched-tokens": "300",
    "enforce-eager": "true",
    "async-scheduling": "false",
    "memory-gib": "1.5",
    "arena-gib": "0.25",
    "kv-cache-gib": "0.5",
    "host-cache-gib": "2",
    "kv-dtype": "int8",
    "kv-policy": "h2o:128",
    "num-loader-threads": "3",
    "loader-duty": "0.5",
    "swap-gib": "1",
    "prefix-disk-gib": "2",
    "prefix-disk-dir": "/var/lib/prefixes",
    "attention-window": "256",
    "attention-sinks": "5",
    "target-itl": "40",
    "target-ttft": "400",
    "speculation": "off",
    "max-draft-tokens": "3",
    "generation-config": "none",
    "acceptance": "rejection",
    "max-queued": "100",
    "max-queued-per-tenant": "10",
    "tenant-cap": "0.5",
    "num-threads": "1",
    "host": "::1",
    "port": "8001",
    "replicas": "2",
    "ray": "auto",
    "num-gpus": "1",
    "certificates": "certificates",
    "listen": "127.0.0.1:7071",
    "role": "prefill",
    "data-dir": "/var/lib/data",
    "database": "postgresql+psycopg://u@h/d",
    "store": "s3://bucket/prefix",
    "served-model-name": "base",
    "tool-format": "mistral",
    "reasoning-parser": "qwen3",
    "max-full-matrix-mib": "1.5",
    "require-confinement": "true",
    "reference-base": "./reference",
    "max-reference-kl": "0.1",
    "fleet-certificates": "fleet",
    "replica-addresses": ["10.0.0.1:7070", "10.0.0.2:7070"],
    "allowed-hosts": "*.example.com,localhost",
    "metrics-networks": ["10.0.0.0/8", "fc00::/7"],
    "vllm-metrics": "true",
    "trusted-proxies": ["10.0.0.0/8", "fd00::/8"],
    "ssl-certfile": "/etc/ssl/server.pem",
    "ssl-keyfile": "/etc/ssl/server.key",
    "webhook-hosts": ["hooks.example.com", "*.example.com:8443"],
    "webhook-networks": ["10.1.0.0/16", "fd01::/16"],
    "oidc-issuer": "https://id.example.com/realms/acme",
    "oidc-client-id": "loraplex",
    "oidc-scopes": ["openid", "groups"],
    "oidc-name": "Keycloak",
    "oidc-groups-claim": "roles",
    "oidc-roles": '{"ml": "acme:developer"}',
    "otel": "true",
    "adapter-wait-seconds": "31.5",
    "max-pins": "17",
    "disk-cache-bytes": "1000000",
    "disk-reserve-bytes": "1000001",
    "staging-bytes": "1000002",
    "staging-tenant-bytes": "1000003",
    "stale-seconds": "301",
    "reader-patience-seconds": "29",
    "request-log-days": "31",
    "upload-days": "32",
    "file-days": "33",
    "response-days": "34",
    "sample-days": "35",
    "cost-per-step-hour": "2.5",
    "cost-per-kv-gib-hour": "0.125",
    "cost-per-loaded-gib": "0.01",
    "tuning": "true",
    "max-tuning-jobs": "2",
    "tuning-device": "cpu",
    "tuning-cpus": "1",
    "tuning-ray": "auto",
    "tuning-ray-cpus": "2",
    "tuning-bytes": "1000000",
    "drain-seconds": "26",
    "log-level": "debug",
    "log-format": "json",
}
"""A value of each option that is not its default."""
CANNOT_JOIN = {"--host-gib", "--adapter-draft-heads"}
"""These cannot be set beside some of the others."""
OPTIONS_OF_SERVERS = pytest.mark.parametrize(
    ("name", "app"), [("serve", serve.app), ("agent", agent.app)]
)

Started = dict[str, Any]
Start = Callable[..., Started]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """What a command would start with."""
    for name in [name for name in os.environ if name.startswith("LORAPLEX_")]:
        monkeypatch.delenv(name)
    started: Started = {}

    def keep(settings: Settings, config: EngineConfig, *places: object, **rest: object) -> None:
        started.update(rest, settings=settings, config=config, places=places)

    monkeypatch.setattr(serve, "_run", keep)
    monkeypatch.setattr(agent, "_run", keep)

    def start(app: Any, *arguments: str, **variables: str) -> Started:
        started.clear()
        ended = CliRunner().invoke(app, arguments, env=variables)
        if isinstance(ended.exception, CommandFailed):
            raise ended.exception
        assert ended.exit_code == 0, ended.output
        return dict(started)

    return start


def values_of(command: str) -> dict[str, str | list[str]]:
    """The values of the options of this command. Fails if one of them has no value above."""
    options = {option.opts[0].removeprefix("--") for option in options_in(command)}
    return {key: VALUES[key] for key in options}


def options_in(command: str) -> list[Any]:
    return [
        option
        for option in load_command(command).params
        if option.param_type_name == "option"
        and option.name not in ("help", "config")
        and not CANNOT_JOIN & set(option.opts)
    ]


def flags_for(values: Mapping[str, str | list[str]]) -> list[str]:
    flags = []
    for key, value in values.items():
        match value:
            case "true":
                flags.append(f"--{key}")
            case "false":
                flags.append(f"--no-{key}")
            case list():
                flags += [word for each in value for word in (f"--{key}", each)]
            case _:
                flags += [f"--{key}", value]
    return flags


def variables_for(values: Mapping[str, str | list[str]]) -> dict[str, str]:
    return {
        environment_variable(key): ",".join(value) if isinstance(value, list) else value
        for key, value in values.items()
    }


def file_with(folder: Path, **values: object) -> str:
    """A file with these keys. JSON is YAML."""
    path = folder / "loraplex.yaml"
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in values.items()))
    return str(path)


def sources_of(started: Started, command: str) -> set[str]:
    origins = started["settings"].origins
    return {origins[option.name].source for option in options_in(command)}


@OPTIONS_OF_SERVERS
def test_flags_variables_and_keys_of_the_file_configure_the_same(
    start: Start, tmp_path: Path, name: str, app: Any
) -> None:
    values = values_of(name)
    by_flags = start(app, *flags_for(values))
    by_variables = start(app, **variables_for(values))
    by_file = start(app, "--config", file_with(tmp_path, **values))
    assert sources_of(by_flags, name) == {"flag"}
    assert sources_of(by_variables, name) == {"environment"}
    assert sources_of(by_file, name) == {"file"}
    for each in (by_flags, by_variables, by_file):
        replicas = each.pop("replicas", None)
        assert replicas is None or (replicas.number, replicas.ray) == (2, "auto")
        each["settings"] = dict(each["settings"])  # without where they come from
    assert by_variables == by_flags
    assert by_file == by_flags


def test_no_sample_value_is_a_default(start: Start) -> None:
    values = values_of("serve")
    given, plain = start(serve.app, *flags_for(values)), start(serve.app, "base")
    for field, option in options_of(EngineConfig).items():
        is_given = option.flag(field) not in CANNOT_JOIN
        is_other = getattr(given["config"], field) != getattr(plain["config"], field)
        assert is_given == is_other, field
    for field in options_of(Settings):
        assert getattr(given["settings"], field) != getattr(plain["settings"], field), field
    assert (given["host"], given["port"]) != (plain["host"], plain["port"])


@OPTIONS_OF_SERVERS
def test_no_two_options_share_a_name_or_a_variable(name: str, app: Any) -> None:
    options = options_in(name)
    flags = [flag for option in options for flag in (*option.opts, *option.secondary_opts)]
    assert len(set(flags)) == len(flags)
    variables = [option.envvar for option in options]
    assert len(set(variables)) == len(variables)
    for option in options:
        assert option.envvar == environment_variable(option.opts[0].removeprefix("--"))


def test_every_setting_is_an_option_but_secrets() -> None:
    others = {
        name.replace("_", "-") for name in Settings.model_fields.keys() - options_of(Settings)
    }
    assert others == set(SECRETS)


def test_a_flag_precedes_a_variable_a_variable_the_file_and_the_file_the_default(
    start: Start, tmp_path: Path
) -> None:
    names = ("--max-num-seqs", "7"), {"LORAPLEX_MAX_NUM_SEQS": "8"}, ("--config",)
    flag, variable, config = names
    file = (*config, file_with(tmp_path, **{"max-num-seqs": 9, "max_pins": 3}))
    found = [
        start(serve.app, "base", *arguments, **variables)["config"].max_num_seqs
        for arguments, variables in (
            ((*file, *flag), variable),
            (file, variable),
            (file, {}),
            ((), {}),
        )
    ]
    assert found == [7, 8, 9, 64]
    assert start(serve.app, "base", *file)["settings"].max_pins == 3


def test_the_file_may_be_named_by_a_variable(start: Start, tmp_path: Path) -> None:
    path = file_with(tmp_path, model="a-base")
    assert start(serve.app, LORAPLEX_CONFIG=path)["config"].model == "a-base"


def test_a_server_and_an_agent_may_share_a_file(start: Start, tmp_path: Path) -> None:
    shared = {"model": "base", "certificates": "fleet", "port": 8001, "max-pins": 3}
    path = file_with(tmp_path, **shared)
    assert start(serve.app, "--config", path)["port"] == 8001
    assert start(agent.app, "--config", path)["config"].model == "base"


def test_the_file_is_yaml_whose_values_are_read_as_on_the_command_line(
    start: Start, tmp_path: Path
) -> None:
    path = tmp_path / "loraplex.yaml"
    path.write_text(
        "# a comment\n"
        "model: ./base  # the folder\n"
        "speculation: off\n"
        "max-model-len:\n"
        "served-model-name: 8\n"
        "quantize: int8\n"
        "quantize-exclude:\n  - '*.o_proj'\n  - '*.v_proj'\n"
        "enforce-eager: yes\n"
    )
    started = start(serve.app, "--config", str(path))
    config = started["config"]
    assert (config.model, config.speculation, config.max_model_len) == ("./base", (), None)
    assert config.quantization_exclude == ("*.o_proj", "*.v_proj")
    assert config.enforce_eager
    assert started["settings"].served_model_name == "8"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: a\nmax-num-seq: 3\n", ":2: max-num-seq: There is no such option. Did you mean"),
        ("xyzzy: 3\n", "`loraplex serve --help` lists all options"),
        ("gpu-memory-utilization: 0.9\n", ":1: gpu-memory-utilization: --memory-gib limits"),
        ("port: 1\nport: 2\n", ":2: port: The key occurs twice"),
        ("quantize: int8\nquantization: int4\n", ":2: quantization: "),
        ("port: [1, 2]\n", ":1: port: A list is not possible here"),
        ("port: {a: 1}\n", ":1: port: The value has to be a text, a number or a list"),
        ("secret: abc\n", "Set LORAPLEX_SECRET"),
        ("metrics_token: abc\n", "Set LORAPLEX_METRICS_TOKEN"),
        ("- port\n", "lines such as `max-num-seqs: 128`"),
        ("port: [1\n", "The file is not YAML"),
        ("port: \x00\n", "The file is not YAML"),
        ("config: other.yaml\n", ":1: config: There is no such option"),
    ],
)
def test_what_is_wrong_in_the_file_is_said_with_its_line(
    start: Start, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "loraplex.yaml"
    path.write_text(text)
    with pytest.raises(CommandFailed) as failure:
        start(serve.app, "base", "--config", str(path))
    assert message in str(failure.value)
    assert failure.value.exit_code == ExitCode.USAGE
    assert str(path) in str(failure.value)


def test_a_file_that_cannot_be_read_is_named(start: Start, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    for name, problem in (("none", "No such file"), (".", "directory"), ("latin", "UTF-8")):
        with pytest.raises(CommandFailed, match=problem):
            start(serve.app, "base", "--config", str(tmp_path / name))


@pytest.mark.parametrize(
    ("arguments", "variables", "named"),
    [
        (("--port", "x"), {}, "--port"),
        ((), {"LORAPLEX_PORT": "x"}, "LORAPLEX_PORT"),
        ((), {"LORAPLEX_PORT": "tcp://10.0.0.1:8000"}, "enableServiceLinks: false"),
        (("--config", "{file}"), {}, "loraplex.yaml:1: port"),
    ],
)
def test_a_bad_value_is_named_as_the_user_wrote_it(
    tmp_path: Path, arguments: tuple[str, ...], variables: dict[str, str], named: str
) -> None:
    path = file_with(tmp_path, port="x")
    words = [each.format(file=path) for each in arguments]
    ended = CliRunner().invoke(serve.app, ["base", *words], env=variables)
    assert ended.exit_code == ExitCode.USAGE
    told = "".join(line.strip("│ ") for line in ended.output.splitlines())  # it may be folded
    assert named.replace(" ", "") in told.replace(" ", "")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--max-pins", "-1"), "--max-pins: "),
        (("--max-num-seqs", "9", "--max-num-batched-tokens", "9"), "--max-num-batched-tokens must"),
        (("--quantize-group-size", "64"), "--quantize-group-size requires --quantize"),
    ],
)
def test_values_that_do_not_fit_each_other_are_named_by_their_options(
    start: Start, arguments: tuple[str, ...], named: str
) -> None:
    ended = CliRunner().invoke(serve.app, ["base", *arguments])
    assert named in str(ended.exception)


def test_the_model_is_an_argument_or_an_option(start: Start) -> None:
    for given in (("base",), ("--model", "base"), ("base", "--model", "base")):
        assert start(serve.app, *given)["config"].model == "base"
    assert start(serve.app, "base", LORAPLEX_MODEL="other")["config"].model == "base"
    assert start(serve.app, LORAPLEX_MODEL="other")["config"].model == "other"
    with pytest.raises(CommandFailed, match="Two models"):
        start(serve.app, "base", "--model", "other")
    with pytest.raises(CommandFailed, match="Missing model"):
        start(serve.app)


def test_replicas_on_ray_get_what_variables_and_the_file_say(start: Start, tmp_path: Path) -> None:
    path = file_with(tmp_path, replicas=2, ray="auto", quantize="int8", port=8001)
    started = start(serve.app, "base", "--config", path, LORAPLEX_ENFORCE_EAGER="true")
    assert set(started["replicas"].agent_options) == {
        *("--model", "base", "--quantize", "int8", "--enforce-eager")
    }


@pytest.mark.parametrize("name", ["serve", "agent"])
def test_the_help_shows_every_default_in_words_and_fits_80_columns(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = load_command(name).make_context(name, [], resilient_parsing=True).get_help()
    assert max(map(len, shown.splitlines())) <= 80
    text = " ".join(shown.split())
    for option in options_in(name):
        assert option.opts[0] in text
        rest = text.partition(f"env var: {option.envvar};")[2]
        assert rest.startswith((" default: ", " required", " 0<=x")), option.name
    if name == "serve":
        assert "An option takes precedence over the variable, the variable over the file" in text
