"""Resolves the name in a request to the one immutable version that answers it.

    [tenant/]adapter[@version|@alias|@sha256:…]

Without a suffix, the name refers to the alias `prod` if it exists, else to the newest ready
version. An alias with a canary refers to the canary for a fixed subset of requests. Another
tenant's adapter, a deleted one and one that never existed raise the same error with the same
message.
"""

from __future__ import annotations

import string
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...adapters.added_tokens import AddedToken, added_tokens_of
from ...adapters.classification import Classification, classification_of
from ...adapters.identity import DIGEST_PREFIX, AdapterKey
from ...adapters.invocation import InvocationTokens, invocation_of
from ...adapters.served_features import are_summable
from ..base import JsonObject
from ..errors import AdapterNotReady, BaseMismatch, ModelNotFound
from ..names import LATEST, is_adapter_name, is_alias_name, is_slug
from ..sessions import TenantSession
from . import repository, shadow_sums
from .canary import is_in_canary
from .canary_limits import CanaryLimits
from .canary_sums import Arm, Split
from .models import SHA256_HEX_LENGTH, AdapterAlias, AdapterVersion
from .sampling import sampled_percent
from .states import VersionState

DEFAULT_ALIAS = "prod"
MIN_DIGEST_PREFIX_LENGTH = 12
"""Hexadecimal digits: 48 bits, which two versions of one adapter do not share by accident."""
MAX_VERSION_DIGITS = 9

_DIGITS = frozenset(string.digits)
_HEX_DIGITS = frozenset(string.digits + "abcdef")


@dataclass(frozen=True, slots=True)
class ModelName:
    """A parsed name. At most one of `version`, `alias` and `digest_prefix` is set."""

    text: str
    adapter: str
    tenant: str | None = None
    version: int | None = None
    alias: str | None = None
    digest_prefix: str | None = None
    """`sha256:` and 12 to 64 hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """The version that a request is bound to from its admission to its end."""

    key: AdapterKey
    adapter_id: str
    version_id: str
    tenant_slug: str
    name: str
    version: int
    state: VersionState
    base_id: str
    object_sha256: str
    size_bytes: int
    reason_code: str | None = None
    """The reason of a rejection, if it was rejected."""
    alias: str | None = None
    """The alias that led here, `prod` for a bare name; None where none did, as for `latest`."""
    is_canary: bool = False
    """The alias is split, and this is its canary."""
    arm: Arm | None = None
    """Where its requests are counted, if the alias has a watched canary."""
    shadow: Shadow | None = None
    """What answers copies of its requests."""
    rival: Rival | None = None
    """What answers copies for a judge, if the alias has a canary that is judged."""
    vocab_size: int | None = None
    """The number of its tokens, if it is not the base's."""
    added_tokens: tuple[AddedToken, ...] = ()
    """The texts of tokens that the base does not have."""
    classification: Classification | None = None
    """The meaning of its head's outputs, if it is a classifier."""
    is_composable: bool = True
    """Whether its delta can be added to another adapter's."""
    invocation_token_ids: InvocationTokens = ()
    """It acts from these tokens of a prompt on; empty: on all."""
    sampled_percent: float = 0.0
    """The share of its requests of which samples are kept."""

    @property
    def pinned(self) -> str:
        """The name that will always mean this version: `tenant/name@3`."""
        return f"{self.tenant_slug}/{self.name}@{self.version}"


class Shadow(NamedTuple):
    """A version that answers copies of a share of an alias's requests."""

    version: AdapterRef
    percent: float
    split: Split
    """The alias since its last change."""


class Rival(NamedTuple):
    """The other version of a split alias: its answers to copies are compared by a judge."""

    version: AdapterRef
    percent: float
    judge: str
    """The name of the model."""


