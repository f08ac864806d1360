"""The examining process is killed: the client need not upload again."""

from __future__ import annotations

from pathlib import Path

from support.envelopes import check_envelope
from support.http_uploads import WEIGHTS, commit, open_upload, put
from support.processes import killing
from support.server import Caller, ServerUnderTest

INTAKE = "loraplex.adapters.intake"


def test_a_killed_examination_is_retryable_and_keeps_the_bytes(
    server: ServerUnderTest, caller: Caller, adapters: list[Path]
) -> None:
    upload = open_upload(caller, adapters[0], "bot")
    put(caller, upload, (adapters[0] / WEIGHTS).read_bytes(), 0)
    with killing(server.process.pid, INTAKE) as killed:
        refused = commit(caller, upload)
    assert len(killed) == 2, "it was tried again once"
    check_envelope(refused, "intake_unavailable")
    assert refused.status_code == 503
    assert refused.json()["error"]["retryable"] is True

    again = open_upload(caller, adapters[0], "bot")
    assert again["id"] == upload["id"]
    assert again["received_bytes"] == again["size_bytes"], "nothing is to be sent"
    assert commit(caller, again).json()["id"].endswith("/bot@1")
