"""Imports every table of the control plane, for the migrations."""

from __future__ import annotations

from .accounts.models import Account, AccountSession, SignInFailures
from .adapters.canary_models import CanaryCounts
from .adapters.history import AliasChange, DeletionReceipt, VersionTransition
from .adapters.models import (
    Adapter,
    AdapterAlias,
    AdapterSampling,
    AdapterVersion,
    AdapterWish,
    Upload,
)
from .adapters.shadow_models import AliasShadow
from .audit.models import AuditEntry, AuditHead, PlatformAuditEntry, PlatformAuditHead
from .base import Base
from .batches.file_models import StoredFile
from .batches.models import Batch, BatchResult
from .budgets.models import Budget, BudgetAlert, BudgetUse
from .evaluations.models import AliasGate, Evaluation, GoldenSetRow
from .idempotency.models import IdempotentAnswer
from .identities.models import Identity, SpentFlow
from .jobs.models import JobLease
from .keys.models import ApiKey
from .operators.models import Operator, OperatorKey
from .overview.models import AdapterUse, ServerMemory, ServerSample, TenantSample
from .prices.models import Currency, PriceRow
from .quotas.models import (
    CallerBucket,
    CallerLimits,
    PeriodUse,
    Quota,
    RateBucket,
    Reservation,
)
from .replicas.models import Replica
from .requests.models import RequestLogEntry
from .responses.models import StoredResponse
from .samples.models import Sample
from .servers.models import Server
from .tenants.models import Tenant, TenantDeletion
from .tuning.models import StoredCheckpoint, TuningCheckpoint, TuningEvent, TuningJob
from .usage.models import TrainingDay, UsageDay, UsageRecord
from .users.models import User
from .webhooks.models import WebhookDelivery, WebhookEndpoint

__all__ = [
    "Account",
    "AccountSession",
    "Adapter",
    "AdapterAlias",
    "AdapterSampling",
    "AdapterUse",
    "AdapterVersion",
    "AdapterWish",
    "AliasChange",
    "AliasGate",
    "AliasShadow",
    "ApiKey",
    "AuditEntry",
    "AuditHead",
    "Base",
    "Batch",
    "BatchResult",
    "Budget",
    "BudgetAlert",
    "BudgetUse",
    "CallerBucket",
    "CallerLimits",
    "CanaryCounts",
    "Currency",
    "DeletionReceipt",
    "Evaluation",
    "GoldenSetRow",
    "IdempotentAnswer",
    "Identity",
    "JobLease",
    "Operator",
    "OperatorKey",
    "PeriodUse",
    "PlatformAuditEntry",
    "PlatformAuditHead",
    "PriceRow",
    "Quota",
    "RateBucket",
    "Replica",
    "RequestLogEntry",
    "Reservation",
    "Sample",
    "Server",
    "ServerMemory",
    "ServerSample",
    "SignInFailures",
    "SpentFlow",
    "StoredCheckpoint",
    "StoredFile",
    "StoredResponse",
    "Tenant",
    "TenantDeletion",
    "TenantSample",
    "TrainingDay",
    "TuningCheckpoint",
    "TuningEvent",
    "TuningJob",
    "Upload",
    "UsageDay",
    "UsageRecord",
    "User",
    "VersionTransition",
    "WebhookDelivery",
    "WebhookEndpoint",
]
