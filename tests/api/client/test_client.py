"""`from loraplex import Client`, with a running server."""

from __future__ import annotations

import inspect
import json
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

import loraplex
from loraplex import Client, ClientError
from loraplex.adapters.rejections import REJECTIONS
from loraplex.api.client.adapters import Adapters
from loraplex.api.client.aliases import Aliases
from loraplex.api.client.answers import as_view
from loraplex.api.client.errors import (
    ApiRefused,
    FileExists,
    InvalidAdapter,
    InvalidArgument,
    KeyUnusable,
    ServerUnreachable,
    UnexpectedAnswer,
)
from loraplex.api.schemas.adapters import VersionView
from support.published import DOCUMENT
from support.server import Caller, child_environment, free_port


@pytest.fixture
def client(caller: Caller) -> Iterator[Client]:
    with Client(caller.url, api_key=caller.key) as client:
        yield client


def test_the_life_of_an_adapter(
    client: Client, caller: Caller, adapters: list[Path], tmp_path: Path
) -> None:
    first = client.push("bot", adapters[0], aliases=["prod"])
    assert (first.id, first.state, first.aliases) == (f"{caller.slug}/bot@1", "ready", ["prod"])
    second = client.wait(client.push("bot", str(adapters[1]), is_waiting=False))
    assert (second.version, second.state) == (2, "ready")
    assert [adapter.name for adapter in client.adapters.list()] == ["bot"]
    assert [version.version for version in client.adapters.show("bot").versions] == [1, 2]
    assert client.adapters.version("bot").version == 1
    assert client.adapters.version("bot@latest").version == 2

    assert client.aliases.canary("bot", "prod", 2, 10.0).canary is not None
    assert client.aliases.set("bot", "prod", 2).version == 2
    assert client.aliases.rollback("bot").canary is not None
    assert [alias.alias for alias in client.aliases.list("bot")] == ["prod"]
    assert [change.action for change in client.aliases.history("bot", "prod")][:2] == [
        "rollback", "set",
    ]  # fmt: skip

    files = client.adapters.download("bot@2", tmp_path / "bot")
    with pytest.raises(FileExists):
        client.adapters.download("bot@2", tmp_path / "bot")
    client.adapters.download("bot@2", tmp_path / "bot", is_overwriting=True)
    assert client.push("again", files[0].parent).digest == second.digest

    client.aliases.delete("bot", "prod")
    assert [entry.version for entry in client.adapters.delete("bot", 1).versions] == [1]
    assert [entry.version for entry in client.adapters.delete("bot").versions] == [2]


def test_a_caller_knows_itself_and_its_usage(
    client: Client, caller: Caller, adapters: list[Path]
) -> None:
    client.push("bot", adapters[0])
    caller.openai.completions.create(model="bot", prompt="x", max_tokens=2)
    me = client.me()
    assert me.tenant is not None
    assert (me.actor.kind, me.tenant.slug) == ("key", caller.slug)
    (row,) = client.usage(by=["adapter"], adapter="bot")
    assert (row.adapter, row.requests, row.completion_tokens) == ("bot", 1, 2)
    assert row.day is msgspec.UNSET
    assert client.usage(since=date.today() + timedelta(days=2)) == []


def test_tensors_of_a_training_process_are_the_version_that_their_files_are(
    client: Client, adapters: list[Path]
) -> None:
    import torch
    from peft import PeftConfig
    from safetensors.torch import load_file as load_torch_file

    tensors = load_torch_file(adapters[0] / "adapter_model.safetensors")
    shared = {name: torch.nn.Parameter(tensor.T.contiguous().T) for name, tensor in tensors.items()}
    config = PeftConfig.from_pretrained(adapters[0])
    pushed = client.push_tensors("bot", shared, config, aliases=["prod"])
    assert pushed.aliases == ["prod"]
    assert client.push("same", adapters[0]).digest == pushed.digest


def test_an_error_answer_has_the_published_code_and_a_suggestion(
    client: Client, adapters: list[Path]
) -> None:
    client.push("support-bot", adapters[0])
    with pytest.raises(ApiRefused, match=r"Did you mean 'support-bot'\?") as refused:
        client.adapters.show("suport-bot")
    error = refused.value
    assert (error.code, error.status, error.is_retryable) == ("adapter_not_found", 404, False)
    assert error.message in str(error)
    assert error.request_id


