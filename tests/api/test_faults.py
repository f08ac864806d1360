"""A server under load whose engine crashes, whose clients disconnect or stall, and that is stopped.

Every request gets a complete answer or an error with a code; nothing is left behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from support.envelopes import check_envelope
from support.load import Load
from support.scale import part_of
from support.server import Caller, ServerUnderTest, serving
from support.waiting import wait_for

pytestmark = pytest.mark.slow

NUM_DISCONNECTS = 1000
NUM_NEVER_READING = part_of(100, 200)
NUM_KILLS = 2
TRANSIENT = {"engine_restarted", "engine_unavailable"}


@pytest.fixture(scope="module")
def faulty(
    tiny_base: Path, tmp_path_factory: pytest.TempPathFactory, adapters: list[Path]
) -> Iterator[tuple[ServerUnderTest, Caller]]:
    """A server of these tests' own: the engine of a shared one must not die too often."""
    patience = {"LORAPLEX_READER_PATIENCE_SECONDS": "10"}
    with serving(tiny_base, tmp_path_factory.mktemp("faulty"), **patience) as server:
        caller = server.make_caller("acme")
        caller.push(adapters[0], "bot", aliases=["prod"])
        yield server, caller


def is_idle(server: ServerUnderTest, free_blocks: float) -> bool:
    running = server.gauge("requests_running") + server.gauge("requests_waiting")
    return not running and server.gauge("kv_blocks_free") == free_blocks


def children(server: ServerUnderTest) -> list[str]:
    pid = server.process.pid
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))


def request_bytes(caller: Caller, path: str, body: dict[str, object]) -> bytes:
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {caller.key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
    return head.encode() + payload


def test_a_thousand_callers_that_leave_at_any_moment_leave_nothing_behind(
    faulty: tuple[ServerUnderTest, Caller], tiny_base: Path
) -> None:
    server, caller = faulty
    wait_for(lambda: server.gauge("requests_running") == 0)
    free_blocks = server.gauge("kv_blocks_free")
    host, _, port = server.url.removeprefix("http://").partition(":")
    turns = asyncio.Semaphore(24)

    async def leave(number: int) -> None:
        draw = random.Random(number)
        body: dict[str, object] = {
            "model": draw.choice(["bot", tiny_base.name]),
            "prompt": [draw.randrange(200) for _ in range(draw.randrange(1, 120))],
            "max_tokens": 300,
            "stream": draw.random() < 0.7,
            "n": draw.choice([1, 1, 2]),
        }
        async with turns:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(request_bytes(caller, "/v1/completions", body))
            if draw.random() < 0.5:
                await asyncio.sleep(draw.random() * 0.1)
            else:
                await reader.read(1)
            writer.transport.abort()

    async def scenario() -> None:
        await asyncio.gather(*(leave(number) for number in range(NUM_DISCONNECTS)))

    asyncio.run(scenario())
    wait_for(lambda: is_idle(server, free_blocks), seconds=15)


def test_the_engine_may_be_killed_again_and_again_under_load(
    faulty: tuple[ServerUnderTest, Caller], tiny_base: Path
) -> None:
    server, caller = faulty
    load = Load(server.url, caller.key, ["bot", tiny_base.name])

    async def scenario() -> None:
        async with asyncio.timeout(200), load.running(num_workers=12):
            killed = []
            for _ in range(NUM_KILLS):
                await load.until_answered(30)
                killed.append(server.engine_pid())
                os.kill(killed[-1], signal.SIGKILL)
            await load.until_answered(30)
            assert not [pid for pid in killed if Path(f"/proc/{pid}").exists()]

    asyncio.run(scenario())
    assert load.violations == []
    assert load.codes.keys() <= TRANSIENT
    assert load.codes["engine_restarted"] >= NUM_KILLS
    assert children(server) == [str(server.engine_pid())], "no process is left over"


def test_callers_that_never_read_cost_bounded_memory_and_harm_nobody(
    faulty: tuple[ServerUnderTest, Caller], tiny_base: Path
) -> None:
    server, caller = faulty
    wait_for(server.is_ready, seconds=60)
    wait_for(lambda: server.gauge("requests_running") == 0)
    free_blocks = server.gauge("kv_blocks_free")
    body: dict[str, object] = {
        "model": tiny_base.name,
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 200,
        "ignore_eos": True,
        "stream": True,
        "logprobs": True,
        "top_logprobs": 20,
    }
    host, _, port = server.url.removeprefix("http://").partition(":")
    before = resident_mib(server.process.pid)
    with ExitStack() as connections:
        for _ in range(NUM_NEVER_READING):
            connection = connections.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            connection.sendall(request_bytes(caller, "/v1/chat/completions", body))
        other = caller.openai.completions.create(model="bot", prompt="Hello", max_tokens=8)
        assert other.usage is not None
        assert other.usage.completion_tokens
        wait_for(lambda: is_idle(server, free_blocks), seconds=120)
        assert resident_mib(server.process.pid) - before < NUM_NEVER_READING / 2
        wait_for(lambda: num_dropped(server) == NUM_NEVER_READING, seconds=60)


def num_dropped(server: ServerUnderTest) -> float:
    """Chats whose caller counted as gone."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    counter = 'loraplex_http_requests_total{code="client_disconnected"'
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith(counter) and "/chat/" in line
    )


def test_told_to_stop_under_load_it_ends_every_request_and_itself_in_order(
    tiny_base: Path, tmp_path: Path
) -> None:
    with serving(tiny_base, tmp_path / "data") as server:
        caller = server.make_caller("acme")
        load = Load(server.url, caller.key, [tiny_base.name], max_tokens=400)

        async def scenario() -> None:
            async with asyncio.timeout(120), load.running(num_workers=16):
                await load.until_answered(16)
                load.may_refuse_connections = True
                server.process.send_signal(signal.SIGTERM)
                async with httpx.AsyncClient(base_url=server.url) as client:
                    while (await client.get("/ready")).is_success:
                        await asyncio.sleep(0.01)
                    check_envelope(await client.get("/ready"), "shutting_down")
                    assert (await client.get("/health")).status_code == 200
                    headers = {"authorization": f"Bearer {caller.key}"}
                    refused = await client.get("/v1/models", headers=headers)
                check_envelope(refused, "shutting_down")
                assert refused.headers["connection"] == "close"
                assert int(refused.headers["retry-after"]) >= 1
                num_before = load.num_answered
                server.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(server.process.wait, 60)
                assert load.num_answered > num_before, "what ran was let finish"

        asyncio.run(scenario())
        assert load.violations == []
        assert load.codes.keys() == {"shutting_down"}
        assert server.process.returncode == 0
