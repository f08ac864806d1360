"""Profiles: named server URLs and keys in the user's configuration folder.

`$XDG_CONFIG_HOME/loraplex/config.toml`, readable only by its owner:

    [profiles.default]
    url = "http://127.0.0.1:8000"
    key = "lpx_live_…"
    tenant = "acme"
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...platform.names import is_adapter_name
from .errors import InvalidArgument

DEFAULT_PROFILE = "default"


@dataclass(frozen=True, slots=True)
class Profile:
    """A server, a key for it, and the tenant that an operator acts on."""

    url: str
    key: str = field(repr=False)
    tenant: str | None = None


def config_path() -> Path:
    """The file of the profiles."""
    config_home = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not config_home.is_absolute():  # unset, or to be ignored by the XDG specification
        config_home = Path.home() / ".config"
    return config_home / "loraplex" / "config.toml"


def load_profiles() -> dict[str, Profile]:
    """The profiles by name; none without the file. Raises InvalidArgument if others may read the
    file, or if another user owns it."""
    path = config_path()
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return {}
    if mode & 0o077:
        raise InvalidArgument(f"{path} is readable by other users: run `chmod 600` on it.")
    try:
        found = tomllib.loads(path.read_text()).get("profiles", {})
        return {name: Profile(**fields) for name, fields in found.items()}
    except (tomllib.TOMLDecodeError, TypeError, AttributeError) as exc:
        raise InvalidArgument(
            f"{path} is not a valid configuration: fix it, or remove it and log in again."
        ) from exc


def save_profile(name: str, profile: Profile) -> None:
    """Add the profile, or put it in the place of the one of this name. Raises InvalidArgument."""
    _write({**load_profiles(), check_profile_name(name): profile})


def remove_profile(name: str) -> bool:
    """Remove the profile and its key. False if it does not exist."""
    profiles = load_profiles()
    if profiles.pop(name, None) is None:
        return False
    _write(profiles)
    return True


def check_profile_name(name: str) -> str:
    """The name. Raises InvalidArgument."""
    if not is_adapter_name(name):
        raise InvalidArgument("A profile's name is 1 to 64 of a-z, 0-9, '.', '_' and '-'.")
    return name


def _write(profiles: Mapping[str, Profile]) -> None:
    path = config_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write("\n".join(map(_section, profiles, profiles.values())))
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _section(name: str, profile: Profile) -> str:
    fields: dict[str, Any] = {"url": profile.url, "key": profile.key, "tenant": profile.tenant}
    # A JSON string is a TOML string, as long as nothing in it needs a surrogate.
    lines = [
        f"{field} = {json.dumps(value, ensure_ascii=False)}\n"
        for field, value in fields.items()
        if value is not None
    ]
    return f"[profiles.{json.dumps(name)}]\n{''.join(lines)}"
