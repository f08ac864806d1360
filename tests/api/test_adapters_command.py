"""`loraplex adapters` against a running server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.api.cli import main, push
from loraplex.api.cli.client import ApiClient, ServerUnreachable, api_path
from loraplex.api.cli.exit_codes import ExitCode
from support.server import Caller, free_port


class Command:
    """Runs the command line as a tenant."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caller: Caller
    ) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        monkeypatch.setenv("LORAPLEX_URL", caller.url)
        monkeypatch.setenv("LORAPLEX_API_KEY", caller.key)

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of `loraplex adapters ...`."""
        self._monkeypatch.setattr("sys.argv", ["loraplex", "adapters", *arguments])
        try:
            code = main()
        except SystemExit as exc:
            code = int(exc.code or 0)
        output = self._capsys.readouterr()
        return code, output.out, output.err


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caller: Caller
) -> Command:
    return Command(monkeypatch, capsys, caller)


def test_push_prints_the_version_and_how_to_call_it(
    command: Command, adapters: list[Path], caller: Caller
) -> None:
    code, out, err = command("push", str(adapters[0]), "bot", "--alias", "prod")
    assert (code, out) == (ExitCode.OK, f"{caller.slug}/bot@1\n")
    assert "ready" in err
    assert "moves logits by up to" in err
    assert f"curl {caller.url}/v1/chat/completions" in err
    assert f'"model": "{caller.slug}/bot@1"' in err
    assert f'model="{caller.slug}/bot@1"' in err
    assert "Make it live" not in err
    assert caller.key not in err


def test_push_says_how_to_make_a_version_live_that_prod_hides(
    command: Command, adapters: list[Path], caller: Caller
) -> None:
    command("push", str(adapters[0]), "bot", "--alias", "prod")
    err = command("push", str(adapters[1]), "bot")[2]
    assert f'model="{caller.slug}/bot@2"' in err
    assert "loraplex adapters alias set bot prod 2" in err


def test_push_does_not_say_how_to_call_what_is_not_ready(
    command: Command, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    unattested = {
        "id": "acme/bot@1",
        "adapter": "bot",
        "version": 1,
        "digest": "sha256:0",
        "state": "attesting",
        "attestation": None,
        "report": {"warnings": []},
    }
    monkeypatch.setattr(
        "loraplex.api.cli.adapters.push_adapter", lambda *_args, **_options: unattested
    )
    code, out, err = command("push", str(adapters[0]), "bot", "--no-wait")
    assert (code, out) == (ExitCode.OK, "acme/bot@1\n")
    assert "curl" not in err
    assert "OpenAI" not in err


@pytest.mark.parametrize(
    "name", ["bot?x=1", "bot#x", "../models", "..", "", "acme/bot", "bot@1", "bot@prod", "Bot", "ä"]
)
@pytest.mark.parametrize(
    "arguments",
    [("show",), ("rm",), ("push", "."), ("alias", "rm", "{name}", "prod"), ("alias", "set")],
    ids=" ".join,
)
def test_only_an_adapters_own_name_reaches_the_server(
    command: Command, monkeypatch: pytest.MonkeyPatch, name: str, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setenv("LORAPLEX_URL", "http://127.0.0.1:1")
    words = [word.format(name=name) for word in arguments]
    rest = [] if "rm" in words[1:] else [name]
    rest += ["prod", "1"] if words[-1] == "set" else []
    code, _, err = command(*words, *rest)
    assert code == ExitCode.USAGE
    assert "without tenant/ or @version" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("alias", ["..", "1", "prod?x", "bot@prod"])
def test_only_an_alias_reaches_the_server(
    command: Command, monkeypatch: pytest.MonkeyPatch, alias: str
) -> None:
    monkeypatch.setenv("LORAPLEX_URL", "http://127.0.0.1:1")
    code, _, err = command("alias", "rm", "bot", alias)
    assert code == ExitCode.USAGE
    assert "no alias" in err


def test_a_part_of_a_path_stays_one_part() -> None:
    assert api_path("adapters", "a/b?c#d", "versions", 3) == "/adapters/a%2Fb%3Fc%23d/versions/3"


def test_a_url_of_something_else_is_named(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_URL", "http://host:port")
    assert command("ls")[0] == ExitCode.USAGE
    monkeypatch.setattr(
        "loraplex.api.cli.client.httpx.Client.request",
        lambda *_args, **_options: httpx.Response(200, text="<html>"),
    )
    monkeypatch.setenv("LORAPLEX_URL", "http://127.0.0.1:1")
    code, _, err = command("ls")
    assert code == ExitCode.UNAVAILABLE
    assert "LORAPLEX_URL" in err


def test_the_life_of_an_adapter_as_json(
    command: Command, adapters: list[Path], caller: Caller
) -> None:
    def ask(*arguments: str) -> Any:
        code, out, err = command(*arguments, "--json")
        assert (code, err) == (ExitCode.OK, "")
        return json.loads(out)

    assert ask("push", str(adapters[0]), "bot")["state"] == "ready"
    assert ask("push", str(adapters[1]), "bot")["version"] == 2
    assert ask("alias", "set", "bot", "prod", "1")["version"] == 1
    assert [adapter["aliases"] for adapter in ask("ls")] == [{"prod": 1}]
    assert [entry["aliases"] for entry in ask("show", "bot")["versions"]] == [["prod"], []]
    assert ask("alias", "rm", "bot", "prod")["deleted"] is True
    assert [entry["version"] for entry in ask("rm", "bot", "--version", "1")["versions"]] == [1]
    assert [entry["version"] for entry in ask("rm", "bot")["versions"]] == [2]
    assert ask("ls") == []


def test_tables_for_people(command: Command, adapters: list[Path]) -> None:
    command("push", str(adapters[0]), "bot", "--alias", "prod")
    assert command("ls")[1].splitlines()[1].split() == ["bot", "1:ready", "prod=1"]
    header, row = command("show", "bot")[1].splitlines()
    assert header.split()[:4] == ["version", "state", "aliases", "tier"]
    assert row.split()[:3] == ["1", "ready", "prod"]
    assert "bot@prod is now bot@1" in command("alias", "set", "bot", "prod", "1")[1]
    assert "deleted bot@1" in command("rm", "bot")[1]


def test_no_wait_returns_before_the_attestation(command: Command, adapters: list[Path]) -> None:
    code, out, _ = command("push", str(adapters[0]), "bot", "--no-wait", "--json")
    assert code == ExitCode.OK
    assert json.loads(out)["state"] in {"validated", "attesting", "ready"}


def test_exit_codes(
    command: Command, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("show", "nothing")[0] == ExitCode.NOT_FOUND
    assert command("push")[0] == ExitCode.USAGE
    assert command("push", str(adapters[0]), "bot", "--alias", "1")[0] == ExitCode.USAGE
    command("push", str(adapters[0]), "bot", "--alias", "prod")
    assert command("rm", "bot", "--version", "1")[0] == ExitCode.CONFLICT
    assert command("push", str(adapters[0]), "other", "--base-id", "x")[0] == (
        ExitCode.INVALID_ADAPTER
    )
    monkeypatch.setenv("LORAPLEX_API_KEY", "lpx_live_wrong")
    assert command("ls")[0] == ExitCode.AUTHENTICATION
    monkeypatch.delenv("LORAPLEX_API_KEY")
    code, _, err = command("ls")
    assert code == ExitCode.AUTHENTICATION
    assert "LORAPLEX_API_KEY" in err
    monkeypatch.setenv("LORAPLEX_API_KEY", "x")
    monkeypatch.setenv("LORAPLEX_URL", f"http://127.0.0.1:{free_port()}")
    assert command("ls")[0] == ExitCode.UNAVAILABLE


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def spoil_config(folder: Path) -> None:
    (folder / push.CONFIG_FILE).write_text("{")


def remove_config(folder: Path) -> None:
    (folder / push.CONFIG_FILE).unlink()


def remove_weights(folder: Path) -> None:
    (folder / push.WEIGHTS_FILE).unlink()


def pickle_weights(folder: Path) -> None:
    (folder / push.WEIGHTS_FILE).rename(folder / "adapter_model.bin")


@pytest.mark.parametrize(
    ("spoil", "advice"),
    [
        (remove_folder, "is not a folder"),
        (spoil_config, "is not JSON"),
        (remove_config, "has no adapter_config.json"),
        (remove_weights, "has no adapter_model.safetensors"),
        (pickle_weights, "safe_serialization=True"),
    ],
)
def test_a_folder_that_is_no_adapter_is_refused_before_sending(
    command: Command,
    adapters: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path], None],
    advice: str,
) -> None:
    folder = Path(shutil.copytree(adapters[0], tmp_path / "bot"))
    spoil(folder)
    monkeypatch.setenv("LORAPLEX_URL", f"http://127.0.0.1:{free_port()}")
    code, _, err = command("push", str(folder), "bot")
    assert code == ExitCode.INVALID_ADAPTER
    assert advice in err


def test_a_broken_connection_is_taken_up_again(
    caller: Caller, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other part is lost on the way back, and one on the way there."""
    monkeypatch.setattr(push, "PART_BYTES", 10_000)
    monkeypatch.setattr(push, "FIRST_PAUSE_SECONDS", 0.0)
    num_parts = 0

    class Flaky(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            nonlocal num_parts
            if request.method != "PUT":
                return super().handle_request(request)
            num_parts += 1
            if num_parts == 3:
                raise httpx.ConnectError("planted")
            response = super().handle_request(request)
            response.read()
            if num_parts % 2:
                raise httpx.ReadError("planted")
            return response

    headers = {"authorization": f"Bearer {caller.key}"}
    with httpx.Client(base_url=caller.url, headers=headers, transport=Flaky()) as http:
        client = ApiClient(http, caller.url)
        version = push.push_adapter(
            client, push.read_adapter(adapters[0]), "bot", aliases=[], base_id=None, is_quiet=True
        )
    assert num_parts > 3
    assert version["version"] == 1


def test_a_server_that_stays_away_is_given_up(
    caller: Caller, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push, "FIRST_PAUSE_SECONDS", 0.0)

    class Cut(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            if request.method == "PUT":
                raise httpx.ConnectError("planted")
            return super().handle_request(request)

    headers = {"authorization": f"Bearer {caller.key}"}
    with (
        httpx.Client(base_url=caller.url, headers=headers, transport=Cut()) as http,
        pytest.raises(ServerUnreachable, match="planted"),
    ):
        push.push_adapter(
            ApiClient(http, caller.url),
            push.read_adapter(adapters[0]),
            "bot",
            aliases=[],
            base_id=None,
            is_quiet=True,
        )
