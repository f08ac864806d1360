"""Every table of the control plane, for what must see them all: the migrations."""

from __future__ import annotations

from .adapters.history import AliasChange, DeletionReceipt, VersionTransition
from .adapters.models import Adapter, AdapterAlias, AdapterVersion, AdapterWish, Upload
from .base import Base
from .keys.models import ApiKey
from .tenants.models import Tenant
from .usage.models import UsageRecord

__all__ = [
    "Adapter",
    "AdapterAlias",
    "AdapterVersion",
    "AdapterWish",
    "AliasChange",
    "ApiKey",
    "Base",
    "DeletionReceipt",
    "Tenant",
    "Upload",
    "UsageRecord",
    "VersionTransition",
]
