"""Every table of the control plane, for what must see them all: the migrations."""

from __future__ import annotations

from .adapters.models import Adapter, AdapterAlias, AdapterVersion, Upload
from .base import Base
from .keys.models import ApiKey
from .tenants.models import Tenant
from .usage.models import UsageRecord

__all__ = [
    "Adapter",
    "AdapterAlias",
    "AdapterVersion",
    "ApiKey",
    "Base",
    "Tenant",
    "Upload",
    "UsageRecord",
]