def test_files_that_intake_refuses_have_its_code_and_remedy(
    client: Client, adapters: list[Path], tmp_path: Path
) -> None:
    shutil.copytree(adapters[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(ApiRefused) as refused:
        client.push("bot", tmp_path)
    assert refused.value.status == 422
    assert REJECTIONS[refused.value.code].way_out in str(refused.value)


def test_a_version_without_effect_is_rejected_with_the_code_of_the_reason(
    client: Client, adapters: list[Path]
) -> None:
    tensors = {
        name: np.zeros_like(tensor) if "lora_B" in name else tensor
        for name, tensor in load_file(adapters[0] / "adapter_model.safetensors").items()
    }
    config = json.loads((adapters[0] / "adapter_config.json").read_text())
    with pytest.raises(ClientError) as rejected:
        client.push_tensors("bot", tensors, config)
    assert rejected.value.code == "no_effect"


@pytest.mark.parametrize(
    "act",
    [
        lambda client, folder: client.push("Bad Name", folder),
        lambda client, folder: client.push("bot", folder, aliases=["1"]),
        lambda client, _: client.adapters.show("../models"),
        lambda client, _: client.adapters.version("bot@a@b"),
        lambda client, _: client.aliases.set("bot", "..", 1),
        lambda client, _: client.push("bot", "ftp://x"),
    ],
    ids=["name", "alias of a push", "path", "reference", "alias", "source"],
)
def test_a_malformed_name_is_refused_before_sending(
    adapters: list[Path], act: Callable[[Client, Path], Any]
) -> None:
    with Client(f"http://127.0.0.1:{free_port()}", api_key="k") as client:
        with pytest.raises(InvalidArgument) as refused:
            act(client, adapters[0])
        assert refused.value.code == "invalid_argument"


def test_a_client_reads_the_environment_and_says_what_is_missing(
    caller: Caller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("LORAPLEX_API_KEY", raising=False)
    with pytest.raises(KeyUnusable, match="LORAPLEX_API_KEY"):
        Client(caller.url)
    with pytest.raises(InvalidArgument, match="Profile not found: staging"):
        Client(profile="staging")
    monkeypatch.setenv("LORAPLEX_URL", f"{caller.url}/v1/")
    monkeypatch.setenv("LORAPLEX_API_KEY", caller.key)
    with Client() as client:
        assert client.url == caller.url
        assert client.me().actor.kind == "key"


def test_a_server_that_is_not_there_is_unreachable() -> None:
    with Client(f"http://127.0.0.1:{free_port()}", api_key="k") as client:
        with pytest.raises(ServerUnreachable) as raised:
            client.me()
        assert raised.value.code == "server_unreachable"


def test_an_answer_of_another_version_is_named() -> None:
    with pytest.raises(UnexpectedAnswer, match="VersionView"):
        as_view({"id": "acme/bot@1"}, VersionView)


def test_an_error_survives_the_way_to_another_process() -> None:
    error = ApiRefused("No.", code="adapter_not_found", status=404).with_hint("Do this.")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.code, copy.status) == (str(error), "adapter_not_found", 404)
    assert str(error) == "No. (adapter_not_found). Do this."


ROUTES = {
    (Client, "push"): "POST /v1/uploads/{upload_id}/commit",
    (Client, "push_tensors"): "POST /v1/uploads/{upload_id}/commit",
    (Client, "wait"): "GET /v1/adapters/{name}/versions/{number}",
    (Client, "me"): "GET /v1/me",
    (Client, "usage"): "GET /v1/usage",
    (Adapters, "list"): "GET /v1/adapters",
    (Adapters, "show"): "GET /v1/adapters/{name}",
    (Adapters, "version"): "GET /v1/adapters/{name}/versions/{number}",
    (Adapters, "delete"): "DELETE /v1/adapters/{name}",
    (Aliases, "list"): "GET /v1/adapters/{name}/aliases",
    (Aliases, "set"): "PUT /v1/adapters/{name}/aliases/{alias}",
    (Aliases, "canary"): "PUT /v1/adapters/{name}/aliases/{alias}",
    (Aliases, "rollback"): "POST /v1/adapters/{name}/aliases/{alias}/rollback",
    (Aliases, "shadow"): "GET /v1/adapters/{name}/aliases/{alias}/shadow",
    (Aliases, "set_shadow"): "PUT /v1/adapters/{name}/aliases/{alias}/shadow",
    (Aliases, "history"): "GET /v1/adapters/{name}/aliases/{alias}/history",
}
WITHOUT_VIEW = {
    (Client, "close"),
    (Adapters, "download"),
    (Aliases, "delete"),
    (Aliases, "delete_shadow"),
}


def test_every_method_returns_what_the_openapi_document_says_of_its_route() -> None:
    public = {
        (kind, name)
        for kind in (Client, Adapters, Aliases)
        for name, _ in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }
    assert public == ROUTES.keys() | WITHOUT_VIEW
    for (kind, name), route in ROUTES.items():
        method, path = route.split()
        answers = DOCUMENT["paths"][path][method.lower()]["responses"]
        success = next(answer for status, answer in answers.items() if status.startswith("2"))
        schema = success["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        hint = str(get_type_hints(getattr(kind, name))["return"])
        (view,) = re.findall(r"\w+View", hint)
        assert view in re.findall(r"[A-Z]\w*?View", schema), (name, schema)


def test_the_package_gives_the_client_without_importing_a_server() -> None:
    heavy = "torch", "fastapi", "sqlalchemy", "transformers", "boto3", "typer", "huggingface_hub"
    script = (
        "import sys, loraplex\n"
        "assert 'httpx' not in sys.modules\n"
        "loraplex.Client, loraplex.ClientError\n"
        f"sys.exit(str(found) if (found := {set(heavy)!r} & set(sys.modules)) else 0)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=child_environment(),
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert issubclass(InvalidAdapter, ClientError)
    with pytest.raises(AttributeError):
        loraplex.nothing  # noqa: B018
