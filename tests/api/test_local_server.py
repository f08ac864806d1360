"""A local server that cannot start reports why, and its port is free again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loraplex.api.local.server import (
    HOST,
    LocalServerFailed,
    free_port,
    leave_on_sigterm,
    running_server,
)


@pytest.mark.slow
def test_a_server_that_cannot_start_is_reported_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    options = ["--model", str(tmp_path / "nowhere"), "--data-dir", str(tmp_path / "data")]
    with (
        pytest.raises(LocalServerFailed, match=r"(?s)ended while it started.*nowhere"),
        running_server(options, port=None, log=tmp_path / "serve.log"),
    ):
        pytest.fail("it is not ready")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_server_is_spawned_stops_the_server(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen, spawned = subprocess.Popen, []

    def spawn(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        spawned.append(popen(*arguments, **options))
        signal.raise_signal(number)
        return spawned[0]

    monkeypatch.setattr(subprocess, "Popen", spawn)
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    leave_on_sigterm()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        with (
            pytest.raises((SystemExit, KeyboardInterrupt)),
            running_server([], port=None, log=tmp_path / "serve.log"),
        ):
            pytest.fail("the signal is lost")
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    assert spawned[0].returncode is not None


def test_a_free_port_can_be_listened_on() -> None:
    with socket.create_server((HOST, free_port())) as listening:
        assert listening.getsockname()[0] == HOST
