"""The text of a key."""

from __future__ import annotations

import re
import string
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.platform.errors import InvalidApiKey
from loraplex.platform.keys.token import TOKEN_PATTERN, make_token, parse_token

BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
KNOWN = "lpx_live_AbCdEf012345_" + "s3cretS3cretS3cretS3cretS3cretS3"


def checksum(body: str) -> str:
    """CRC-32 in six base62 digits, written out."""
    number = zlib.crc32(body.encode())
    return "".join(BASE62[number // 62**power % 62] for power in range(5, -1, -1))


def test_reads_what_it_makes() -> None:
    token = make_token()
    assert parse_token(token.text) == token
    assert re.fullmatch(TOKEN_PATTERN, token.text)
    assert len(token.text) == 60


def test_reads_a_key_put_together_by_hand() -> None:
    assert parse_token(KNOWN + checksum(KNOWN)).key_id == "AbCdEf012345"


def test_never_makes_a_key_twice() -> None:
    tokens = [make_token() for _ in range(200)]
    assert len({token.key_id for token in tokens}) == 200


def test_does_not_show_the_secret() -> None:
    token = make_token()
    assert token.text not in repr(token)


@pytest.mark.parametrize("position", range(60))
def test_refuses_a_key_with_one_character_changed(position: int) -> None:
    text = make_token().text
    changed = text[:position] + ("x" if text[position] != "x" else "y") + text[position + 1 :]
    with pytest.raises(InvalidApiKey):
        parse_token(changed)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "lpx_live_",
        KNOWN,
        " " + KNOWN + checksum(KNOWN),
        KNOWN + checksum(KNOWN) + "\n",
        KNOWN.replace("live", "test") + checksum(KNOWN.replace("live", "test")),
        KNOWN.replace("A", "-") + checksum(KNOWN.replace("A", "-")),
        KNOWN.replace("A", "Ａ") + checksum(KNOWN.replace("A", "Ａ")),
        KNOWN.replace("A", "\ud800") + "AAAAAA",
        KNOWN.replace("_s3", "_-3") + checksum(KNOWN.replace("_s3", "_-3")),
    ],
)
def test_refuses_other_forms(text: str) -> None:
    with pytest.raises(InvalidApiKey):
        parse_token(text)


@given(st.text())
def test_refuses_whatever_else_is_sent(text: str) -> None:
    with pytest.raises(InvalidApiKey):
        parse_token(text)
