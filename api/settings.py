"""The operator's settings: flags, `LORAPLEX_…` environment variables, a file, or defaults.

Only this module reads the environment; other modules get their settings passed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import Field, PrivateAttr, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from ..adapters.child import child_environment
from ..adapters.fetcher_environment import fetcher_environment, take_credentials
from ..adapters.logs import LOG_VARIABLES
from ..engine.option import Option, Unset, options_of
from ..engine.tuning.cpu_list import parse_cpus
from ..engine.tuning.devices import is_device_name
from ..platform.accounts.models import MAX_ISSUER_LENGTH
from ..platform.errors import InvalidValue, WebhookUrlInvalid
from ..platform.networks import Network
from ..platform.prices.cost_rates import CostRates, parse_rate
from ..platform.secrets import (
    load_or_create_secret,
    load_secrets,
    load_text,
    parse_secret,
    parse_secrets,
)
from ..platform.webhooks.target import TargetPolicy, parse_allowed_host
from .log_options import LogFormat, LogLevel
from .oidc.endpoint_url import is_endpoint_url
from .oidc.provider_config import ProviderConfig
from .oidc.role_rules import parse_rules
from .tools.reasoning_format import ReasoningParser
from .tools.tool_format import ToolFormatName

MIB = 1 << 20

Source = Literal["default", "environment", "file", "flag"]


class Origin(NamedTuple):
    """Where the value of an option comes from."""

    source: Source
    name: str
    """As the user wrote it: the flag, the variable, or the file, line and key."""


def default_data_dir() -> Path:
    """`loraplex` in the user's data folder (XDG base directories)."""
    data_home = Path(os.environ.get("XDG_DATA_HOME", ""))
    if not data_home.is_absolute():  # unset, or to be ignored by the XDG specification
        data_home = Path.home() / ".local" / "share"
    return data_home / "loraplex"


