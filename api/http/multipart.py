"""Reads `multipart/form-data` (RFC 7578) as it arrives: small fields, and one file.

A form is never held in memory: the file's bytes are handed on piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable
from email.message import Message
from email.parser import BytesHeaderParser

from ..contract.errors import ApiError

MAX_FIELD_BYTES = 4096
MAX_FIELDS = 16
MAX_HEADER_BYTES = 4096
MAX_BOUNDARY_LENGTH = 70
"""RFC 2046."""

_HEADERS_END = b"\r\n\r\n"


def boundary_of(content_type: str) -> bytes:
    """The boundary of a form. Raises ApiError for another type."""
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_boundary()
    if header.get_content_type() != "multipart/form-data" or not boundary:
        raise ApiError("unsupported_media_type", "The content type must be multipart/form-data.")
    if len(boundary) > MAX_BOUNDARY_LENGTH or not boundary.isascii():
        raise _malformed("the boundary is too long or not ASCII")
    return boundary.encode()


class FormReader:
    """Takes a form's bytes with `feed`, and at the end `finish`.

    Both raise ApiError for a form that is malformed or too large, or has more than one file.
    """

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """Of the part `file`; None until it arrives."""
        self.num_file_bytes = 0
        self._delimiter = b"\r\n--" + boundary
        # The first delimiter may lack the line end before it.
        self._buffer = bytearray(b"\r\n")
        self._read: Callable[[], list[bytes] | None] = self._read_preamble
        self._field: str | None = None
        self._value = b""
        self._is_complete = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes of the form; returns the file's bytes among them."""
        self._buffer += chunk
        found: list[bytes] = []
        while (pieces := self._read()) is not None:
            found += pieces
        self.num_file_bytes += sum(map(len, found))
        return found

    def finish(self) -> None:
        """The form has ended."""
        if not self._is_complete:
            raise _malformed("the form is incomplete")
        if self.filename is None:
            raise ApiError("invalid_parameter", "file: is missing", param="file")

    # Each returns None if it needs more bytes.

    def _read_preamble(self) -> list[bytes] | None:
        start = self._buffer.find(self._delimiter)
        if start < 0:
            if len(self._buffer) > MAX_HEADER_BYTES:
                raise _malformed("there is no boundary at its beginning")
            return None
        del self._buffer[: start + len(self._delimiter)]
        self._read = self._read_boundary_end
        return []

    def _read_boundary_end(self) -> list[bytes] | None:
        if len(self._buffer) < 2:
            return None
        if self._buffer.startswith(b"--"):
            self._is_complete = True
            self._read = self._skip
            return []
        if not self._buffer.startswith(b"\r\n"):
            raise _malformed("a boundary is not at the end of a line")
        self._read = self._read_headers  # which begin with this line end, if there are none
        return []

    def _read_headers(self) -> list[bytes] | None:
        end = self._buffer.find(_HEADERS_END)
        if end > MAX_HEADER_BYTES or (end < 0 and len(self._buffer) > MAX_HEADER_BYTES):
            raise _malformed("the headers of a part are too long")
        if end < 0:
            return None
        headers = BytesHeaderParser().parsebytes(bytes(self._buffer[2 : end + 2]))
        del self._buffer[: end + len(_HEADERS_END)]
        self._begin_part(headers)
        self._read = self._read_content
        return []

    def _begin_part(self, headers: Message) -> None:
        name = headers.get_param("name", header="content-disposition")
        if headers.get_content_disposition() != "form-data" or not isinstance(name, str):
            raise _malformed("a part has no name")
        if name == "file":
            if self.filename is not None:
                raise ApiError("invalid_parameter", "file: is there twice", param="file")
            self.filename, self._field = headers.get_filename() or "", None
            return
        if name in self.fields or len(self.fields) == MAX_FIELDS:
            raise ApiError("invalid_parameter", f"{name}: is there twice", param=name)
        self._field, self._value = name, b""

    def _read_content(self) -> list[bytes] | None:
        end = self._buffer.find(self._delimiter)
        is_last = end >= 0
        if not is_last:
            end = max(len(self._buffer) - len(self._delimiter) + 1, 0)
        if not end and not is_last:
            return None
        content = bytes(self._buffer[:end])
        del self._buffer[: end + len(self._delimiter) * is_last]
        if is_last:
            self._read = self._read_boundary_end
        if self._field is None:
            return [content] if content else []
        self._value += content
        if len(self._value) > MAX_FIELD_BYTES:
            message = f"{self._field}: exceeds {MAX_FIELD_BYTES} bytes"
            raise ApiError("invalid_parameter", message, param=self._field)
        if is_last:
            self.fields[self._field] = _text(self._field, self._value)
        return []

    def _skip(self) -> list[bytes] | None:
        self._buffer.clear()
        return None


def _text(field: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ApiError("invalid_parameter", f"{field}: is not UTF-8", param=field) from None


def _malformed(what: str) -> ApiError:
    return ApiError("invalid_form", f"The body is no valid form: {what}.")
