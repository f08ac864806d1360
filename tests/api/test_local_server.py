"""A server of our own that cannot start says why, and its port is free again."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from loraplex.api.local.server import HOST, LocalServerFailed, free_port, running_server


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


def test_a_free_port_can_be_listened_on() -> None:
    with socket.create_server((HOST, free_port())) as listening:
        assert listening.getsockname()[0] == HOST
