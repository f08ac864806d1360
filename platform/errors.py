"""Errors of the control plane. The class docstring is the default message; `code` is published.

Resources of another tenant raise the same error, with the same message, as resources that do not
exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from .audit.event import Party
    from .quotas.standing import Standing


class PlatformError(Exception):
    """The control plane could not do this."""

    code: ClassVar[str] = "platform_error"
    refused: Party | None = None
    """Whom it refuses, for the audit log: whose key is right, or whose account was named."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or type(self).__doc__)


# --- the database -------------------------------------------------------------------------------


class DatabaseUnavailable(PlatformError):
    """The database did not answer in time."""

    code = "database_unavailable"


class DatabaseBusy(DatabaseUnavailable):
    """The database is reachable, but was locked for too long."""


class DatabaseDamaged(DatabaseUnavailable):
    """The database file is damaged, or is not a database."""


class DatabaseFull(DatabaseUnavailable):
    """The database's disk is full: free some space on it."""

    code = "storage_full"


class RevisionMismatch(PlatformError):
    """The database schema does not match this version of the software."""

    code = "database_revision_mismatch"

    def __init__(self, message: str, *, current: str | None, head: str) -> None:
        super().__init__(message)
        self.current = current
        self.head = head


class RowSecurityMissing(PlatformError):
    """The database user cannot assume the role that confines tenants to their rows."""

    code = "row_security_missing"

    def __init__(self) -> None:
        super().__init__(
            f"{self.__doc__} As a superuser, run `CREATE ROLE loraplex_tenant NOLOGIN` and "
            "`GRANT loraplex_tenant TO` that user; then run `loraplex db upgrade`."
        )


class InsecureSecretFile(PlatformError):
    """A secret file is readable by other users, or does not contain a secret."""

    code = "insecure_secret_file"


# --- values -------------------------------------------------------------------------------------


class InvalidValue(PlatformError):
    """A value is invalid for its field."""

    code = "invalid_parameter"

    def __init__(self, message: str, *, param: str | None) -> None:
        super().__init__(message)
        self.param = param
        """The field; None if it is not known."""


class IdempotencyConflict(PlatformError):
    """The `Idempotency-Key` was used for another request: use a new key for each request."""

    code = "idempotency_conflict"


class IdempotencyInProgress(PlatformError):
    """The first request with this `Idempotency-Key` is still running."""

    code = "idempotency_in_progress"


class IdempotentAnswerLost(PlatformError):
    """The request was executed, but its response was not stored: check what changed."""

    code = "idempotent_answer_lost"


# --- tenants and keys ---------------------------------------------------------------------------


class TenantNotFound(PlatformError):
    """No such tenant."""

    code = "tenant_not_found"


class TenantDeletionNotFound(PlatformError):
    """No tenant with this id was deleted."""

    code = "tenant_deletion_not_found"


class TenantExists(PlatformError):
    """A tenant with this slug already exists."""

    code = "tenant_exists"


class TenantSuspended(PlatformError):
    """The tenant of this key is suspended."""

    code = "tenant_suspended"


class UserNotFound(PlatformError):
    """No such user."""

    code = "user_not_found"


class UserExists(PlatformError):
    """The tenant already has a user with this address."""

    code = "user_exists"


class OperatorNotFound(PlatformError):
    """No such operator."""

    code = "operator_not_found"


class OperatorExists(PlatformError):
    """An operator with this name already exists."""

    code = "operator_exists"


class OwnAccount(PlatformError):
    """You cannot change your own role or disable yourself."""

    code = "own_account"


class LastAdministrator(PlatformError):
    """The last active owner or administrator cannot be disabled or given another role."""

    code = "last_administrator"


class GrantTooWide(PlatformError):
    """You can only grant permissions that you hold yourself."""

    code = "grant_too_wide"

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(f"{self.__doc__} {message}")
        self.param = param
        """In what it is too wide."""


class KeyNotFound(PlatformError):
    """No such API key."""

    code = "key_not_found"


class ReplicaNotFound(PlatformError):
    """No such replica."""

    code = "replica_not_found"


class InvalidApiKey(PlatformError):
    """The API key is malformed or unknown."""

    code = "invalid_api_key"


class ApiKeyExpired(InvalidApiKey):
    """The API key has expired."""


class ApiKeyRevoked(InvalidApiKey):
    """The API key was revoked."""


class SignInFailed(PlatformError):
    """Incorrect name or password."""

    code = "sign_in_failed"


class SignInLocked(PlatformError):
    """Too many failed sign-ins for this name or from this address: try again later."""

    code = "sign_in_locked"

    def __init__(self, retry_after_seconds: float) -> None:
        super().__init__()
        self.retry_after_seconds = retry_after_seconds


class SessionEnded(PlatformError):
    """The session has expired or was ended: sign in again."""

    code = "session_ended"


