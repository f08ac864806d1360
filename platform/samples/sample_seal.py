"""Encrypts the content of samples, bound to their tenant, adapter and id."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import SampleUnreadable
from ..keyring import secret_id
from ..sealing import Seal
from ..secrets import SAMPLE_KEY
from .models import Sample


class SampleSeal:
    """Encrypts under the server's present secret, and decrypts under all of them."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        """`secrets`: the server's, the present one first."""
        self._seal = Seal(secrets, SAMPLE_KEY)
        self.current_id = secret_id(secrets[0])
        """The id of the server's present secret."""

    def close(self, sample: Sample, content: bytes) -> None:
        """Put the content into the sample, whose ids are set."""
        sample.content = self._seal.close(content, _context(sample))
        sample.secret_id = self.current_id

    def open(self, sample: Sample) -> bytes:
        """The sample's content. Raises SampleUnreadable."""
        content = self._seal.open(sample.content, _context(sample))
        if content is None:
            raise SampleUnreadable
        return content


def _context(sample: Sample) -> bytes:
    return f"{sample.tenant_id}/{sample.adapter_id}/{sample.id}".encode()
