"""Reads `multipart/form-data` (RFC 7578) as it arrives: small fields, and one file.

A form is never held in memory: the file's bytes are handed on piece by piece. python-multipart
finds the parts; this module bounds them and gives them meaning.
"""

from __future__ import annotations

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from ..contract.errors import ApiError

MAX_FIELD_BYTES = 4096
MAX_FIELDS = 16
MAX_HEADERS = 8
"""Of a part."""
MAX_HEADER_BYTES = 4096
"""Of one header: a name and a value."""
MAX_BOUNDARY_LENGTH = 70
"""RFC 2046."""


def boundary_of(content_type: str) -> bytes:
    """The boundary of a form. Raises ApiError for another type."""
    media_type, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if media_type != b"multipart/form-data" or not boundary:
        raise ApiError("unsupported_media_type", "The content type must be multipart/form-data.")
    if len(boundary) > MAX_BOUNDARY_LENGTH or not boundary.isascii():
        raise _malformed("the boundary is too long or not ASCII")
    return boundary


class FormReader:
    """Takes a form's bytes with `feed`, and at the end `finish`.

    Both raise ApiError for a form that is malformed or too large, or has more than one file.
    """

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """Of the part `file`; None until it arrives."""
        self.num_file_bytes = 0
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_begin": self._begin_header,
                "on_header_field": self._add_to_header_name,
                "on_header_value": self._add_to_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_content,
                "on_part_data": self._add_content,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
            max_header_count=MAX_HEADERS,
            max_header_size=MAX_HEADER_BYTES,
        )
        self._delimiter = b"\r\n--" + boundary
        self._num_delimiters = 0
        self._tail = b""
        self._found: list[memoryview] = []
        # Copies, not slices of what is fed: the caller may overwrite that.
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._value = bytearray()
        self._disposition = b""
        self._field: str | None = None
        self._is_complete = False

    def feed(self, chunk: bytes) -> list[memoryview]:
        """Take the next bytes of the form; returns the file's bytes among them, without a copy."""
        self._count_delimiters(chunk)
        try:
            self._parser.write(chunk)
        except MultipartParseError:  # which counts positions from the beginning of the chunk
            raise _malformed("a boundary or a header is malformed or too long") from None
        found, self._found = self._found, []
        self.num_file_bytes += sum(map(len, found))
        return found

    def finish(self) -> None:
        """The form has ended."""
        if not self._is_complete:
            raise _malformed("the form is incomplete")
        if self.filename is None:
            raise ApiError("invalid_parameter", "file: is missing", param="file")

    def _count_delimiters(self, chunk: bytes) -> None:
        """The parser reads a delimiter 300 times as slowly as content, also one within a line."""
        most_of_one = len(self._delimiter) - 1
        seam = self._tail + chunk[:most_of_one]
        self._tail = (self._tail + chunk[-most_of_one:])[-most_of_one:]
        self._num_delimiters += chunk.count(self._delimiter) + seam.count(self._delimiter)
        if self._num_delimiters > MAX_FIELDS + 2:  # the file, and the end
            raise _malformed("the boundary occurs too often")

    def _begin_part(self) -> None:
        self._disposition = b""

    def _begin_header(self) -> None:
        self._header_name.clear()
        self._header_value.clear()

    def _add_to_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_to_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)

    def _begin_content(self) -> None:
        disposition, options = parse_options_header(self._disposition)
        name = options.get(b"name")
        if disposition != b"form-data" or name is None:
            raise _malformed("a part has no name")
        if any(character < 0x20 for character in self._disposition):
            raise _malformed("the name of a part has control characters")
        if name == b"file":
            self._begin_file(options.get(b"filename", b""))
        else:
            self._begin_field(_text("a part's name", name))

    def _begin_file(self, filename: bytes) -> None:
        if self.filename is not None:
            raise ApiError("invalid_parameter", "file: is there twice", param="file")
        self.filename, self._field = filename.decode(errors="replace"), None

    def _begin_field(self, name: str) -> None:
        if name in self.fields:
            raise ApiError("invalid_parameter", f"{name}: is there twice", param=name)
        if len(self.fields) == MAX_FIELDS:
            raise _malformed(f"it has more than {MAX_FIELDS} fields")
        self._field = name
        self._value.clear()

    def _add_content(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._found.append(memoryview(data)[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            message = f"{self._field}: exceeds {MAX_FIELD_BYTES} bytes"
            raise ApiError("invalid_parameter", message, param=self._field)

    def _end_part(self) -> None:
        if self._field is not None:
            self.fields[self._field] = _text(self._field, self._value)

    def _end(self) -> None:
        self._is_complete = True


def _text(field: str, value: bytes | bytearray) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ApiError("invalid_parameter", f"{field}: is not UTF-8", param=field) from None


def _malformed(what: str) -> ApiError:
    return ApiError("invalid_form", f"The body is no valid form: {what}.")