class SignInRejected(PlatformError):
    """The answer of the identity provider is invalid: sign in again."""

    code = "sign_in_rejected"

    def __init__(self, reason: str | None = None) -> None:
        """`reason`: fixed text without values."""
        super().__init__(None if reason is None else f"{self.__doc__} Reason: {reason}.")


class FlowSpent(SignInRejected):
    """This sign-in was completed or failed before: sign in again."""


class IdentityNotMapped(PlatformError):
    """You are signed in at the identity provider, but none of your groups has access here."""

    code = "identity_not_mapped"


class IdentityConflict(PlatformError):
    """Another account has the email address of your identity: an operator can link the two."""

    code = "identity_conflict"


class IdentityNotFound(PlatformError):
    """The user has no identity at the identity provider."""

    code = "identity_not_found"


class AccountDisabled(PlatformError):
    """Your account on this server is disabled."""

    code = "account_disabled"


class InvitationEnded(PlatformError):
    """The invitation is invalid, expired or already used: request a new one."""

    code = "invitation_ended"


class FileNotFound(PlatformError):
    """No such file."""

    code = "file_not_found"


class FileInUse(PlatformError):
    """A batch, fine-tuning job, evaluation or golden set uses this file."""

    code = "file_in_use"


class BatchNotFound(PlatformError):
    """No such batch."""

    code = "batch_not_found"


class TuningJobNotFound(PlatformError):
    """No such fine-tuning job."""

    code = "tuning_job_not_found"


class GoldenSetNotFound(PlatformError):
    """No such golden set."""

    code = "golden_set_not_found"


class GoldenSetInUse(PlatformError):
    """A gate of an alias needs this golden set."""

    code = "golden_set_in_use"


class GateNotFound(PlatformError):
    """The alias has no gate."""

    code = "gate_not_found"


class GateNotPassed(PlatformError):
    """The version was not evaluated as the alias's gate requires."""

    code = "gate_not_passed"

    def __init__(
        self,
        message: str,
        *,
        golden_set: str,
        version: int,
        against: int | None,
        evaluation_id: str | None,
    ) -> None:
        """`against`: the version to compare with; None: the base. `evaluation_id`: the evaluation
        that has not ended; None: there is none."""
        super().__init__(message)
        self.golden_set = golden_set
        self.version = version
        self.against = against
        self.evaluation_id = evaluation_id


class GateRefused(PlatformError):
    """The version is worse than the alias's gate allows."""

    code = "gate_refused"


class EvaluationNotFound(PlatformError):
    """No such evaluation."""

    code = "evaluation_not_found"


class ResponseNotFound(PlatformError):
    """No such stored response."""

    code = "response_not_found"


class WebhookNotFound(PlatformError):
    """No such webhook."""

    code = "webhook_not_found"


class WebhookUrlInvalid(PlatformError):
    """The URL does not have the form that webhooks need."""

    code = "webhook_url_invalid"
    param = "url"


class WebhookHostNotAllowed(PlatformError):
    """The operator has not listed the URL's host and port for webhooks."""

    code = "webhook_host_not_allowed"
    param = "url"


class ConversationTooLarge(PlatformError):
    """The stored responses of the conversation are too large to be continued."""

    code = "conversation_too_large"
    param = "previous_response_id"


class RequestNotFound(PlatformError):
    """No such request."""

    code = "request_not_found"


# --- limits -------------------------------------------------------------------------------------


class QuotaExceeded(PlatformError):
    """The tenant has reached a quota."""

    code = "quota_exceeded"

    def __init__(self, what: str, *, limit: int, used: int, wanted: int = 1) -> None:
        super().__init__(
            f"The quota is {limit} {what}: {used} are used, and this needs {wanted} more."
        )
        self.limit = limit
        self.used = used


class DiskShareExceeded(PlatformError):
    """The tenant has reached its share of the server's disk."""

    code = "disk_share_exceeded"

    def __init__(self, what: str, *, limit: int, used: int, wanted: int) -> None:
        super().__init__(
            f"One tenant's {what} can use {limit} bytes of this server's disk now: {used} are "
            f"used, and this needs {wanted} more. Finish or abandon uploads, or delete "
            "adapters."
        )


