"""`loraplex adapters` with a running server."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.api.cli.exit_codes import ExitCode
from loraplex.api.client import uploads
from loraplex.api.client.api_client import ApiClient, api_path
from loraplex.api.client.errors import ApiRefused, ServerUnreachable
from loraplex.api.client.local_adapter import read_adapter
from loraplex.api.client.progress import Progress
from loraplex.api.local.adapter_folder import CONFIG_FILE, WEIGHTS_FILE
from support.command import Command
from support.server import Caller, free_port


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caller: Caller
) -> Command:
    return Command(monkeypatch, capsys, caller)


def test_push_prints_the_version_and_how_to_call_it_by_its_new_alias(
    command: Command, adapters: list[Path], caller: Caller
) -> None:
    code, out, err = command("push", str(adapters[0]), "bot", "--alias", "prod")
    assert (code, out) == (ExitCode.OK, f"{caller.slug}/bot@1\n")
    assert "ready" in err
    assert "moves logits by up to" in err
    assert f"curl {caller.url}/v1/chat/completions" in err
    assert f'"model": "{caller.slug}/bot@prod"' in err
    assert f'model="{caller.slug}/bot@prod"' in err
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
    monkeypatch.setattr("loraplex.api.cli.adapters.upload", lambda *_args, **_options: unattested)
    code, out, err = command("push", str(adapters[0]), "bot", "--no-wait")
    assert (code, out) == (ExitCode.OK, "acme/bot@1\n")
    assert "curl" not in err
    assert "OpenAI" not in err


NAMES = ["bot?x=1", "bot#x", "../models", "..", "", "acme/bot", "bot@1", "bot@prod", "Bot", "ä"]
"""None of an own adapter."""


@pytest.mark.parametrize(
    "arguments",
    [
        *[(command,) for command in ("show", "versions", "rm", "rollback")],
        ("push", "."),
        ("alias", "rm", "{name}", "prod"),
        ("alias", "set"),
    ],
    ids=" ".join,
)
def test_only_an_adapters_own_name_reaches_the_server(
    command: Command, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setenv("LORAPLEX_URL", "http://127.0.0.1:1")
    for name in NAMES:
        words = [word.format(name=name) for word in arguments]
        rest = [] if "rm" in words[1:] else [name]
        rest += ["prod", "1"] if words[-1] == "set" else []
        code, _, err = command(*words, *rest)
        assert code == ExitCode.USAGE, name
        assert "without tenant/ or @version" in err
        assert "Traceback" not in err


def test_only_an_alias_reaches_the_server(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_URL", "http://127.0.0.1:1")
    for alias in ("..", "1", "prod?x", "bot@prod"):
        code, _, err = command("alias", "rm", "bot", alias)
        assert code == ExitCode.USAGE, alias
        assert "not an alias" in err


def test_a_part_of_a_path_stays_one_part() -> None:
    assert api_path("adapters", "a/b?c#d", "versions", 3) == "/adapters/a%2Fb%3Fc%23d/versions/3"


def test_a_url_of_something_else_is_named(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for url in ("http://host:port", "127.0.0.1:8000", "ftp://host"):
        monkeypatch.setenv("LORAPLEX_URL", url)
        code, _, err = command("ls")
        assert (code, "LORAPLEX_URL" in err) == (ExitCode.USAGE, True)
    monkeypatch.setenv("LORAPLEX_URL", "http://127.0.0.1:1")
    for status in (200, 404, 502):
        answer = httpx.Response(status, text="<html>")
        monkeypatch.setattr(
            "httpx.Client.request",
            lambda *_args, answer=answer, **_options: answer,
        )
        code, _, err = command("ls")
        assert (code, "LORAPLEX_URL" in err) == (ExitCode.UNAVAILABLE, True)


def test_what_is_no_key_is_not_repeated(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("lpx_live_id_secret\nnext", "lpx_live_id_secret\x7f", "schlüssel_secret"):
        monkeypatch.setenv("LORAPLEX_API_KEY", key)
        code, out, err = command("ls")
        assert (code, out) == (ExitCode.AUTHENTICATION, "")
        assert "secret" not in err


def test_a_key_from_a_file_may_end_in_a_line_break(
    command: Command, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_API_KEY", f"{caller.key}\r\n")
    assert command("ls")[0] == ExitCode.OK


def test_the_life_of_an_adapter_as_json(
    command: Command, adapters: list[Path], caller: Caller
) -> None:
    ask = command.ask
    assert ask("push", str(adapters[0]), "bot")["state"] == "ready"
    assert ask("push", str(adapters[1]), "bot")["version"] == 2
    assert ask("alias", "set", "bot", "prod", "1")["version"] == 1
    assert [adapter["aliases"] for adapter in ask("ls")] == [{"prod": 1}]
    assert [entry["aliases"] for entry in ask("show", "bot")["versions"]] == [["prod"], []]
    assert ask("alias", "rm", "bot", "prod")["deleted"] is True
    deleted = ask("rm", "bot", "--version", "1", "--yes")["versions"]
    assert [entry["version"] for entry in deleted] == [1]
    assert [entry["version"] for entry in ask("rm", "bot", "--yes")["versions"]] == [2]
    assert ask("ls") == []


def test_tables_for_people(command: Command, adapters: list[Path]) -> None:
    command("push", str(adapters[0]), "bot", "--alias", "prod")
    assert command("ls")[1].splitlines()[1].split()[:4] == ["bot", "1:ready", "1", "prod=1"]
    header, row = command("show", "bot")[1].splitlines()
    assert header.split()[:4] == ["version", "state", "aliases", "tier"]
    assert row.split()[:3] == ["1", "ready", "prod"]
    assert "bot@prod is now bot@1" in command("alias", "set", "bot", "prod", "1")[1]
    command("alias", "rm", "bot", "prod")
    assert "deleted bot@1" in command("rm", "bot", "--drain", "1", "--yes")[1]


class Terminal(io.StringIO):
    """Standard input of somebody who types."""

    def isatty(self) -> bool:
        return True


def test_nothing_is_deleted_unless_it_is_confirmed(
    command: Command, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    command("push", str(adapters[0]), "bot")
    command("push", str(adapters[1]), "bot")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    code, _, err = command("rm", "bot")
    assert (code, "--yes" in err) == (ExitCode.USAGE, True)
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    code, _, err = command("rm", "bot")
    assert (code, "bot with all its 2 versions permanently?" in err) == (ExitCode.FAILED, True)
    assert len(command.ask("show", "bot")["versions"]) == 2
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    code, out, err = command("rm", "bot", "--version", "2")
    assert (code, "Delete bot@2 permanently?" in err) == (ExitCode.OK, True)
    assert "deleted bot@2" in out


def test_an_adapter_that_an_alias_names_is_not_deleted(
    command: Command, adapters: list[Path]
) -> None:
    command("push", str(adapters[0]), "bot", "--alias", "prod")
    code, _, err = command("rm", "bot", "--yes")
    assert code == ExitCode.CONFLICT
    assert "loraplex adapters alias rm bot prod" in err
    assert command.ask("show", "bot")["aliases"] == {"prod": 1}


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
    assert command("rm", "bot", "--version", "1", "--yes")[0] == ExitCode.CONFLICT
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
    code, _, err = command("ls")
    assert (code, "Check that the server is running" in err) == (ExitCode.UNAVAILABLE, True)


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def spoil_config(folder: Path) -> None:
    (folder / CONFIG_FILE).write_text("{")


def remove_config(folder: Path) -> None:
    (folder / CONFIG_FILE).unlink()


def merge_into_a_model(folder: Path) -> None:
    for file in list(folder.iterdir()):
        file.unlink()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")


def remove_weights(folder: Path) -> None:
    (folder / WEIGHTS_FILE).unlink()


def pickle_weights(folder: Path) -> None:
    (folder / WEIGHTS_FILE).rename(folder / "adapter_model.bin")


@pytest.mark.parametrize(
    ("spoil", "advice"),
    [
        (remove_folder, "is not a folder"),
        (spoil_config, "is not JSON"),
        (remove_config, "has no adapter_config.json"),
        (remove_weights, "has no adapter_model.safetensors"),
        (pickle_weights, "safe_serialization=True"),
        (merge_into_a_model, "before merge_and_unload()"),
        (shutil.rmtree, "is not a folder"),
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


@pytest.mark.parametrize(
    "args",
    [
        ("alias", "canary", "bot", "prod", "2", "--percent"),
        ("pin", "bot", "--ttl"),
        ("prefetch", "bot", "--ttl"),
        ("rm", "bot", "--drain"),
        ("validate", ".", "--max-full-matrix-mib"),
    ],
)
def test_a_number_without_end_is_a_mistake_on_the_command_line(
    command: Command, args: tuple[str, ...]
) -> None:
    for number in ("inf", "-inf", "nan"):
        code, out, err = command(*args, number)
        assert (code, out) == (ExitCode.USAGE, ""), number
        assert args[-1] in err


def test_a_broken_connection_is_taken_up_again(
    caller: Caller, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other part is lost on the way back, and one on the way there."""
    monkeypatch.setattr(uploads, "PART_BYTES", 10_000)
    monkeypatch.setattr(uploads, "FIRST_PAUSE_SECONDS", 0.0)
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
        version = uploads.push_adapter(
            client, read_adapter(adapters[0]), "bot", aliases=[], base_id=None, progress=Progress()
        )
    assert num_parts > 3
    assert version["version"] == 1


