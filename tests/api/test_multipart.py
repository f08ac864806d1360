"""The reader of forms, compared with what the client's library encoded, however it is cut."""

from __future__ import annotations

import random

import httpx
import pytest

from loraplex.adapters.wiping import wipe
from loraplex.api.contract.errors import ApiError
from loraplex.api.http.multipart import (
    MAX_FIELD_BYTES,
    MAX_FIELDS,
    MAX_HEADER_BYTES,
    FormReader,
    boundary_of,
)

URL = "http://server/"


def encoded(
    data: dict[str, str], content: bytes, filename: str = "in.jsonl"
) -> tuple[bytes, bytes]:
    """A form's boundary and body."""
    request = httpx.Request("POST", URL, data=data, files={"file": (filename, content)})
    return boundary_of(request.headers["content-type"]), request.read()


def read(boundary: bytes, body: bytes, sizes: list[int]) -> tuple[FormReader, bytes]:
    """The form, fed in pieces of these sizes, and its file."""
    form, found, start = FormReader(boundary), b"", 0
    for size in [*sizes, len(body)]:
        found += b"".join(form.feed(body[start : start + size]))
        start += size
    form.finish()
    return form, found


def test_fields_and_file_are_those_that_were_sent_however_the_body_is_cut() -> None:
    draw = random.Random(1)
    for _ in range(300):
        boundary, _body = encoded({}, b"")
        tricky = [b"\r\n", b"\r\n--", b"--", b"\r", b"x", b"\r\n--" + boundary[:-1]]
        content = b"".join(draw.choices(tricky, k=draw.randint(0, 40)))
        data = {"purpose": "batch", "expires_after[seconds]": "3600", "name": "ü"}
        boundary, body = encoded(data, content, 'a"b ü.jsonl')
        sizes = [draw.randint(0, 40) for _ in range(draw.randint(0, 80))]
        form, found = read(boundary, body, sizes)
        assert (form.fields, found, form.num_file_bytes) == (data, content, len(content))
        assert form.filename == "a%22b ü.jsonl"  # as browsers write it


PIECES = [
    *(b"\r\n--xx", b"\r\n--xx\r\n", b"\r\n--xx--", b"\r\n", b"\r", b"\n", b"--", b"-", b" ", b"y"),
    *(
        b'Content-Disposition: form-data; name="file"\r\n',
        b'content-disposition: form-data; name="',
    ),
    *(b'a"', b"a:", b"\r\n\r\n", b"\xff", b"\x00"),
]


def test_any_bytes_have_one_outcome_however_they_are_cut() -> None:
    draw = random.Random(2)
    outcomes = set()
    for _ in range(3000):
        body = b"\r\n" * draw.randint(0, 1) + b"--xx"
        body += b'\r\nContent-Disposition: form-data; name="file"\r\n\r\n' * draw.randint(0, 1)
        body += b"".join(draw.choices(PIECES, k=draw.randint(0, 12)))
        body += b"\r\n--xx--" * draw.randint(0, 1)
        whole = outcome(body, [])
        assert outcome(body, [1] * len(body)) == whole, body
        assert outcome(body, [draw.randint(0, 9) for _ in body]) == whole
        outcomes.add(whole[0])
    assert outcomes == {"read", "invalid_form", "invalid_parameter"}


def outcome(body: bytes, sizes: list[int]) -> tuple[object, ...]:
    try:
        form, found = read(BOUNDARY, body, sizes)
    except ApiError as refused:
        return (refused.code,)
    return "read", form.fields, form.filename, found


def test_fields_stay_when_the_chunk_that_brought_them_is_wiped() -> None:
    boundary, body = encoded({"purpose": "batch"}, b"content")
    start, end = body.index(b"batch"), body.index(b"batch") + len(b"batch")
    form = FormReader(boundary)
    for chunk in (bytearray(body[:start]), bytearray(body[start:end]), bytearray(body[end:])):
        form.feed(bytes_of := bytes(chunk))
        wipe(bytes_of)
    form.finish()
    assert form.fields == {"purpose": "batch"}


def test_the_bytes_of_the_file_are_not_copied() -> None:
    boundary, body = encoded({}, b"content" * 100)
    form = FormReader(boundary)
    (piece,) = form.feed(body)
    assert piece.obj is body