class Meaning(NamedTuple):
    """The meaning of a name at some moment: a version, or one of two for an alias with a canary."""

    name: str
    main: AdapterRef
    canary: AdapterRef | None = None
    canary_percent: float = 0.0

    @property
    def versions(self) -> tuple[AdapterRef, ...]:
        """All that it may mean."""
        return (self.main,) if self.canary is None else (self.main, self.canary)

    @property
    def is_ready(self) -> bool:
        """Whether all its versions are ready, so that its meaning changes only by an explicit
        change."""
        return all(version.state is VersionState.READY for version in self.versions)

    def sampled(self, percent: float) -> Meaning:
        """The same, where samples are kept of this share of the requests."""
        main = replace(self.main, sampled_percent=percent)
        canary = self.canary and replace(self.canary, sampled_percent=percent)
        return self._replace(main=main, canary=canary)

    def of(self, request_id: str, *, base_id: str) -> AdapterRef:
        """The version for this request; with a canary, the same id always gets the same version.

        Raises AdapterNotReady while it is being attested or after it was rejected, and BaseMismatch
        if it belongs to another base model than `base_id`.
        """
        version = self._drawn(request_id)
        if version.state is not VersionState.READY:
            raise AdapterNotReady(self.name, state=version.state, reason=version.reason_code)
        if version.base_id != base_id:
            raise BaseMismatch(
                f"{self.name!r} was pushed for another base model than the one served."
            )
        return version

    def _drawn(self, request_id: str) -> AdapterRef:
        if self.canary is None or self.canary.alias is None:
            return self.main
        is_in = is_in_canary(
            self.canary_percent,
            adapter_id=self.canary.adapter_id,
            alias=self.canary.alias,
            request_id=request_id,
        )
        return self.canary if is_in else self.main


def parse_model_name(text: str) -> ModelName:
    """Take a name apart. Raises ModelNotFound if nothing can have this name."""
    path, has_suffix, suffix = text.partition("@")
    tenant, has_tenant, adapter = path.rpartition("/")
    if not is_adapter_name(adapter) or (has_tenant and not is_slug(tenant)):
        raise ModelNotFound(text)
    owner = tenant if has_tenant else None
    if not has_suffix:
        return ModelName(text, adapter, owner)
    return _with_suffix(text, adapter, owner, suffix)


def resolve(session: TenantSession, name: ModelName, *, tenant_slug: str) -> Meaning:
    """The present meaning of `name` for the session's tenant, whose slug is `tenant_slug`.

    Raises ModelNotFound.
    """
    if name.tenant not in (None, tenant_slug):
        raise ModelNotFound(name.text)
    adapter = repository.find_adapter(session, name.adapter)
    meaning = None if adapter is None else _select(session, adapter.id, name, tenant_slug)
    if meaning is None:
        raise ModelNotFound(name.text)
    percent = sampled_percent(session, meaning.main.adapter_id)
    return meaning if percent == 0.0 else meaning.sampled(percent)


def _with_suffix(text: str, adapter: str, tenant: str | None, suffix: str) -> ModelName:
    if suffix and _DIGITS.issuperset(suffix):
        return ModelName(text, adapter, tenant, version=_parse_number(text, suffix))
    if suffix.startswith(DIGEST_PREFIX):
        return ModelName(text, adapter, tenant, digest_prefix=_check_digest(text, suffix))
    if suffix == LATEST or is_alias_name(suffix):
        return ModelName(text, adapter, tenant, alias=suffix)
    raise ModelNotFound(text)


def _parse_number(text: str, digits: str) -> int:
    # Each version has one spelling: `3`, never `03`.
    if digits.startswith("0") or len(digits) > MAX_VERSION_DIGITS:
        raise ModelNotFound(text)
    return int(digits)


def _check_digest(text: str, digest: str) -> str:
    digits = digest.removeprefix(DIGEST_PREFIX)
    has_length = MIN_DIGEST_PREFIX_LENGTH <= len(digits) <= SHA256_HEX_LENGTH
    if not has_length or not _HEX_DIGITS.issuperset(digits):
        raise ModelNotFound(text)
    return digest


def _select(
    session: TenantSession, adapter_id: str, name: ModelName, tenant_slug: str
) -> Meaning | None:
    alias = DEFAULT_ALIAS if _is_bare(name) else name.alias
    if alias is not None and alias != LATEST:
        row = repository.find_alias(session, adapter_id, alias)
        if row is not None:
            return _split(session, row, name, tenant_slug)
        if name.alias is not None:
            return None
    version = _select_version(session, adapter_id, name)
    if version is None:
        return None
    return Meaning(name.text, _reference(version, name.adapter, tenant_slug))


