"""The server's secret on disk, and the keys derived from it."""

from __future__ import annotations

import hmac
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from loraplex.platform.errors import InsecureSecretFile
from loraplex.platform.secrets import derive_key, load_or_create_secret, parse_secret
from support.synced import record_synced


def test_derives_keys_as_rfc_5869_says() -> None:
    secret = bytes(range(32))
    extracted = hmac.digest(bytes(32), secret, "sha256")
    expanded = hmac.digest(extracted, b"loraplex v1 purpose\x01", "sha256")
    assert derive_key(secret, "purpose") == expanded


def test_derives_another_key_for_another_purpose_or_secret() -> None:
    keys = {derive_key(bytes([number]) * 32, label) for number in (1, 2) for label in ("a", "b")}
    assert len(keys) == 4


def test_makes_a_secret_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "secret"
    secret = load_or_create_secret(path)
    assert len(secret) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert load_or_create_secret(path) == secret
    assert [file.name for file in path.parent.iterdir()] == ["secret"]


def test_a_made_secret_keeps_its_name_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = record_synced(monkeypatch)
    load_or_create_secret(tmp_path / "secret")
    content, *names = synced
    assert content.parent == tmp_path
    assert names == [tmp_path]


def test_makers_at_the_same_time_get_the_same_secret(tmp_path: Path) -> None:
    barrier = Barrier(8)

    def load(_: int) -> bytes:
        barrier.wait()
        return load_or_create_secret(tmp_path / "secret")

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(load, range(8)))) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_refuses_a_secret_that_others_may_read(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    load_or_create_secret(path)
    path.chmod(mode)
    with pytest.raises(InsecureSecretFile, match="chmod 600"):
        load_or_create_secret(path)


@pytest.mark.parametrize("text", ["", "00" * 31, "00" * 33, "zz" * 32, "secret"])
def test_refuses_what_is_no_secret_without_repeating_it(text: str) -> None:
    with pytest.raises(InsecureSecretFile, match="LORAPLEX_SECRET") as caught:
        parse_secret(text, source="LORAPLEX_SECRET")
    assert not text or text not in str(caught.value)
