"""The aliases of a tenant's adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..schemas.aliases import AliasChangeView, AliasView
from ..schemas.shadows import ShadowView
from .answers import as_view, as_views
from .api_client import ApiClient, api_path
from .references import LIVE, check_alias, check_name


class Aliases:
    """`client.aliases`. Every method raises ClientError."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    def list(self, name: str) -> Sequence[AliasView]:
        """The adapter's aliases."""
        listed = self._api.get(api_path("adapters", check_name(name), "aliases"))
        return as_views(listed["data"], AliasView)

    def set(self, name: str, alias: str, version: int) -> AliasView:
        """Point the alias at a ready version; ends a canary."""
        return self._put(name, alias, {"version": version})

    def canary(
        self,
        name: str,
        alias: str,
        version: int,
        percent: float,
        *,
        limits: Mapping[str, float | None] | None = None,
    ) -> AliasView:
        """Send `percent` of the alias's requests to another version; `set` ends it.

        With `limits`, such as `{"error_rate": 0.01}`, it also ends by itself when it exceeds one;
        those that are left out have defaults, and None is no limit.
        """
        current = self._api.get(_path(name, alias))["version"]
        split = {"version": version, "percent": percent, "limits": limits}
        return self._put(name, alias, {"version": current, "canary": split})

    def rollback(self, name: str, alias: str = LIVE) -> AliasView:
        """Undo the last change of the alias."""
        return as_view(self._api.post(f"{_path(name, alias)}/rollback"), AliasView)

    def history(self, name: str, alias: str) -> Sequence[AliasChangeView]:
        """The changes of the alias, newest first."""
        return as_views(self._api.get(f"{_path(name, alias)}/history")["data"], AliasChangeView)

    def shadow(self, name: str, alias: str) -> ShadowView:
        """The alias's shadow, and how its answers compare with those of the alias's own version."""
        return as_view(self._api.get(f"{_path(name, alias)}/shadow"), ShadowView)

    def set_shadow(self, name: str, alias: str, version: int, percent: float) -> ShadowView:
        """Have a version answer copies of `percent` of the alias's requests, which nobody sees."""
        body = {"version": version, "percent": percent}
        return as_view(self._api.put(f"{_path(name, alias)}/shadow", body), ShadowView)

    def delete_shadow(self, name: str, alias: str) -> None:
        """End the shadow; its comparison is lost."""
        self._api.delete(f"{_path(name, alias)}/shadow")

    def delete(self, name: str, alias: str) -> None:
        """Remove the alias; its version is kept."""
        self._api.delete(_path(name, alias))

    def _put(self, name: str, alias: str, body: dict[str, Any]) -> AliasView:
        return as_view(self._api.put(_path(name, alias), body), AliasView)


def _path(name: str, alias: str) -> str:
    return api_path("adapters", check_name(name), "aliases", check_alias(alias))
