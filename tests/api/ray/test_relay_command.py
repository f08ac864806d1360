"""What the relay of a trainer is started with."""

from __future__ import annotations

import tempfile

from loraplex.api.ray.relay_command import relay_environment


def test_a_relay_finds_the_cluster_and_knows_no_credentials() -> None:
    given = {
        "HOME": "/home/loraplex",
        "RAY_AUTH_MODE": "token",
        "LORAPLEX_DATABASE": "postgresql://loraplex:secret@db/loraplex",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    found = relay_environment(given)
    assert found["RAY_AUTH_MODE"] == "token"
    assert found["RAY_AUTH_TOKEN_PATH"] == "/home/loraplex/.ray/auth_token"
    assert found["RAY_TMPDIR"] == tempfile.gettempdir()
    assert "secret" not in " ".join(found.values())


def test_a_token_that_the_operator_names_is_used() -> None:
    given = {"HOME": "/root", "RAY_AUTH_TOKEN_PATH": "/run/token", "RAY_TMPDIR": "/ray"}
    found = relay_environment(given)
    assert (found["RAY_AUTH_TOKEN_PATH"], found["RAY_TMPDIR"]) == ("/run/token", "/ray")
