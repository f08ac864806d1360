"""The Python client of a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from ..schemas.adapters import VersionView
from ..schemas.me import MeView
from ..schemas.usage import UsageView
from .adapters import Adapters
from .aliases import Aliases
from .answers import as_view, as_views
from .api_client import ApiClient, api_path, connect
from .connection import find_connection
from .local_adapter import read_adapter
from .progress import Progress
from .references import check_alias, check_name
from .sources.source import open_source, temporary_folder
from .sources.tensors import write_adapter
from .uploads import push_adapter, wait_until_settled

UsageGroup = Literal["day", "adapter", "version"]


class Client:
    """Calls a server as one caller; use it as a context manager, or close it.

    What is not given is read from LORAPLEX_URL, LORAPLEX_API_KEY and LORAPLEX_TENANT, or from a
    profile of `loraplex login`. Every method raises ClientError. Threads may share a client.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        tenant: str | None = None,
        profile: str | None = None,
    ) -> None:
        """`tenant` is for operators: the one on which they act. Nothing is sent yet."""
        connection = find_connection(url=url, key=api_key, tenant=tenant, profile=profile)
        self._http = connect(connection)
        self._api = ApiClient(self._http, connection.url, tenant=connection.tenant)
        self.url = connection.url
        self.adapters = Adapters(self._api)
        self.aliases = Aliases(self._api)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to the server."""
        self._http.close()

    def push(
        self,
        name: str,
        source: str | Path,
        *,
        aliases: Sequence[str] = (),
        base_id: str | None = None,
        is_waiting: bool = True,
    ) -> VersionView:
        """Upload an adapter and wait until the version is ready.

        `source` is a folder that PEFT's save_pretrained or a Trainer wrote, a `.tar`, `.tar.gz` or
        `.zip` of one, `hf://OWNER/NAME[@REVISION][/FOLDER]` or `s3://BUCKET/PREFIX`. It is read on
        this machine. The aliases point to the version once it is ready. With `base_id` the push
        fails unless the server runs this base. After an interruption, another push of the same
        files resumes. Raises InvalidAdapter if the files are no adapter, and with the code of the
        reason if the version is rejected.
        """
        check_name(name)
        for alias in aliases:
            check_alias(alias)
        with open_source(source, Progress()) as folder:
            adapter = read_adapter(folder)
            version = push_adapter(
                self._api,
                adapter,
                name,
                aliases=list(aliases),
                base_id=base_id,
                progress=Progress(),
            )
        if is_waiting:
            version = wait_until_settled(self._api, version)
        return as_view(version, VersionView)

    def push_tensors(
        self,
        name: str,
        tensors: Mapping[str, Any],
        peft_config: Any,
        *,
        aliases: Sequence[str] = (),
        base_id: str | None = None,
        is_waiting: bool = True,
    ) -> VersionView:
        """Push the tensors of a training process, as `push` does files.

        `tensors` is what `peft.get_peft_model_state_dict` returns: torch tensors on any device, or
        numpy arrays. `peft_config` is the model's PeftConfig, or its fields.
        """
        with temporary_folder() as directory:
            write_adapter(directory, tensors, peft_config)
            return self.push(
                name, directory, aliases=aliases, base_id=base_id, is_waiting=is_waiting
            )

    def wait(self, version: VersionView) -> VersionView:
        """The version once it is ready. Raises InvalidAdapter if it is rejected."""
        path = api_path("adapters", version.adapter, "versions", version.version)
        return as_view(wait_until_settled(self._api, self._api.get(path)), VersionView)

    def me(self) -> MeView:
        """The caller and its permissions."""
        return as_view(self._api.get("/me"), MeView)

    def usage(
        self,
        *,
        since: date | None = None,
        until: date | None = None,
        by: Sequence[UsageGroup] = ("day", "adapter", "version"),
        adapter: str | None = None,
    ) -> list[UsageView]:
        """The tenant's usage, from the day `since` up to the day before `until`, in UTC."""
        rows = self._api.pages(
            "/usage",
            since=None if since is None else since.isoformat(),
            until=None if until is None else until.isoformat(),
            group_by=list(by),
            adapter=adapter,
        )
        return as_views(rows, UsageView)
