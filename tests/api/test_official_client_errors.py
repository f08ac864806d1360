"""Every error class of the official client that this API can cause, with every kind of call."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from loraplex.api.client.errors import ClientError
from loraplex.platform.keys.principal import Scope
from support.models import make_adapter
from support.server import Caller, ServerUnderTest, free_port
from support.waiting import wait_for

HELLO: Any = [{"role": "user", "content": "hi"}]
CASES: dict[str, tuple[dict[str, Any], type[openai.APIStatusError], str]] = {
    "bad request": ({"n": 9}, openai.BadRequestError, "invalid_parameter"),
    "no such key": ({"key": "lpx_live_no"}, openai.AuthenticationError, "invalid_api_key"),
    "no scope": ({"scopes": "read"}, openai.PermissionDeniedError, "insufficient_scope"),
    "no such model": ({"model": "nothing"}, openai.NotFoundError, "model_not_found"),
    "not ready": ({"model": "broken"}, openai.ConflictError, "adapter_not_ready"),
    "too large": (
        {"messages": [{"role": "user", "content": "x" * (5 << 20)}]},
        openai.APIStatusError,
        "body_too_large",
    ),
}


@pytest.fixture(scope="module")
def callers(
    server: ServerUnderTest, tiny_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Caller]:
    """A tenant whose adapter `broken` was rejected, and one whose key may only read."""
    all_scopes = server.make_caller("errors-all")
    loud = make_adapter(tiny_base, tmp_path_factory.mktemp("loud"), seed=1, scale=1e18)
    with pytest.raises(ClientError):
        all_scopes.push(loud, "broken")
    return {
        "all": all_scopes,
        "read": server.make_caller("errors-read", [Scope.ADAPTERS_READ]),
    }


def ask(client: OpenAI, is_stream: bool, order: dict[str, Any]) -> None:
    answer: Any = client.chat.completions.create(**order, stream=is_stream)
    for _ in answer if is_stream else ():
        pass


def ask_async(client: OpenAI, is_stream: bool, order: dict[str, Any]) -> None:
    async def run() -> None:
        url, key = client.base_url, client.api_key
        async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as asking:
            answer: Any = await asking.chat.completions.create(**order, stream=is_stream)
            if is_stream:
                async for _ in answer:
                    pass

    asyncio.run(run())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("way", [ask, ask_async], ids=["sync", "async"])
def test_an_answer_with_an_error_status_is_the_clients_own_class(
    callers: dict[str, Caller],
    way: Callable[[OpenAI, bool, dict[str, Any]], None],
    is_stream: bool,
    case: str,
) -> None:
    changes, error_class, code = CASES[case]
    order = {"model": "tiny", "messages": HELLO, "max_tokens": 2, **changes}
    client = callers[order.pop("scopes", "all")].openai
    if key := order.pop("key", None):
        client = client.with_options(api_key=key)
    with pytest.raises(error_class) as raised:
        way(client, is_stream, order)
    assert raised.value.code == code
    assert raised.value.request_id


def test_what_a_push_is_refused_for_is_unprocessable(callers: dict[str, Caller]) -> None:
    upload = {"config": {}, "size_bytes": 1, "sha256": "0" * 64, "base_id": "sha256:other"}
    with pytest.raises(openai.UnprocessableEntityError) as raised:
        callers["all"].openai.post("/adapters/x/uploads", body=upload, cast_to=object)
    assert raised.value.code == "base_mismatch"


def test_a_dead_engine_is_an_api_error_in_the_stream_and_a_server_error_before_it(
    server: ServerUnderTest, callers: dict[str, Caller]
) -> None:
    client = callers["all"].openai
    stream = client.completions.create(
        model="tiny", prompt="x", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    os.kill(server.engine_pid(), signal.SIGKILL)
    with pytest.raises(openai.APIError) as broken:
        for _ in stream:
            pass
    assert broken.value.code == "engine_restarted"
    with pytest.raises(openai.InternalServerError) as down:
        client.completions.create(model="tiny", prompt="x", max_tokens=2)
    assert down.value.status_code == 503
    assert down.value.code == "engine_unavailable"
    wait_for(server.is_ready, seconds=120)


def test_no_server_is_a_connection_error() -> None:
    client = OpenAI(base_url=f"http://127.0.0.1:{free_port()}/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.APIConnectionError):
        client.models.list()
    client.close()
