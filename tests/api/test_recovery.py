"""Processes that crash or are stopped: what clients see, and what is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.api.cli.exit_codes import ExitCode
from support.envelopes import check_envelope
from support.http_uploads import WEIGHTS, commit, open_upload, put
from support.server import (
    LORAPLEX,
    PRODUCT_ENGINE,
    Caller,
    ServerUnderTest,
    child_environment,
    serving,
)
from support.waiting import wait_for

pytestmark = pytest.mark.slow

LONG: dict[str, Any] = {"model": "bot", "prompt": "x", "max_tokens": 480, "ignore_eos": True}


@contextmanager
def streaming(caller: Caller, **changes: Any) -> Iterator[Iterator[str]]:
    """The events of a long generation that has begun: the first was received."""
    body = {**LONG, "stream": True, **changes}
    with caller.http.stream("POST", "/v1/completions", json=body) as answer:
        events = (line[6:] for line in answer.iter_lines() if line.startswith("data: "))
        assert json.loads(next(events))["choices"]
        yield events


def interrupt_group(server: ServerUnderTest) -> None:
    """As ^C on a terminal and a supervisor's stop do: everything of the server's group at once."""
    os.killpg(server.process.pid, signal.SIGTERM)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_engine_costs_coded_errors_and_nothing_else(
    server: ServerUnderTest, resident: Caller
) -> None:
    before = resident.openai.completions.create(
        model="bot", prompt="Before and after", max_tokens=8, temperature=0
    )
    with streaming(resident, n=8) as events:
        os.kill(server.engine_pid(), signal.SIGKILL)
        *_, last = events
    error = json.loads(last)["error"]
    assert error["code"] == "engine_restarted"
    assert error["retryable"] is True

    meanwhile = httpx.get(f"{server.url}/ready")
    if meanwhile.status_code != 200:
        check_envelope(meanwhile, "engine_unavailable")
        assert "status" not in meanwhile.json()["error"]["message"]
        assert 1000 <= int(meanwhile.headers["retry-after-ms"]) <= 30_000
    wait_for(server.is_ready, seconds=120)
    after = resident.openai.completions.create(
        model="bot", prompt="Before and after", max_tokens=8, temperature=0
    )
    assert after.choices[0].text == before.choices[0].text
    assert after.model == before.model


def test_a_killed_server_loses_nothing_it_acknowledged(
    tiny_base: Path, tmp_path: Path, adapters: list[Path]
) -> None:
    weights = (adapters[1] / WEIGHTS).read_bytes()
    with serving(tiny_base, tmp_path / "data", engine=PRODUCT_ENGINE) as server:
        caller = server.make_caller("acme")
        pushed = caller.push(adapters[0], "bot", aliases=["prod"])
        upload = open_upload(caller, adapters[1], "half")
        put(caller, upload, weights[:5000], 0)
        unattested = open_upload(caller, adapters[2], "unattested")
        put(caller, unattested, (adapters[2] / WEIGHTS).read_bytes(), 0)
        commit(caller, unattested)
        engine = server.engine_pid()
        server.process.kill()
        server.process.wait()
        wait_for(lambda: not is_alive(engine))

    with serving(tiny_base, tmp_path / "data", engine=PRODUCT_ENGINE) as server:
        again = Caller(server.url, caller.tenant_id, caller.slug, caller.key)
        server.callers.append(again)
        kept = again.http.get("/v1/adapters/bot/versions/1").json()
        assert {**kept, "tier": ""} == {**pushed, "tier": ""}
        assert again.http.get(f"/v1/uploads/{upload['id']}").json()["received_bytes"] == 5000
        put(again, upload, weights[5000:], 5000)
        assert commit(again, upload).json()["id"] == "acme/half@1"
        wait_for(
            lambda: (
                again.http.get("/v1/adapters/unattested").json()["versions"][0]["state"] == "ready"
            )
        )
        with streaming(again) as events:
            interrupt_group(server)
            *_, last = events
        assert last == "[DONE]"
        assert server.process.wait(60) == 0
        log = server.log.read_text()
        assert "Stopping: waiting up to 25 s for running requests." in log
        assert "Loading weights" not in log
        assert not list(server.settings.data_dir.glob("layout*.new"))


def test_what_outlives_the_drain_ends_with_an_error(tiny_base: Path, tmp_path: Path) -> None:
    with serving(tiny_base, tmp_path / "data", LORAPLEX_DRAIN_SECONDS="0.01") as server:
        caller = server.make_caller("acme")
        with streaming(caller, model=tiny_base.name, n=8) as events:
            server.process.send_signal(signal.SIGTERM)
            *_, last = events
        assert json.loads(last)["error"]["code"] == "engine_restarted"
        assert server.process.wait(60) == 0


@pytest.mark.parametrize(
    ("options", "code", "advice"),
    [
        (["--database", "sqlite:///{tmp}/other.db"], ExitCode.UNAVAILABLE, "loraplex db upgrade"),
        (["--max-num-batched-tokens", "64"], ExitCode.USAGE, "must exceed max_num_seqs"),
        (["--speculation", "medusa:{used}"], ExitCode.USAGE, "medusa: {used} has no config.json"),
    ],
    ids=["schema", "tokens", "heads"],
)
def test_a_server_that_cannot_start_says_why(
    tiny_base: Path, tmp_path: Path, options: list[str], code: ExitCode, advice: str
) -> None:
    """More of them are a newcomer's mistakes, which `make first-hour` makes."""
    used = tmp_path / "used"
    used.mkdir()
    facts = {"tmp": tmp_path, "used": used}
    command = ["serve", "--model", str(tiny_base), "--data-dir", str(tmp_path), "--port", "0"]
    done = subprocess.run(
        [*LORAPLEX, *command, *(option.format(**facts) for option in options)],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert advice.format(**facts) in done.stderr
    assert "Serving" not in done.stderr
    assert "Traceback" not in done.stderr
