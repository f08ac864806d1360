"""Downloads of pushed adapters."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from support.envelopes import check_envelope
from support.server import Caller, ServerUnderTest

FILES = ("adapter_config.json", "adapter_model.safetensors")


def fetch_all(caller: Caller, folder: Path, version: int = 1) -> Path:
    folder.mkdir()
    for name in FILES:
        answer = caller.http.get(f"/v1/adapters/bot/versions/{version}/files/{name}")
        assert answer.status_code == 200, answer.text
        assert int(answer.headers["content-length"]) == len(answer.content)
        sha256 = base64.b64encode(hashlib.sha256(answer.content).digest()).decode()
        assert answer.headers["repr-digest"] == f"sha-256=:{sha256}:"
        (folder / name).write_bytes(answer.content)
    return folder


def test_what_comes_back_is_the_same_adapter(
    caller: Caller, adapters: list[Path], tmp_path: Path
) -> None:
    version = caller.push(adapters[0], "bot")
    folder = fetch_all(caller, tmp_path / "back")
    sent, back = load_file(adapters[0] / FILES[1]), load_file(folder / FILES[1])
    assert set(sent) == set(back)
    for name, tensor in sent.items():
        assert back[name].dtype == tensor.dtype
        assert np.array_equal(back[name], tensor)
    config = json.loads((folder / FILES[0]).read_text())
    assert config["r"] == 4
    pushed = json.loads((adapters[0] / FILES[0]).read_text())
    assert config["base_model_name_or_path"] == pushed["base_model_name_or_path"] is not None
    again = caller.push(folder, "again")
    assert again["digest"] == version["digest"]


def test_a_download_names_its_content_and_leaves_nothing_behind(
    caller: Caller, adapters: list[Path], server: ServerUnderTest
) -> None:
    version = caller.push(adapters[1], "bot")
    answer = caller.http.get(f"{version['history'].removesuffix('/history')}/files/{FILES[1]}")
    assert answer.headers["x-loraplex-digest"] == version["digest"]
    assert not list((server.settings.data_dir / "exports").iterdir()), "nothing is left behind"


def test_only_the_two_files_are_there(caller: Caller, adapters: list[Path]) -> None:
    caller.push(adapters[0], "bot")
    for name in ("block", "..%2Fsecret", "adapter_model.bin"):
        answer = caller.http.get(f"/v1/adapters/bot/versions/1/files/{name}")
        assert answer.status_code in {400, 404}, name
    missing = caller.http.get(f"/v1/adapters/bot/versions/2/files/{FILES[0]}")
    check_envelope(missing, "version_not_found")


@pytest.mark.parametrize("name", FILES)
def test_what_was_deleted_cannot_be_had(caller: Caller, adapters: list[Path], name: str) -> None:
    caller.push(adapters[0], "bot")
    caller.http.delete("/v1/adapters/bot/versions/1")
    answer = caller.http.get(f"/v1/adapters/bot/versions/1/files/{name}")
    assert answer.status_code == 404
