"""The egress process: what it may do, and what happens when it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from loraplex.adapters.child import child_environment
from loraplex.adapters.landlock import landlock_version
from loraplex.api.settings import Settings
from loraplex.api.webhooks.egress_client import EgressClient, EgressEnded
from loraplex.api.webhooks.sender import Answered
from loraplex.platform.webhooks.event_types import Failure
from loraplex.platform.webhooks.target import TargetPolicy
from support.webhooks import Receiver, never_answer

needs_landlock = pytest.mark.skipif(landlock_version() < 4, reason="needs Landlock with TCP")


@asynccontextmanager
async def running(policy: TargetPolicy, authority: Path) -> AsyncIterator[EgressClient]:
    environment = {**child_environment(), "SSL_CERT_FILE": str(authority / "authority.pem")}
    client = EgressClient(policy, environment=environment)
    client.start()
    try:
        await ready(client)
        yield client
    finally:
        await client.close()


async def ready(client: EgressClient, *, after: int | None = None) -> int:
    async with asyncio.timeout(60):
        while (pid := client.pid) is None or pid == after:
            await asyncio.sleep(0.02)
    return pid


def test_a_delivery_goes_through_the_process(
    policy: TargetPolicy, authority: Path, receiver: Receiver
) -> None:
    async def deliver() -> list[Answered]:
        async with running(policy, authority) as client:
            url = receiver.url("/egress")
            found = [await client.deliver(url, {"x-test": "1"}, b"\x00\xff")]
            found.append(await client.deliver("https://hooks.example/", {}, b""))
            return found

    assert asyncio.run(deliver()) == [
        Answered(204, None),
        Answered(None, Failure.HOST_NOT_ALLOWED),
    ]
    request = receiver.received[-1]
    assert (request.path, request.body) == ("/egress", b"\x00\xff")
    assert request.headers["x-test"] == "1"


def test_a_process_that_is_killed_is_replaced(
    policy: TargetPolicy, authority: Path, receiver: Receiver
) -> None:
    receiver.respond["/killed"] = never_answer

    async def kill() -> None:
        async with running(policy, authority) as client:
            pid = await ready(client)
            call = asyncio.create_task(client.deliver(receiver.url("/killed"), {}, b""))
            while not any(each.path == "/killed" for each in receiver.received):
                await asyncio.sleep(0.02)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(EgressEnded):
                await call
            with pytest.raises(EgressEnded):
                await client.deliver(receiver.url(), {}, b"")
            await ready(client, after=pid)
            assert await client.deliver(receiver.url(), {}, b"") == Answered(204, None)

    asyncio.run(kill())


def test_the_process_ends_with_its_server(policy: TargetPolicy, authority: Path) -> None:
    async def run() -> int:
        async with running(policy, authority) as client:
            return await ready(client)

    pid = asyncio.run(run())
    assert not Path(f"/proc/{pid}").exists()


def test_the_process_gets_no_credentials(
    policy: TargetPolicy,
    authority: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority / "authority.pem"))
    for name in ("LORAPLEX_SECRET", "LORAPLEX_DATABASE", "AWS_SECRET_ACCESS_KEY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "private" if name != "LORAPLEX_SECRET" else "ab" * 32)
    environment = Settings(data_dir=tmp_path).egress_environment
    assert environment["SSL_CERT_FILE"] == str(authority / "authority.pem")

    async def read_environment() -> tuple[str, list[str]]:
        client = EgressClient(policy, environment=environment)
        client.start()
        try:
            proc = Path(f"/proc/{await ready(client)}")
            files = [os.readlink(each) for each in (proc / "fd").iterdir()]
            return (proc / "environ").read_text(), files
        finally:
            await client.close()

    found, files = asyncio.run(read_environment())
    assert "private" not in found
    assert "ab" * 32 not in found
    assert not [file for file in files if str(tmp_path) in file or ".db" in file]


_PROBE = """
import json, socket, subprocess, sys
from pathlib import Path
from loraplex.api.webhooks.egress_process import confine

allowed, denied, private = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
confine({allowed})

def tried(action):
    try:
        action()
    except OSError as exc:
        return type(exc).__name__
    return "done"

def connect(port):
    socket.create_connection(("127.0.0.1", port), timeout=5).close()

def listen():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))

print(json.dumps({
    "resolve": tried(lambda: socket.getaddrinfo("localhost", 443)),
    "connect": tried(lambda: connect(allowed)),
    "connect elsewhere": tried(lambda: connect(denied)),
    "listen": tried(listen),
    "read": tried(lambda: Path(private).read_text()),
    "write": tried(lambda: Path(private).write_text("x")),
    "create": tried(lambda: Path(private + ".new").write_text("x")),
    "read accounts": tried(lambda: Path("/etc/passwd").read_text()),
    "run": tried(lambda: subprocess.run(["/bin/true"])),
    "import": tried(lambda: __import__("http.client")),
}))
"""


@needs_landlock
def test_the_process_reaches_no_other_ports_files_or_programs(tmp_path: Path) -> None:
    private = tmp_path / "secret"
    private.write_text("secret")
    with (
        socket.create_server(("127.0.0.1", 0)) as allowed,
        socket.create_server(("127.0.0.1", 0)) as denied,
    ):
        ports = [str(each.getsockname()[1]) for each in (allowed, denied)]
        command = [sys.executable, "-P", "-S", "-c", _PROBE, *ports, str(private)]
        ended = subprocess.run(
            command, env=child_environment(), capture_output=True, text=True, check=True
        )
    refused = "PermissionError"
    assert json.loads(ended.stdout) == {
        "resolve": "done",
        "connect": "done",
        "connect elsewhere": refused,
        "listen": refused,
        "read": refused,
        "write": refused,
        "create": refused,
        "read accounts": refused,
        "run": refused,
        "import": "done",
    }
    assert private.read_text() == "secret"