class LimitReached(PlatformError):
    """The request exceeds a limit."""

    def __init__(
        self, message: str, *, standing: Standing, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.standing = standing
        """The tenant's remaining rates."""
        self.retry_after_seconds = retry_after_seconds
        """When the same request would pass if no other came first, where that is known."""


class RateLimited(LimitReached):
    """The tenant's requests or tokens per minute are used up."""

    code = "rate_limited"


class PriceNotFound(PlatformError):
    """The tenant has no price of its own of that base at that time."""

    code = "price_not_found"
    default_message = "The tenant has no price of its own for this base at that time."


class BudgetNotFound(PlatformError):
    """No such budget."""

    code = "budget_not_found"


class TooManyRequestsAtOnce(LimitReached):
    """The tenant has reached its limit of concurrent requests."""

    code = "too_many_requests_at_once"


class InsufficientQuota(LimitReached):
    """The tenant's tokens of this day or month are used up."""

    code = "insufficient_quota"


class BudgetExhausted(LimitReached):
    """A budget of money has less left than the request may cost."""

    code = "budget_exhausted"


# --- models by name -----------------------------------------------------------------------------


class ModelNotFound(PlatformError):
    """No such model, adapter, version or alias is available to this key."""

    code = "model_not_found"

    def __init__(self, model: str) -> None:
        super().__init__(f"The model {model!r} does not exist, or your key may not use it.")
        self.model = model


class AdapterNotReady(PlatformError):
    """The adapter version is still being checked or was rejected."""

    code = "adapter_not_ready"

    def __init__(self, name: str, *, state: str, reason: str | None = None) -> None:
        detail = f" ({reason})" if reason else ""
        super().__init__(f"The adapter {name!r} is not ready: it is {state}{detail}.")
        self.state = state
        self.reason = reason


class BaseMismatch(PlatformError):
    """The adapter version was trained for another base model than the one served."""

    code = "base_mismatch"


class InvalidComposition(PlatformError):
    """A composition has too many adapters, one of them twice, or a weight out of range."""

    code = "invalid_composition"


class AdapterNotComposable(PlatformError):
    """An adapter of the composition has more than LoRA matrices."""

    code = "adapter_not_composable"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"The adapter {name!r} has more than LoRA matrices (see the features of its report), "
            "so it cannot be added to others."
        )


# --- adapters -----------------------------------------------------------------------------------


class AdapterNotFound(PlatformError):
    """No such adapter."""

    code = "adapter_not_found"


class VersionNotFound(PlatformError):
    """The adapter has no such version."""

    code = "version_not_found"


class AliasNotFound(PlatformError):
    """The adapter has no such alias."""

    code = "alias_not_found"


class ShadowNotFound(PlatformError):
    """The alias has no shadow."""

    code = "shadow_not_found"


class NothingToRollBack(PlatformError):
    """The alias had no earlier target, or a version of that target no longer exists."""

    code = "nothing_to_roll_back"


class VersionAliased(PlatformError):
    """An alias points at this version: move or remove the alias, then delete the version."""

    code = "version_aliased"

    def __init__(self, aliases: list[str]) -> None:
        super().__init__(f"{self.__doc__} Aliases: {', '.join(aliases)}.")
        self.aliases = aliases


class TooManyPins(PlatformError):
    """The tenant has reached its limit of pinned versions: unpin another one first."""

    code = "too_many_pins"

    def __init__(self, limit: int) -> None:
        super().__init__(f"{self.__doc__} The limit is {limit}.")
        self.limit = limit


class AdapterBeingDeleted(PlatformError):
    """The same content is being deleted: push it again when that is done."""

    code = "adapter_being_deleted"


class InvalidTransition(PlatformError):
    """The state of the version, upload, batch, job or evaluation does not allow this."""

    code = "state_conflict"

    def __init__(self, current: str, target: str) -> None:
        super().__init__(f"It is {current} and cannot be {target}.")
        self.current = current
        self.target = target


class SamplingForbidden(PlatformError):
    """The operator allows no samples (`--sample-days 0`)."""

    code = "sampling_forbidden"


class SampleNotFound(PlatformError):
    """No such sample."""

    code = "sample_not_found"


class SampleUnreadable(PlatformError):
    """The server no longer has the secret under which the sample is encrypted."""

    code = "sample_unreadable"


class NoSamples(PlatformError):
    """There is no sample to export: no complete answer of this kind has been kept."""

    code = "no_samples"


class UploadNotFound(PlatformError):
    """No such upload."""

    code = "upload_not_found"


class UploadElsewhere(PlatformError):
    """The upload's bytes are on another server: send it there, or declare it again."""

    code = "upload_elsewhere"


class TooManyParts(PlatformError):
    """The upload has the most parts that one may have: declare it again, and send larger ones."""

    code = "too_many_parts"

    def __init__(self, most: int) -> None:
        super().__init__(
            f"An upload may have {most} parts. Abandon it, declare it again, and send larger parts."
        )


class UploadConflict(PlatformError):
    """The offset is not the number of received bytes, or there are too few or too many bytes."""

    code = "upload_conflict"

    def __init__(self, *, received_bytes: int, size_bytes: int, is_busy: bool = False) -> None:
        busy = " Another request is still sending to it: query the upload's state again."
        super().__init__(
            f"{received_bytes} of {size_bytes} bytes were received.{busy if is_busy else ''}"
        )
        self.received_bytes = received_bytes
        self.size_bytes = size_bytes