def test_an_interrupted_pushs_last_part_is_waited_for(
    caller: Caller, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is between may still send what the command that was interrupted gave it."""
    monkeypatch.setattr(uploads, "FIRST_PAUSE_SECONDS", 0.0)
    adapter = read_adapter(adapters[0])
    others_part = 10_000
    refused: list[httpx.Response] = []

    class Busy(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            if request.method != "PUT" or refused:
                return super().handle_request(request)
            first = adapter.folder.weights.read_bytes()[:others_part]
            path = request.url.path
            octets = {"content-type": "application/octet-stream"}
            caller.http.put(path, params={"offset": 0}, content=first, headers=octets)
            refused.append(super().handle_request(request))
            return refused[0]

    headers = {"authorization": f"Bearer {caller.key}"}
    with httpx.Client(base_url=caller.url, headers=headers, transport=Busy()) as http:
        client = ApiClient(http, caller.url)
        version = uploads.push_adapter(
            client, adapter, "bot", aliases=[], base_id=None, progress=Progress()
        )
    assert refused[0].status_code == 409
    assert version["version"] == 1


@pytest.mark.parametrize("num_refused", [2, 99])
def test_a_commit_is_asked_for_again_while_that_may_succeed(
    command: Command,
    adapters: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    num_refused: int,
) -> None:
    monkeypatch.setattr(uploads, "FIRST_PAUSE_SECONDS", 0.0)
    post = ApiClient.post
    num_tries = 0

    def refused(client: ApiClient, path: str, body: Any = None, *, is_slow: bool = False) -> Any:
        nonlocal num_tries
        if path.endswith("/commit"):
            num_tries += 1
            if num_tries <= num_refused:
                raise ApiRefused("planted", code="store_unavailable", status=503, is_retryable=True)
        return post(client, path, body, is_slow=is_slow)

    monkeypatch.setattr(ApiClient, "post", refused)
    code, _, err = command("push", str(adapters[0]), "bot")
    if num_refused == 2:
        assert (code, num_tries) == (ExitCode.OK, 3)
    else:
        assert (code, num_tries) == (ExitCode.UNAVAILABLE, 1 + uploads.MAX_RECONNECTS)
        assert "(store_unavailable). The uploaded bytes are kept: push again to resume." in err


def test_a_server_that_stays_away_is_given_up(
    caller: Caller, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "FIRST_PAUSE_SECONDS", 0.0)

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
        uploads.push_adapter(
            ApiClient(http, caller.url),
            read_adapter(adapters[0]),
            "bot",
            aliases=[],
            base_id=None,
            progress=Progress(),
        )


def test_bytes_that_are_there_are_not_sent_again(
    command: Command, adapters: list[Path], caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("push", str(adapters[0]), "bot")

    def refuse(*_args: Any, **_options: Any) -> Any:
        raise AssertionError("nothing is to be sent")

    monkeypatch.setattr(ApiClient, "put_bytes", refuse)
    code, out, err = command("push", str(adapters[0]), "bot", "--alias", "prod")
    assert (code, out) == (ExitCode.OK, f"{caller.slug}/bot@1\n")
    assert f"Exists as {caller.slug}/bot@1: nothing was uploaded." in err
    assert caller.http.get("/v1/adapters/bot").json()["aliases"] == {"prod": 1}


def test_an_interrupted_push_shows_nothing_and_the_same_command_goes_on(
    command: Command, adapters: list[Path], caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "PART_BYTES", 10_000)
    sent: list[int] = []
    put_bytes = ApiClient.put_bytes

    def interrupted(client: ApiClient, path: str, content: bytes, *, offset: int) -> Any:
        sent.append(offset)
        if len(sent) == 3:
            raise KeyboardInterrupt
        return put_bytes(client, path, content, offset=offset)

    monkeypatch.setattr(ApiClient, "put_bytes", interrupted)
    push_again = ("push", str(adapters[0]), "bot", "--alias", "prod")
    code, out, err = command(*push_again)
    assert (code, out) == (ExitCode.INTERRUPTED, "")
    assert "Run the same command to resume." in err
    assert caller.http.get("/v1/adapters").json()["data"] == []
    assert caller.http.get("/v1/adapters/bot").status_code == 404

    code, out, err = command(*push_again)
    assert (code, out) == (ExitCode.OK, f"{caller.slug}/bot@1\n")
    assert "Resuming at 20000 of " in err
    assert sent[:4] == [0, 10_000, 20_000, 20_000]
    assert sent[3:] == sorted(set(sent[3:])), "nothing is sent twice"


def test_a_push_that_is_interrupted_while_it_is_examined_is_found_again(
    command: Command, adapters: list[Path], caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    post = ApiClient.post

    def interrupted(
        client: ApiClient, path: str, body: Any = None, *, is_slow: bool = False
    ) -> Any:
        answer = post(client, path, body, is_slow=is_slow)
        if path.endswith("/commit"):
            monkeypatch.undo()
            raise KeyboardInterrupt
        return answer

    with monkeypatch.context() as planted:
        planted.setattr(ApiClient, "post", interrupted)
        planted.setattr(monkeypatch, "undo", planted.undo)
        assert command("push", str(adapters[0]), "bot")[0] == ExitCode.INTERRUPTED
    code, out, _ = command("push", str(adapters[0]), "bot")
    assert (code, out) == (ExitCode.OK, f"{caller.slug}/bot@1\n")


def test_aliases_are_split_moved_and_rolled_back(command: Command, adapters: list[Path]) -> None:
    for folder in adapters[:2]:
        command("push", str(folder), "bot")
    command("alias", "set", "bot", "prod", "1")
    split = command("alias", "canary", "bot", "prod", "2", "--percent", "12.5")[1]
    assert split == "bot@prod is now bot@1, and bot@2 for 12.5 %\n"
    assert "bot@prod sends 12.5 % to bot@2" in command("show", "bot")[2]
    assert command("alias", "set", "bot", "prod", "2")[1] == "bot@prod is now bot@2\n"
    assert command("rollback", "bot")[1] == split
    assert command("alias", "rollback", "bot", "prod")[1] == "bot@prod is now bot@1\n"
    assert command("rollback", "bot")[0] == ExitCode.CONFLICT
    rows = command("alias", "history", "bot", "prod")[1].splitlines()
    assert [row.split()[1] for row in rows[1:]] == [
        "rollback",
        "rollback",
        "set",
        "canary",
        "set",
    ]
    watched = command("alias", "canary", "bot", "prod", "2", "--watch")[1]
    assert watched == "bot@prod is now bot@1, and bot@2 for 10 %, watched\n"
    limits = ("--limit", "error_rate=0.5", "--limit", "latency=none", "--limit", "min_requests=20")
    shown = json.loads(command("alias", "canary", "bot", "prod", "2", *limits, "--json")[1])
    assert shown["canary"]["limits"] == {
        "error_rate": 0.5,
        "refusals": 0.05,
        "length": 1.5,
        "latency": None,
        "judge": 0.1,
        "judge_model": None,
        "judge_percent": 10.0,
        "min_requests": 20,
    }
    assert "watched" in command("alias", "history", "bot", "prod")[1]
    judged = ("--judge", "bot@1", "--judge-percent", "20", "--limit", "judge=0.2", "--json")
    of_judge = json.loads(command("alias", "canary", "bot", "prod", "2", *judged)[1])
    assert of_judge["canary"]["limits"] == {
        "error_rate": 0.02,
        "refusals": 0.05,
        "length": 1.5,
        "latency": 1.5,
        "judge": 0.2,
        "judge_model": "bot@1",
        "judge_percent": 20.0,
        "min_requests": 100,
    }
    for unusable in (
        *("judge=0.2", "colour=1", "length", "length=x", "length=nan"),
        *("min_requests=none", "min_requests=1.5"),
    ):
        code, _, err = command("alias", "canary", "bot", "prod", "2", "--limit", unusable)
        assert code == ExitCode.USAGE, err
    unjudged = ("alias", "canary", "bot", "prod", "2", "--judge-percent", "20")
    assert command(*unjudged)[0] == ExitCode.USAGE
    assert command("alias", "shadow", "bot", "prod")[0] == ExitCode.NOT_FOUND
    out = command("alias", "shadow", "bot", "prod", "2", "--percent", "2.5")[1]
    assert out.startswith("bot@2 answers copies of 2.5 % of bot@prod's requests\n")
    view = json.loads(command("alias", "shadow", "bot", "prod", "--json")[1])
    assert (view["version"], view["compared"]) == (2, 0)
    assert command("alias", "shadow", "bot", "prod", "2", "--end")[0] == ExitCode.USAGE
    assert command("alias", "shadow", "bot", "prod", "2", "--percent", "0")[0] == ExitCode.USAGE
    ended = command("alias", "shadow", "bot", "prod", "--end")[1]
    assert ended == "bot@prod has no shadow any more\n"
    assert command("alias", "canary", "bot", "blue", "2")[0] == ExitCode.NOT_FOUND
    assert command("alias", "canary", "bot", "prod", "2", "--percent", "0")[0] == ExitCode.USAGE
    assert command("alias", "canary", "bot", "prod", "9")[0] == ExitCode.NOT_FOUND


def test_a_version_is_fetched_before_anybody_asks(command: Command, adapters: list[Path]) -> None:
    command("push", str(adapters[0]), "bot")
    code, out, err = command("prefetch", "bot", "--wait", "--ttl", "600")
    assert code == ExitCode.OK
    assert out.endswith("/bot@1: It is on the device and ready for requests.\n")
    assert "prefetch, until " in err
    code, out, err = command("pin", "bot@1", "--wait")
    assert "pin, without expiry" in err
    assert "pin" not in command("unpin", "bot@1")[2]
    code, out, err = command("why", "bot@latest")
    assert code == ExitCode.OK
    assert "It is on the device" in out
    assert [line.split()[1] for line in err.splitlines() if "T" in line.split()[0]] == [
        "validated",
        "attesting",
        "ready",
    ]
    assert command.ask("why", "bot")["reason"] == "resident"
    assert command("why", "bot@9")[0] == ExitCode.NOT_FOUND


def test_the_list_has_every_page(
    command: Command, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a", "b", "c"]
    for name in names:
        command("push", str(adapters[0]), name)
    get = ApiClient.get

    def in_small_pages(client: ApiClient, path: str, **query: str | int) -> Any:
        return get(client, path, **({**query, "limit": 1} if path == "/adapters" else query))

    monkeypatch.setattr(ApiClient, "get", in_small_pages)
    assert [entry["name"] for entry in command.ask("ls")] == names


def test_a_download_is_what_was_pushed(
    command: Command, adapters: list[Path], tmp_path: Path
) -> None:
    digest = command.ask("push", str(adapters[0]), "bot")["digest"]
    folder = tmp_path / "back"
    code, out, _ = command("download", "bot@1", str(folder))
    assert code == ExitCode.OK
    assert out.split() == [str(folder / name) for name in (CONFIG_FILE, WEIGHTS_FILE)]
    assert {path.name for path in folder.iterdir()} == {CONFIG_FILE, WEIGHTS_FILE}
    assert command.ask("push", str(folder), "copy")["digest"] == digest
    assert command("download", "bot", str(folder))[0] == ExitCode.CONFLICT
    assert command("download", "bot", str(folder), "--force")[0] == ExitCode.OK
    assert command("download", "bot@2", str(tmp_path / "none"))[0] == ExitCode.NOT_FOUND
    assert command("download", str(folder), "bot")[0] == ExitCode.USAGE


def test_a_damaged_download_gets_no_name(
    command: Command, adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("push", str(adapters[0]), "bot")
    iter_bytes = httpx.Response.iter_bytes

    def damaged(response: httpx.Response, chunk_size: int | None = None) -> Any:
        for piece in iter_bytes(response, chunk_size):
            is_file = "/files/" in response.url.path
            yield bytes([piece[0] ^ 1]) + piece[1:] if is_file else piece

    monkeypatch.setattr(httpx.Response, "iter_bytes", damaged)
    code, _, err = command("download", "bot", str(tmp_path / "back"))
    assert code == ExitCode.UNAVAILABLE
    assert "damaged" in err
    assert list((tmp_path / "back").iterdir()) == []


def test_an_interrupted_command_says_what_goes_on(
    command: Command, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    command("push", str(adapters[0]), "bot")

    def interrupted(*_args: Any, **_options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(ApiClient, "delete", interrupted)
    code, _, err = command("rm", "bot", "--yes")
    assert (code, "/v1/adapters/bot/deletions" in err) == (ExitCode.INTERRUPTED, True)
    monkeypatch.setattr("loraplex.api.cli.pins._wait", interrupted)
    code, _, err = command("pin", "bot", "--wait")
    assert (code, "The request stays in effect" in err) == (ExitCode.INTERRUPTED, True)


def test_receipts_are_printed(command: Command, adapters: list[Path]) -> None:
    command("push", str(adapters[0]), "bot")
    command("push", str(adapters[0]), "copy")
    command("prefetch", "bot", "--wait")
    assert "shared with another version" in command("rm", "copy", "--yes")[1]
    out = command("rm", "bot", "--drain", "0", "--yes")[1]
    assert "bytes zeroed" in out
    assert "device 0 bytes" not in out


def test_an_interrupted_wait_says_what_goes_on(
    command: Command, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(uploads, "SETTLED_STATES", frozenset({"settled"}))
    monkeypatch.setattr("loraplex.api.client.uploads.time.sleep", interrupt)
    code, out, err = command("push", str(adapters[0]), "bot")
    assert (code, out) == (ExitCode.INTERRUPTED, "")
    assert "loraplex adapters why bot@1" in err