def _is_bare(name: ModelName) -> bool:
    return name.alias is None and name.version is None and name.digest_prefix is None


def _split(session: TenantSession, row: AdapterAlias, name: ModelName, tenant_slug: str) -> Meaning:
    main = _reference(row.version, name.adapter, tenant_slug, alias=row.name)
    main = replace(main, shadow=_shadow(session, row, name.adapter, tenant_slug))
    if row.canary_version is None or row.canary_percent is None:
        return Meaning(name.text, main)
    canary = _reference(
        row.canary_version, name.adapter, tenant_slug, alias=row.name, is_canary=True
    )
    if (watched := _watched(session, row, name.adapter)) is not None:
        main, canary = (
            replace(
                version,
                arm=Arm(watched, is_canary=version.is_canary),
                rival=_rival(row.canary_limits, other),
            )
            for version, other in ((main, canary), (canary, main))
        )
    return Meaning(name.text, main, canary, row.canary_percent)


def _shadow(
    session: TenantSession, row: AdapterAlias, name: str, tenant_slug: str
) -> Shadow | None:
    shadow = shadow_sums.find(session, row.adapter_id, row.name)
    if shadow is None:
        return None
    version = repository.find_visible_version(session, row.adapter_id, shadow.version_number)
    if version is None or version.state is not VersionState.READY:
        return None
    split = Split(row.tenant_id, row.adapter_id, name, row.name, shadow.change_number)
    return Shadow(_reference(version, name, tenant_slug), shadow.percent, split)


def _rival(limits: JsonObject | None, version: AdapterRef) -> Rival | None:
    known = CanaryLimits.from_json(limits)
    if known is None or known.judged_by is None:
        return None
    return Rival(version, known.judge_percent, known.judged_by)


def _watched(session: TenantSession, row: AdapterAlias, name: str) -> Split | None:
    if row.canary_limits is None:
        return None
    change = repository.find_last_change(session, row.adapter_id, row.name)
    assert change is not None, "every target was written down"
    return Split(row.tenant_id, row.adapter_id, name, row.name, change.number)


def _select_version(
    session: TenantSession, adapter_id: str, name: ModelName
) -> AdapterVersion | None:
    if name.version is not None:
        return repository.find_visible_version(session, adapter_id, name.version)
    if name.digest_prefix is not None:
        return _find_by_digest(session, adapter_id, name.digest_prefix)
    return _find_latest(session, adapter_id)


def _find_latest(session: TenantSession, adapter_id: str) -> AdapterVersion | None:
    # If none is ready, return the newest, whose state explains why.
    ready = repository.find_newest_ready_version(session, adapter_id)
    return ready or repository.find_newest_version(session, adapter_id)


def _find_by_digest(session: TenantSession, adapter_id: str, prefix: str) -> AdapterVersion | None:
    versions = repository.list_versions_by_digest_prefix(session, adapter_id, prefix)
    if len({version.digest for version in versions}) != 1:
        return None
    # The same content twice: refused once, accepted another time.
    ready = (version for version in versions if version.state is VersionState.READY)
    return next(ready, versions[0])


def _reference(
    version: AdapterVersion,
    name: str,
    tenant_slug: str,
    *,
    alias: str | None = None,
    is_canary: bool = False,
) -> AdapterRef:
    return AdapterRef(
        key=AdapterKey(version.tenant_id, version.digest),
        adapter_id=version.adapter_id,
        version_id=version.id,
        tenant_slug=tenant_slug,
        name=name,
        version=version.number,
        state=version.state,
        base_id=version.base_id,
        object_sha256=version.object_sha256,
        size_bytes=version.size_bytes,
        reason_code=version.reason_code,
        alias=alias,
        is_canary=is_canary,
        vocab_size=version.intake_report.get("vocab_size"),
        added_tokens=added_tokens_of(version.intake_report),
        classification=classification_of(version.intake_report),
        is_composable=are_summable(version.intake_report.get("features", ())),
        invocation_token_ids=invocation_of(version.intake_report),
    )
