"""The operator's settings: flags, `LORAPLEX_…` environment variables, or defaults.

Only this module reads the environment; other modules get their settings passed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PrivateAttr, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from ..adapters.fetcher_environment import fetcher_environment, take_credentials
from ..platform.errors import InvalidValue
from ..platform.networks import Network
from ..platform.secrets import (
    load_or_create_secret,
    load_secrets,
    parse_secret,
    parse_secrets,
)
from .tools.tool_format import ToolFormatName


def default_data_dir() -> Path:
    """`loraplex` in the user's data folder (XDG base directories)."""
    data_home = Path(os.environ.get("XDG_DATA_HOME", ""))
    if not data_home.is_absolute():  # unset, or to be ignored by the XDG specification
        data_home = Path.home() / ".local" / "share"
    return data_home / "loraplex"


class Settings(BaseSettings):
    """Settings of every command that touches the platform. The embedded parts are the defaults."""

    model_config = SettingsConfigDict(
        env_prefix="LORAPLEX_", frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    data_dir: Path = Field(default_factory=default_data_dir)
    """Folder of the embedded database, the local store and the secret."""
    database: str | None = Field(default=None, repr=False)
    """SQLAlchemy URL, possibly with a password; None is SQLite in `data_dir`."""
    store: str | None = None
    """URL of the adapter store; None is a folder in `data_dir`."""
    secret: SecretStr | None = None
    """64 hexadecimal digits; None is the file `secret` in `data_dir`, created on first use."""
    secret_previous: SecretStr | None = None
    """Earlier secrets, which still verify; None is the file `secret.previous`, if it exists."""
    served_model_name: str | None = Field(default=None, min_length=1, max_length=256)
    """Name of the base model in requests; None is its folder's name or its hub id."""
    allowed_hosts: str | None = None
    """Accepted `Host` names, separated by commas (`*.example.com`); None accepts any."""
    metrics_token: SecretStr | None = None
    """Bearer token for `/metrics`; None restricts it to this machine."""
    trusted_proxies: Annotated[tuple[Network, ...], NoDecode] = ()
    """Networks of the proxies whose `X-Forwarded-For` is trusted."""
    tool_format: ToolFormatName | None = None
    """Tool call format of the base; None is that of its chat template."""
    otel: bool | None = None
    """Whether to write OpenTelemetry spans; None: if `OTEL_…` variables are set."""
    adapter_wait_seconds: float = Field(default=30.0, gt=0)
    """Seconds that a request waits for its adapter; then it fails with `adapter_loading`."""
    max_full_matrix_bytes: int = Field(default=0, ge=0)
    """Maximum bytes of an adapter's full matrices (`modules_to_save`) as served; 0 refuses them."""
    require_confinement: bool = False
    """Whether to start only if namespaces, Landlock and limits confine examinations."""
    max_pins: int = Field(default=16, ge=0)
    """Maximum pinned versions of one tenant."""
    disk_cache_bytes: int = Field(default=10 << 30, ge=0)
    """Disk for cached copies of stored adapters."""
    disk_reserve_bytes: int | None = Field(default=None, ge=0)
    """Disk reserved for the database; None is a twentieth of the data folder's disk, between 8 MiB
    and 1 GiB."""
    staging_bytes: int | None = Field(default=None, ge=0)
    """Disk for all tenants' unfinished uploads; None: a quarter of the data folder's disk."""
    staging_tenant_bytes: int | None = Field(default=None, ge=0)
    """The part of it for one tenant; a tenant never holds more than it leaves to others. None is
    half."""
    reference_base: str | None = None
    """Folder or hub id of the unquantized base; every new version is compared with it."""
    max_reference_kl: float | None = Field(default=None, gt=0)
    """Versions with a larger KL divergence from it are rejected; None rejects none."""
    stale_seconds: float = Field(default=300.0, ge=0)
    """How long cached keys and names stay valid while the database is unavailable."""
    reader_patience_seconds: float = Field(default=30.0, gt=0)
    """A streaming client that reads nothing for so long is disconnected."""
    request_log_days: int = Field(default=30, ge=1, le=3660)
    """Retention of the request log."""
    upload_days: int = Field(default=30, ge=1, le=3660)
    """Retention of closed uploads. The provenance of versions is kept."""
    drain_seconds: float = Field(default=25.0, ge=0)
    """How long a server that was told to stop lets requests finish."""

    _flags: frozenset[str] = PrivateAttr(default=frozenset())

    @property
    def flags(self) -> frozenset[str]:
        """The settings that a command's own options gave."""
        return self._flags

    @field_validator("data_dir")
    @classmethod
    def _as_absolute(cls, value: Path) -> Path:
        """Child processes run in other folders."""
        return value.expanduser().absolute()

    @field_validator("trusted_proxies", mode="before")
    @classmethod
    def _split_networks(cls, value: object) -> object:
        """Several are separated by commas."""
        if not isinstance(value, str):
            return value
        return [part.strip() for part in value.split(",") if part.strip()]

    @property
    def database_url(self) -> str:
        """The URL of the database of record."""
        return self.database or f"sqlite:///{self.data_dir / 'loraplex.db'}"

    @property
    def is_database_embedded(self) -> bool:
        """This installation's own SQLite, which is migrated without being asked."""
        return self.database is None

    @property
    def telemetry_environment(self) -> Mapping[str, str]:
        """OpenTelemetry's standard variables, by which its exporter is set up too."""
        return {name: value for name, value in os.environ.items() if name.startswith("OTEL_")}

    @property
    def store_url(self) -> str:
        """The URL of the adapter store."""
        return self.store or (self.data_dir / "store").as_uri()

    def take_fetcher_environment(self) -> dict[str, str]:
        """The fetcher's environment; removes the store's credentials from this process."""
        return fetcher_environment(os.environ, take_credentials())

    def prepare_data_dir(self) -> Path:
        """The data folder, made for its owner alone if it is not there."""
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self.data_dir

    def load_secrets(self) -> list[bytes]:
        """The server's secrets, from which every key is derived: the present one first.

        Raises InsecureSecretFile.
        """
        return [self._load_present_secret(), *self._load_previous_secrets()]

    def _load_present_secret(self) -> bytes:
        if self.secret is not None:
            return parse_secret(self.secret.get_secret_value(), source="LORAPLEX_SECRET")
        return load_or_create_secret(self.data_dir / "secret")

    def _load_previous_secrets(self) -> list[bytes]:
        if self.secret_previous is not None:
            text = self.secret_previous.get_secret_value()
            return parse_secrets(text, source="LORAPLEX_SECRET_PREVIOUS")
        return load_secrets(self.data_dir / "secret.previous")


def load_settings(**flags: Any) -> Settings:
    """A flag takes precedence over the environment, the environment over the default.

    Raises InvalidValue for the first invalid setting, without its value.
    """
    try:
        given = {name: value for name, value in flags.items() if value is not None}
        settings = Settings(**given)
        settings._flags = frozenset(given)
        return settings
    except ValidationError as exc:
        error = exc.errors(include_url=False, include_input=False)[0]
        name = str(error["loc"][0])
        is_flag = flags.get(name) is not None
        shown = f"--{name.replace('_', '-')}" if is_flag else f"LORAPLEX_{name.upper()}"
        raise InvalidValue(f"{shown}: {error['msg']}.", param=name) from None
