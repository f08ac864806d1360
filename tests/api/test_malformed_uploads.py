"""Malformed adapters over HTTP: each gets a 4xx with a code that names the field at fault."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import httpx
import pytest

from support.envelopes import check_envelope
from support.http_uploads import WEIGHTS, commit, put
from support.malformed import OF_THE_WHOLE_FILE
from support.mutators import MUTATORS, AdapterFiles, mutated
from support.server import Caller

pytestmark = pytest.mark.slow

OF_THE_REQUEST = {"invalid_json", "invalid_parameter", "body_too_large"}
"""What an upload's declaration is answered whose configuration is no JSON object."""


def push_files(caller: Caller, files: AdapterFiles, name: str) -> httpx.Response:
    """The first answer that is an error, or the commit's."""
    declaration = {
        "size_bytes": len(files.weights),
        "sha256": hashlib.sha256(files.weights).hexdigest(),
    }
    body = json.dumps(declaration).encode()[:-1] + b', "config": ' + files.config + b"}"
    opened = caller.http.post(
        f"/v1/adapters/{name}/uploads", content=body, headers={"content-type": "application/json"}
    )
    if opened.is_error:
        return opened
    answer = put(caller, opened.json(), files.weights, 0)
    return answer if answer.is_error else commit(caller, opened.json())


@pytest.fixture(scope="module")
def valid(adapters: list[Path]) -> AdapterFiles:
    folder = adapters[0]
    return AdapterFiles(
        (folder / "adapter_config.json").read_bytes(), (folder / WEIGHTS).read_bytes()
    )


def test_every_other_kind_is_refused_with_a_code_and_a_field_or_becomes_a_version(
    caller: Caller, valid: AdapterFiles
) -> None:
    sample = list(mutated(valid, len(MUTATORS), seed=3))[::2]
    num_refused = 0
    for number, (name, files) in enumerate(sample):
        answer = push_files(caller, files, f"bot-{number}")
        if answer.is_success:
            assert answer.json()["digest"].startswith("sha256:"), name
            continue
        num_refused += 1
        error = answer.json()["error"]
        assert 400 <= answer.status_code < 500, (name, error)
        check_envelope(answer, error["code"], param=error["param"])
        assert error["param"] or error["code"] in OF_THE_WHOLE_FILE | OF_THE_REQUEST, (name, error)
        assert error["message"].isprintable(), name
    assert num_refused > len(sample) * 2 // 3
    good = push_files(caller, valid, "good")
    assert good.is_success, good.text