class Settings(BaseSettings):
    """Settings of the server and of the commands that use its database or store.

    A field with an `Option` is also an option of `loraplex serve`; the text below a field is its
    description in the help and in `docs/settings.md`.
    """

    model_config = SettingsConfigDict(
        env_prefix="LORAPLEX_", frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    data_dir: Annotated[Path, Option(), Unset("`loraplex` in the user's data folder")] = Field(
        default_factory=default_data_dir
    )
    """Folder of the embedded database, the local store and the secret."""
    database: Annotated[str | None, Option(), Unset("SQLite in the data folder")] = Field(
        default=None, repr=False
    )
    """SQLAlchemy URL of the database."""
    store: Annotated[str | None, Option(), Unset("a folder in the data folder")] = None
    """Adapter store: a folder or `s3://bucket/prefix`."""
    served_model_name: Annotated[
        str | None, Option(), Unset("the base's folder name or model ID")
    ] = Field(default=None, min_length=1, max_length=256)
    """Name of the base model in API requests."""
    tool_format: Annotated[
        ToolFormatName | None,
        Option(metavar="FORMAT", aliases=("tool-call-parser",)),
        Unset("that of its chat template"),
    ] = None
    """Tool call format of the base model, such as `hermes`."""
    reasoning_parser: Annotated[
        ReasoningParser | None, Option(metavar="FORMAT"), Unset("that of its chat template")
    ] = None
    """How the base model writes its reasoning, such as `qwen3`; `none` leaves it in the answer."""
    max_full_matrix_mib: Annotated[float, Option(), Unset("refused")] = Field(
        default=0.0, ge=0, allow_inf_nan=False
    )
    """Maximum size of an adapter's full matrices (`modules_to_save`) as served; 0 refuses them."""
    require_confinement: Annotated[bool, Option(), Unset("a warning in the log")] = False
    """Start only if namespaces, Landlock and limits confine examinations."""
    reference_base: Annotated[str | None, Option(metavar="DIR"), Unset("not measured")] = None
    """Folder or model ID of the unquantized base. New versions are compared with it."""
    max_reference_kl: Annotated[float | None, Option(), Unset("none is rejected")] = Field(
        default=None, gt=0
    )
    """Versions whose KL divergence from `reference_base` is larger are rejected, in nats."""
    fleet_certificates: Annotated[
        Path | None, Option(metavar="DIR"), Unset("an engine of its own")
    ] = None
    """Folder of this API server's certificates. It serves with the replicas of the fleet."""
    replica_addresses: Annotated[
        tuple[str, ...],
        NoDecode,
        Option(metavar="HOST:PORT", aliases=("replica",)),
        Unset("none"),
    ] = ()
    """Agents that are added to the fleet's replicas at the start."""
    secret: Annotated[SecretStr | None, Unset("file `secret`, created on first use")] = None
    """64 hexadecimal digits, from which every key is derived."""
    secret_previous: Annotated[SecretStr | None, Unset("file `secret.previous`, if any")] = None
    """Earlier secrets, separated by spaces. What they signed stays valid."""
    allowed_hosts: Annotated[str | None, Option(metavar="HOST,..."), Unset("any")] = None
    """Accepted `Host` names, separated by commas, such as `*.example.com`."""
    metrics_token: Annotated[SecretStr | None, Unset("`/metrics` only from this machine")] = None
    """Bearer token for `/metrics`."""
    metrics_networks: Annotated[
        tuple[Network, ...], NoDecode, Option(metavar="NETWORK"), Unset("none")
    ] = ()
    """Networks from which `/metrics` can be read without the token."""
    vllm_metrics: Annotated[bool, Option()] = False
    """Also write the metrics that routers for vLLM read, under vLLM's names."""
    trusted_proxies: Annotated[
        tuple[Network, ...], NoDecode, Option(metavar="NETWORK"), Unset("none")
    ] = ()
    """Networks of the proxies whose `X-Forwarded-For` is trusted."""
    ssl_certfile: Annotated[Path | None, Option(metavar="FILE"), Unset("HTTP")] = None
    """Certificate chain in PEM, with which the server speaks HTTPS."""
    ssl_keyfile: Annotated[Path | None, Option(metavar="FILE"), Unset("in `ssl_certfile`")] = None
    """Private key of the certificate in PEM."""
    webhook_hosts: Annotated[
        tuple[str, ...], NoDecode, Option(metavar="HOST[:PORT]"), Unset("no webhooks are sent")
    ] = ()
    """Hosts to which webhooks may be sent: `hooks.example.com`, `*.example.com`, or with a port."""
    webhook_networks: Annotated[
        tuple[Network, ...], NoDecode, Option(metavar="NETWORK"), Unset("public addresses only")
    ] = ()
    """Networks that `webhook_hosts` may also be in, although their addresses are not public."""
    oidc_issuer: Annotated[str | None, Option(metavar="URL"), Unset("passwords only")] = Field(
        default=None, max_length=MAX_ISSUER_LENGTH
    )
    """Identity provider (OpenID Connect) through which people sign in to the console."""
    oidc_client_id: Annotated[str | None, Option(metavar="ID"), Unset("required")] = Field(
        default=None, min_length=1
    )
    """This installation's client at the identity provider."""
    oidc_client_secret: Annotated[
        SecretStr | None, Unset("file `oidc.secret`, if any; else a public client")
    ] = None
    """The client's secret."""
    oidc_scopes: Annotated[
        tuple[str, ...], NoDecode, Option(metavar="SCOPE"), Unset("openid, email, profile")
    ] = ("openid", "email", "profile")
    """Scopes that are requested from the identity provider."""
    oidc_name: Annotated[str | None, Option(metavar="NAME"), Unset("the issuer's host")] = Field(
        default=None, min_length=1, max_length=64
    )
    """The identity provider's name on the console's button."""
    oidc_groups_claim: Annotated[str, Option(metavar="CLAIM")] = Field(
        default="groups", min_length=1
    )
    """The claim of ID tokens that holds the groups of `oidc_roles`."""
    oidc_roles: Annotated[str | None, Option(metavar="JSON"), Unset("nobody has access")] = None
    """Roles of groups, such as `{"ml": "acme:developer", "sre": "@operators:admin"}`. The first
    group of the object that a person is in decides."""
    otel: Annotated[
        bool | None, Option(has_negation=True), Unset("if `OTEL_…` variables are set")
    ] = None
    """Write OpenTelemetry spans."""
    adapter_wait_seconds: Annotated[float, Option()] = Field(default=30.0, gt=0)
    """Maximum time that a request waits for its adapter; then it fails with `adapter_loading`."""
    max_pins: Annotated[int, Option()] = Field(default=16, ge=0)
    """Maximum pinned versions of one tenant."""
    disk_cache_bytes: Annotated[int, Option(), Unset("10 GiB")] = Field(default=10 << 30, ge=0)
    """Disk space for cached copies of stored adapters."""
    disk_reserve_bytes: Annotated[
        int | None, Option(), Unset("1/20 of the data folder's disk, between 8 MiB and 1 GiB")
    ] = Field(default=None, ge=0)
    """Disk space reserved for the database."""
    staging_bytes: Annotated[int | None, Option(), Unset("1/4 of the data folder's disk")] = Field(
        default=None, ge=0
    )
    """Disk space for the unfinished uploads of all tenants."""
    staging_tenant_bytes: Annotated[int | None, Option(), Unset("half of `staging_bytes`")] = Field(
        default=None, ge=0
    )
    """Part of `staging_bytes` for one tenant. A tenant's uploads never exceed the free part."""
    stale_seconds: Annotated[float, Option()] = Field(default=300.0, ge=0)
    """How long cached keys and names stay valid while the database is unavailable."""
    reader_patience_seconds: Annotated[float, Option()] = Field(default=30.0, gt=0)
    """A streaming client that reads nothing for this time is disconnected."""
    request_log_days: Annotated[int, Option()] = Field(default=30, ge=1, le=3660)
    """Retention of the request log."""
    upload_days: Annotated[int, Option()] = Field(default=30, ge=1, le=3660)
    """Retention of closed uploads. The provenance of versions is kept."""
    file_days: Annotated[int, Option()] = Field(default=30, ge=1, le=3660)
    """Retention of files that name no other, of the results of batches, and of ended batches,
    fine-tuning jobs and evaluations."""
    response_days: Annotated[int, Option()] = Field(default=30, ge=1, le=3660)
    """Retention of stored responses, from the last one that continues them."""
    sample_days: Annotated[int, Option()] = Field(default=30, ge=0, le=3660)
    """How long tenants may keep samples of requests at most. 0: none are kept."""
    cost_per_step_hour: Annotated[str, Option(metavar="AMOUNT")] = "0"
    """What an hour of a replica's steps costs the operator, in the prices' currency: `2.50`."""
    cost_per_kv_gib_hour: Annotated[str, Option(metavar="AMOUNT")] = "0"
    """What holding a GiB of KV blocks for an hour costs the operator."""
    cost_per_loaded_gib: Annotated[str, Option(metavar="AMOUNT")] = "0"
    """What copying a GiB of adapters to the device costs the operator."""
    tuning: Annotated[bool, Option(), Unset("no jobs")] = False
    """Train adapters: fine-tuning jobs run on this server while the engine has little to do."""
    max_tuning_jobs: Annotated[int, Option()] = Field(default=1, ge=1, le=16)
    """Fine-tuning jobs that this server runs at a time, each of another tenant."""
    tuning_device: Annotated[str, Option()] = "auto"
    """Device of trainers: auto (the engine's; cpu with a fleet), cpu, cuda or cuda:N."""
    tuning_cpus: Annotated[
        str | None, Option(metavar="LIST"), Unset("all, while the engine is idle")
    ] = None
    """CPUs of trainers, such as 6-7. The engine uses the others, and training does not pause."""
    tuning_ray: Annotated[
        str | None, Option(metavar="HOST:PORT"), Unset("trainers run on this machine")
    ] = None
    """Ray cluster whose nodes run the trainers, or `auto` for that of this machine."""
    tuning_ray_cpus: Annotated[int, Option()] = Field(default=1, ge=1)
    """CPUs that Ray reserves for each trainer. With --tuning-device cuda it also reserves a GPU."""
    tuning_bytes: Annotated[int | None, Option(), Unset("what is free when a job begins")] = Field(
        default=None, ge=1
    )
    """Memory of all trainers together on their device. An engine on it leaves it free."""
    drain_seconds: Annotated[float, Option()] = Field(default=25.0, ge=0)
    """Maximum time that running requests may take to finish after SIGTERM."""
    log_level: Annotated[LogLevel, Option()] = LogLevel.INFO
    """Least severe messages of the log on standard error."""
    log_format: Annotated[LogFormat, Option(), Unset("text in a terminal, else json")] = (
        LogFormat.AUTO
    )
    """Format of the log: lines for people, or one JSON object per line."""

    _origins: Mapping[str, Origin] = PrivateAttr(default_factory=dict)

    @property
    def origins(self) -> Mapping[str, Origin]:
        """Where each option of the command came from, the engine's included, by field. Without a
        command line it is empty."""
        return self._origins

    @property
    def max_full_matrix_bytes(self) -> int:
        """Maximum size of an adapter's full matrices as served."""
        return round(self.max_full_matrix_mib * MIB)

    @field_validator("data_dir")
    @classmethod
    def _as_absolute(cls, value: Path) -> Path:
        """Child processes run in other folders."""
        return value.expanduser().absolute()

    @field_validator("tuning_device")
    @classmethod
    def _check_device(cls, value: str) -> str:
        if not is_device_name(value):
            raise ValueError("not auto, cpu, cuda or cuda:N")
        return value

    @field_validator("tuning_cpus")
    @classmethod
    def _check_cpus(cls, value: str | None) -> str | None:
        if value is not None:
            parse_cpus(value)
        return value

    @field_validator("cost_per_step_hour", "cost_per_kv_gib_hour", "cost_per_loaded_gib")
    @classmethod
    def _check_rate(cls, value: str) -> str:
        try:
            parse_rate(value)
        except InvalidValue as exc:
            raise ValueError(str(exc).rstrip(".")) from exc
        return value

    @field_validator("oidc_issuer")
    @classmethod
    def _check_issuer(cls, value: str | None) -> str | None:
        if value is not None and not is_endpoint_url(value):
            raise ValueError("not an HTTPS URL, or an HTTP URL of this machine")
        return value

    @field_validator("oidc_roles")
    @classmethod
    def _check_roles(cls, value: str | None) -> str | None:
        try:
            parse_rules(value or "{}")
        except InvalidValue as exc:
            raise ValueError(str(exc).rstrip(".")) from exc
        return value

    @field_validator(
        *("trusted_proxies", "metrics_networks", "replica_addresses", "oidc_scopes"),
        *("webhook_hosts", "webhook_networks"),
        mode="before",
    )
    @classmethod
    def _split_list(cls, value: object) -> object:
        """Several are separated by commas."""
        if not isinstance(value, str):
            return value
        return [part.strip() for part in value.split(",") if part.strip()]

    @field_validator("webhook_hosts")
    @classmethod
    def _check_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for host in value:
            try:
                parse_allowed_host(host)
            except WebhookUrlInvalid as exc:
                raise ValueError(f"{host!r}: {exc}") from None
        return value

    @property
    def cost_rates(self) -> CostRates:
        """What the engine's resources cost the operator."""
        return CostRates(
            per_step_hour=parse_rate(self.cost_per_step_hour),
            per_kv_gib_hour=parse_rate(self.cost_per_kv_gib_hour),
            per_loaded_gib=parse_rate(self.cost_per_loaded_gib),
        )

    @property
    def webhook_policy(self) -> TargetPolicy:
        """Where webhooks may be sent."""
        return TargetPolicy(
            tuple(map(parse_allowed_host, self.webhook_hosts)), self.webhook_networks
        )

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
        """OpenTelemetry's standard variables, which also configure its exporter."""
        return {name: value for name, value in os.environ.items() if name.startswith("OTEL_")}

    @property
    def store_url(self) -> str:
        """The URL of the adapter store."""
        return self.store or (self.data_dir / "store").as_uri()

    def take_fetcher_environment(self) -> dict[str, str]:
        """The fetcher's environment; removes the store's credentials from this process."""
        return fetcher_environment(os.environ, take_credentials())

    @property
    def egress_environment(self) -> Mapping[str, str]:
        """The environment of the egress process: no credentials, but where certificates of
        authorities are."""
        passed = LOG_VARIABLES | {"SSL_CERT_FILE", "SSL_CERT_DIR"}
        given = {name: value for name, value in os.environ.items() if name in passed}
        return {**child_environment(), **given}

    def prepare_data_dir(self) -> Path:
        """The data folder, made for its owner alone if it is not there."""
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self.data_dir

    def load_secrets(self) -> list[bytes]:
        """The server's secrets, from which every key is derived: the present one first.

        Raises InsecureSecretFile.
        """
        return [self._load_present_secret(), *self._load_previous_secrets()]

    def load_identity_provider(self) -> ProviderConfig | None:
        """The identity provider; None: people sign in with passwords only.

        Raises InvalidValue if its client is missing, or InsecureSecretFile.
        """
        if self.oidc_issuer is None:
            return None
        if self.oidc_client_id is None:
            raise InvalidValue("--oidc-issuer needs --oidc-client-id.", param="oidc_client_id")
        secret = self.oidc_client_secret and self.oidc_client_secret.get_secret_value()
        return ProviderConfig(
            issuer=self.oidc_issuer,
            client_id=self.oidc_client_id,
            client_secret=secret or load_text(self.data_dir / "oidc.secret"),
            scopes=tuple(dict.fromkeys(("openid", *self.oidc_scopes))),
            name=self.oidc_name or urlsplit(self.oidc_issuer).hostname or self.oidc_issuer,
            groups_claim=self.oidc_groups_claim,
            rules=parse_rules(self.oidc_roles or "{}"),
        )

    def _load_present_secret(self) -> bytes:
        if self.secret is not None:
            return parse_secret(self.secret.get_secret_value(), source="LORAPLEX_SECRET")
        return load_or_create_secret(self.data_dir / "secret")

    def _load_previous_secrets(self) -> list[bytes]:
        if self.secret_previous is not None:
            text = self.secret_previous.get_secret_value()
            return parse_secrets(text, source="LORAPLEX_SECRET_PREVIOUS")
        return load_secrets(self.data_dir / "secret.previous")


def environment_variable(key: str) -> str:
    """The variable of an option or a setting."""
    return f"{Settings.model_config['env_prefix']}{key.replace('-', '_').upper()}"


def load_settings(*, origins: Mapping[str, Origin] | None = None, **given: Any) -> Settings:
    """A value that is given takes precedence over the environment, the environment over the
    default. `origins`: where the given values come from; without them, from flags.

    Raises InvalidValue for the first invalid setting, without its value.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if origins is None:
        options = options_of(Settings)
        origins = {name: Origin("flag", options[name].flag(name)) for name in given}
    try:
        settings = Settings(**given)
    except ValidationError as exc:
        error = exc.errors(include_url=False, include_input=False)[0]
        name = str(error["loc"][0])
        shown = origins[name].name if name in given else environment_variable(name)
        raise InvalidValue(f"{shown}: {error['msg']}.", param=name) from None
    settings._origins = origins
    return settings
