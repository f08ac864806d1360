"""What `loraplex batch run` has asked of the server, in a file beside the output."""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path
from typing import Self

import msgspec

from ...adapters.durable import write_whole
from .client import ApiClient
from .exit_codes import CommandFailed, ExitCode


class _Asked(msgspec.Struct):
    """The contents of the file."""

    input_sha256: str
    key: str
    """The `Idempotency-Key` of the batch's creation: repeated, it creates no second batch."""
    file_id: str | None = None
    batch_id: str | None = None


class _Url(msgspec.Struct):
    url: str


class BatchJob:
    """One run of a file; each step is written down before the next, so it can be continued."""

    def __init__(self, file: Path, state: Path, asked: _Asked) -> None:
        self._file = file
        self._state = state
        self._asked = asked

    @classmethod
    def open(cls, file: Path, output: Path) -> Self:
        """The job that was begun for this output, or a new one. Raises CommandFailed if it was
        begun for another input."""
        state = output.with_name(f"{output.name}.batch")
        with file.open("rb") as content:
            sha256 = hashlib.file_digest(content, "sha256").hexdigest()
        if not state.exists():
            return cls(file, state, _Asked(sha256, uuid.uuid4().hex))
        try:
            asked = msgspec.json.decode(state.read_bytes(), type=_Asked)
        except msgspec.DecodeError as exc:
            raise CommandFailed(f"{state} is damaged: delete it to start again.") from exc
        if asked.input_sha256 != sha256:
            raise CommandFailed(
                f"{state} belongs to a batch of another file. Use another --output, or delete it.",
                ExitCode.CONFLICT,
            )
        return cls(file, state, asked)

    @property
    def is_begun(self) -> bool:
        return self._state.exists()

    def batch_id(self, client: ApiClient) -> str:
        """The batch on the server, created if it is not there. Raises CommandFailed."""
        asked = self._asked
        if asked.batch_id is None:
            self._save()
            if asked.file_id is None:
                asked.file_id = client.post_file("/files", self._file, purpose="batch")["id"]
                self._save()
            body = {
                "input_file_id": asked.file_id,
                "endpoint": self._endpoint(),
                "completion_window": "24h",
            }
            asked.batch_id = client.post("/batches", body, idempotency_key=asked.key)["id"]
            self._save()
        assert asked.batch_id is not None, "created"
        return asked.batch_id

    def forget(self) -> None:
        """The results are here."""
        self._state.unlink(missing_ok=True)

    def _endpoint(self) -> str:
        """The route of the first line."""
        with self._file.open("rb") as lines:
            first = next((line for line in lines if line.strip()), b"")
        try:
            return msgspec.json.decode(first, type=_Url).url
        except (msgspec.DecodeError, UnicodeError) as exc:
            raise CommandFailed(
                f"{self._file}: the first line is no request: {exc}", ExitCode.USAGE
            ) from exc

    def _save(self) -> None:
        write_whole(self._state, msgspec.json.encode(self._asked))
