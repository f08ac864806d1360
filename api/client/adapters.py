"""The adapters of a tenant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..schemas.adapters import AdapterSummaryView, AdapterView, DeletionsView, VersionView
from .answers import as_view, as_views
from .api_client import ApiClient, api_path
from .downloads import download_adapter
from .progress import Progress
from .references import check_name, parse_reference, version_path

DEFAULT_DRAIN_SECONDS = 30.0


class Adapters:
    """`client.adapters`. Every method raises ClientError."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    def list(self) -> Sequence[AdapterSummaryView]:
        """All adapters, by name."""
        return as_views(self._api.pages("/adapters"), AdapterSummaryView)

    def show(self, name: str) -> AdapterView:
        """One adapter with all its versions."""
        return as_view(self._api.get(api_path("adapters", check_name(name))), AdapterView)

    def version(self, reference: str) -> VersionView:
        """The version that `NAME[@VERSION]` means: a number, an alias, or without it what requests
        get."""
        return as_view(
            self._api.get(version_path(self._api, parse_reference(reference))), VersionView
        )

    def delete(
        self,
        name: str,
        version: int | None = None,
        *,
        drain_seconds: float = DEFAULT_DRAIN_SECONDS,
    ) -> DeletionsView:
        """Delete one version, or without it the adapter, and return when nothing is left of it.

        Running requests may finish within `drain_seconds`. What an alias points to is refused.
        """
        part = () if version is None else ("versions", version)
        path = api_path("adapters", check_name(name), *part)
        return as_view(self._api.delete(path, drain_seconds=drain_seconds), DeletionsView)

    def download(
        self, reference: str, directory: str | Path, *, is_overwriting: bool = False
    ) -> Sequence[Path]:
        """Write the files of the version that `NAME[@VERSION]` means to the directory; their paths.

        Raises FileExists if one is there, unless `is_overwriting`.
        """
        path = version_path(self._api, parse_reference(reference), "files")
        return download_adapter(
            self._api, path, Path(directory), force=is_overwriting, progress=Progress()
        )
