"""`loraplex serve --replicas N --ray ADDRESS`, with a stand-in for `loraplex fleet up`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loraplex.api.cli import agent, fleet_ray, serve, serve_on_ray
from loraplex.api.cli.exit_codes import CommandFailed, ExitCode
from loraplex.api.cli.serve_on_ray import RayReplicas
from loraplex.engine.config import EngineConfig
from loraplex.platform.database import Database
from loraplex.platform.replicas import service as replicas

ON_RAY = ("--replicas", "4", "--ray", "auto")
ENGINE = (
    *("--quantize", "int8", "--arena-gib", "0.5", "--kv-dtype", "fp8", "--num-threads", "3"),
    *("--quantize-exclude", "*.o_proj", "--quantize-exclude", "*.layers.0.*", "--enforce-eager"),
    *("--no-async-scheduling", "--speculation", "ngram,early_exit:4"),
)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Servers are not started; their models are noted."""
    models: list[str] = []

    def run_server(settings: object, config: EngineConfig, **rest: object) -> None:
        models.append(config.model)

    monkeypatch.setattr("loraplex.api.serve.run_server", run_server)
    return models


def stand_in(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Run this Python program instead of `loraplex fleet up`."""
    monkeypatch.setattr(fleet_ray, "find_spec", lambda name: name)
    monkeypatch.setattr(serve_on_ray, "FLEET_UP", (sys.executable, "-c", program))


def run(folder: Path, *options: str) -> Any:
    where = ("--data-dir", str(folder / "data"), "--port", "0", "--model", "base")
    return CliRunner().invoke(serve.app, [*where, *options])


def refusal(folder: Path, *options: str) -> str:
    ended = run(folder, *options)
    assert isinstance(ended.exception, CommandFailed), ended.output
    return str(ended.exception)


def asked(monkeypatch: pytest.MonkeyPatch, options: Sequence[str]) -> tuple[EngineConfig, Any]:
    """The server's configuration, and what `loraplex fleet up` would be asked for."""
    found: dict[str, Any] = {}

    def keep(settings: object, config: EngineConfig, **rest: Any) -> None:
        found.update(rest, config=config)

    monkeypatch.setattr(serve, "_run", keep)
    ended = CliRunner().invoke(serve.app, options)
    assert ended.exit_code == 0, ended.output
    return found["config"], found["replicas"]


def agent_config(monkeypatch: pytest.MonkeyPatch, options: Sequence[str]) -> EngineConfig:
    """That of an agent with these options."""
    found: list[EngineConfig] = []
    monkeypatch.setattr(
        agent, "_run", lambda settings, config, *rest, **where: found.append(config)
    )
    ended = CliRunner().invoke(agent.app, [*options, "--certificates", "fleet"])
    assert ended.exit_code == 0, ended.output
    return found[0]


def test_replicas_have_the_servers_model_and_engine_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, wanted = asked(monkeypatch, [*ON_RAY, "--num-gpus", "1", "--model", "base", *ENGINE])
    assert (wanted.number, wanted.ray, wanted.num_gpus) == (4, "auto", 1)
    assert agent_config(monkeypatch, wanted.agent_options) == config


def test_replicas_get_no_option_that_is_the_servers_or_the_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = ("--data-dir", "data", "--database", "sqlite:///secret", "--served-model-name", "name")
    options = ("--model", "owner/base", "--store", "s3://adapters/prod")
    _, wanted = asked(monkeypatch, [*ON_RAY, *own, *options])
    assert wanted.agent_options == options


def test_a_model_in_a_folder_is_named_by_its_absolute_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    _, wanted = asked(monkeypatch, [*ON_RAY, "--model", "base"])
    assert wanted.agent_options == ("--model", str(tmp_path / "base"))


def test_without_replicas_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, ["--model", "base"])[1] is None


@pytest.mark.parametrize("options", [("--replicas", "4"), ("--ray", "auto")])
def test_the_number_and_the_cluster_need_each_other(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    assert "--replicas and --ray" in refusal(tmp_path, *options)


def test_certificates_are_required(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, served: list[str]
) -> None:
    stand_in(monkeypatch, "raise AssertionError")
    assert "loraplex fleet certificates" in refusal(tmp_path, *ON_RAY)
    assert served == []


def test_the_missing_extra_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, served: list[str]
) -> None:
    monkeypatch.setattr(fleet_ray, "find_spec", lambda name: None)
    assert "loraplex[ray]" in refusal(tmp_path, *ON_RAY, "--fleet-certificates", "fleet")
    assert served == []
    assert not (tmp_path / "data").exists()


def test_the_server_starts_once_the_fleet_has_a_replica_in_its_database(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, served: list[str]
) -> None:
    stand_in(monkeypatch, "")
    options = (*ON_RAY, "--fleet-certificates", "fleet")
    assert "LORAPLEX_DATABASE" in refusal(tmp_path, *options)
    assert served == []
    database = Database(f"sqlite:///{tmp_path / 'data' / 'loraplex.db'}")
    with database.platform_transaction() as session:
        replicas.add(session, "10.0.0.1:7070")
    database.close()
    assert run(tmp_path, *options).exit_code == 0
    assert served == ["base"]


def test_a_fleet_that_does_not_come_up_ends_the_server_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, served: list[str]
) -> None:
    stand_in(monkeypatch, f"raise SystemExit({ExitCode.UNAVAILABLE:d})")
    ended = run(tmp_path, *ON_RAY, "--fleet-certificates", "fleet")
    assert ended.exit_code == ExitCode.UNAVAILABLE
    assert served == []


def test_the_command_names_the_cluster_the_number_and_the_certificates() -> None:
    wanted = RayReplicas(4, "10.0.0.1:6379", 1.0, ("--model", "base"))
    assert wanted.command(Path("/fleet"))[len(serve_on_ray.FLEET_UP) :] == [
        *("--replicas", "4", "--ray", "10.0.0.1:6379"),
        *("--num-gpus", "1.0", "--certificates", "/fleet", "--model", "base"),
    ]