def test_headers_that_say_nothing_about_the_form_are_ignored() -> None:
    body = (
        b"--xx\r\nX-More: y\r\nCONTENT-disposition: form-data; name=a\r\nContent-Type: a/b\r\n"
        b'\r\n1\r\n--xx\r\nContent-Disposition: form-data; name="file"\r\n\r\n2\r\n--xx--\r\n'
    )
    form, found = read(BOUNDARY, body, [])
    assert (form.fields, form.filename, found) == ({"a": "1"}, "", b"2")


def test_what_follows_the_form_is_ignored() -> None:
    boundary, body = encoded({"a": "b"}, b"content")
    assert read(boundary, body + b"\r\nmore" * 100, [])[1] == b"content"


@pytest.mark.parametrize("cut", range(1, 200, 7))
def test_an_incomplete_form_is_refused(cut: int) -> None:
    boundary, body = encoded({"a": "b"}, b"content")
    form = FormReader(boundary)
    form.feed(body[:-cut] if cut > 4 else body[:-5])
    with pytest.raises(ApiError) as refused:
        form.finish()
    assert refused.value.code == "invalid_form"


BOUNDARY = b"xx"
DISPOSITION = b'Content-Disposition: form-data; name="a"\r\n'
MALFORMED = {
    "no boundary": b"a" * 5000,
    "a boundary within a line": b"--xxy\r\n",
    "many headers": b"--xx\r\n" + b"a: b\r\n" * 1000 + b"\r\n",
    "a long header": b"--xx\r\na: " + b"b" * (MAX_HEADER_BYTES + 1) + b"\r\n\r\n",
    "a long name of a header": b"--xx\r\n" + b"a" * (MAX_HEADER_BYTES + 1) + b": b\r\n\r\n",
    "a header without a value": b"--xx\r\na\r\n\r\n1\r\n--xx--\r\n",
    "no headers": b"--xx\r\n\r\n1\r\n--xx--\r\n",
    "no disposition": b"--xx\r\na: b\r\n\r\n1\r\n--xx--\r\n",
    "no name": b"--xx\r\nContent-Disposition: form-data\r\n\r\n1\r\n--xx--\r\n",
    "another disposition": b'--xx\r\nContent-Disposition: inline; name="a"\r\n\r\n1\r\n--xx--\r\n',
    "a name with NUL": b"--xx\r\n"
    b'Content-Disposition: form-data; name="file\0"\r\n\r\n1\r\n--xx--\r\n',
    "a filename of two lines": b"--xx\r\n"
    b'Content-Disposition: form-data; name="file"; filename="a\nb"\r\n\r\n1\r\n--xx--\r\n',
    "a name that is not UTF-8": b"--xx\r\n"
    b'Content-Disposition: form-data; name="\xff"\r\n\r\n1\r\n--xx--\r\n',
    "a boundary within lines of the file": b"--xx\r\n"
    b'Content-Disposition: form-data; name="file"\r\n\r\n' + b"\r\n--xxy" * 100 + b"\r\n--xx--",
    "a long field": b"--xx\r\n" + DISPOSITION + b"\r\n" + b"1" * (MAX_FIELD_BYTES + 100),
    "a field twice": (b"--xx\r\n" + DISPOSITION + b"\r\n1\r\n") * 2 + b"--xx--\r\n",
    "a field that is not UTF-8": b"--xx\r\n" + DISPOSITION + b"\r\n\xff\r\n--xx--\r\n",
    "many fields": b"".join(
        b'--xx\r\nContent-Disposition: form-data; name="a%d"\r\n\r\n1\r\n' % number
        for number in range(MAX_FIELDS + 1)
    ),
    "two files": b'--xx\r\nContent-Disposition: form-data; name="file"\r\n\r\n1\r\n' * 2,
}


@pytest.mark.parametrize("case", MALFORMED)
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_malformed_form_is_refused(case: str, size: int) -> None:
    body = MALFORMED[case] + b"--xx\r\n"
    with pytest.raises(ApiError) as refused:
        read(BOUNDARY, body, [size] * (len(body) // size))
    assert refused.value.code in {"invalid_form", "invalid_parameter"}


@pytest.mark.parametrize(
    "content_type",
    ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=a", "multipart"],
)
def test_another_type_is_refused(content_type: str) -> None:
    with pytest.raises(ApiError) as refused:
        boundary_of(content_type)
    assert refused.value.code == "unsupported_media_type"


def test_a_boundary_has_a_limit() -> None:
    with pytest.raises(ApiError) as refused:
        boundary_of(f"multipart/form-data; boundary={'a' * 71}")
    assert refused.value.code == "invalid_form"
