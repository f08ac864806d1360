"""Every error code that a caller can meet, with its HTTP status and what it means.

This table is the published list: `docs/errors.md` is what `python -m loraplex.api.error_codes`
prints, and tests compare it with what the layers can raise.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..adapters.errors import ConfinementMissing
from ..adapters.rejections import REJECTIONS
from ..engine.errors import BASE_ERRORS

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


class ErrorCode(NamedTuple):
    """What one code means to the caller."""

    status: int
    meaning: str
    retryable: bool = False
    """The same request may succeed later, unchanged."""

    @property
    def type(self) -> str:
        """The family, in the words of OpenAI's API."""
        fallback = "server_error" if self.status >= 500 else "invalid_request_error"
        return _TYPES.get(self.status, fallback)


REQUEST_CODES: Mapping[str, ErrorCode] = {
    "invalid_json": ErrorCode(400, "The body is not valid JSON."),
    "invalid_parameter": ErrorCode(
        400, "A parameter is missing, of the wrong type or out of range; `param` names it."
    ),
    "unsupported_parameter": ErrorCode(
        400, "The parameter, or this value of it, would change the answer and is not served."
    ),
    "proposer_not_served": ErrorCode(
        400, "The server does not run this proposer of tokens; the message lists those it runs."
    ),
    "invalid_grammar": ErrorCode(
        400, "The schema or grammar cannot be served as it is; the message says where and why."
    ),
    "grammar_not_served": ErrorCode(400, "The server does not serve schemas and grammars."),
    "grammar_failed": ErrorCode(
        422,
        "The output could not follow its grammar any further: that took more work than is allowed, "
        "or no token of the vocabulary continues it.",
    ),
    "context_length_exceeded": ErrorCode(
        400, "Prompt and requested output exceed the context length or the KV cache."
    ),
    "missing_api_key": ErrorCode(
        401, "No `Authorization: Bearer <key>` was sent, and nobody is signed in."
    ),
    "invalid_api_key": ErrorCode(401, "The key is malformed, unknown, expired or revoked."),
    "insufficient_scope": ErrorCode(403, "The key's scopes do not allow this."),
    "address_not_allowed": ErrorCode(403, "The key may not be used from this network."),
    "tenant_required": ErrorCode(
        400, "An operator has to say on which tenant it acts: `X-Loraplex-Tenant: <slug>`."
    ),
    "tenant_suspended": ErrorCode(403, "The tenant of this key is suspended."),
    "not_found": ErrorCode(404, "There is nothing at this path."),
    "method_not_allowed": ErrorCode(405, "The path does not know this method."),
    "etag_mismatch": ErrorCode(
        412, "The resource is not what `If-Match` names: it was changed since; read it again."
    ),
    "idempotency_conflict": ErrorCode(
        409, "The `Idempotency-Key` was used for another request: use a new one for each."
    ),
    "idempotency_in_progress": ErrorCode(
        409, "The first request with this `Idempotency-Key` still runs.", True
    ),
    "idempotent_answer_lost": ErrorCode(
        409,
        "The first request with this `Idempotency-Key` was carried out, but its answer was "
        "not kept: look at what it changed.",
    ),
    "tenant_queue_full": ErrorCode(
        429, "The tenant has as many requests waiting as one tenant may have.", True
    ),
    "request_timeout": ErrorCode(408, "The request did not arrive in time.", True),
    "malformed_request": ErrorCode(400, "The request is not valid HTTP/1.1."),
    "headers_too_large": ErrorCode(431, "The request's line and headers exceed 64 KiB."),
    "host_not_allowed": ErrorCode(
        421, "The server does not answer for this `Host`; its operator says for which it does."
    ),
    "rate_limited": ErrorCode(
        429,
        "The tenant's requests or tokens per minute are used up; the message says which limit, and "
        "`retry-after-ms` when there is room for this request.",
        True,
    ),
    "too_many_requests_at_once": ErrorCode(
        429, "The tenant has as many requests running as it may have at once.", True
    ),
    "insufficient_quota": ErrorCode(
        429,
        "What is left of the tenant's tokens of this day or month is less than the request may "
        "use; the message says how much that is.",
    ),
    "body_too_large": ErrorCode(413, "The body exceeds the limit of its route."),
    "unsupported_media_type": ErrorCode(
        415, "The body has another content type or encoding than the route reads."
    ),
}

SIGN_IN_CODES: Mapping[str, ErrorCode] = {
    "sign_in_failed": ErrorCode(401, "Name and password do not belong together."),
    "sign_in_locked": ErrorCode(
        429,
        "There were too many failures by this name or from this address; `Retry-After` says when "
        "the next try counts.",
        True,
    ),
    "session_ended": ErrorCode(401, "The session has ended: sign in again."),
    "session_required": ErrorCode(403, "This is for whoever is signed in, not for keys."),
    "confirmation_required": ErrorCode(
        403,
        "This needs the password anew: `POST /v1/session/confirmation`; it counts for ten minutes.",
    ),
    "csrf_failed": ErrorCode(
        403,
        "A session changes something only from a page of the same origin that sends the session's "
        "`csrf_token` as `X-CSRF-Token`.",
    ),
    "insecure_transport": ErrorCode(
        403,
        "Nobody signs in over plain HTTP from another machine: use HTTPS through a proxy that "
        "`LORAPLEX_TRUSTED_PROXIES` names and that sets `X-Forwarded-Proto`.",
    ),
    "invitation_ended": ErrorCode(
        403, "The invitation was used already, has expired, or never was: ask for another one."
    ),
}

MODEL_CODES: Mapping[str, ErrorCode] = {
    "model_not_found": ErrorCode(
        404, "No such model, adapter, version or alias for this key; another tenant's neither."
    ),
    "adapter_not_ready": ErrorCode(
        409, "The version is still being checked, or was rejected; its `state` says which."
    ),
    "adapter_loading": ErrorCode(503, "The adapter is still on its way to the device.", True),
    "adapter_load_failed": ErrorCode(
        503,
        "The adapter's weights could not be brought to the device. `retryable` says whether the "
        "same request may succeed later: it is false where the stored weights are lost or damaged, "
        "until the same files are pushed again.",
        True,
    ),
    "adapter_too_large": ErrorCode(422, "The adapter is larger than the memory for all adapters."),
    "adapter_deleted": ErrorCode(404, "The adapter was deleted while the request used it."),
    "quantization_drift": ErrorCode(
        422,
        "Under this adapter the quantized base strays further from the unquantized one than the "
        "operator allows: push it to a server of the unquantized base, lower alpha, or train on "
        "the quantized base.",
    ),
    "chat_template_missing": ErrorCode(
        400, "The base model has no chat template; use `/v1/completions`."
    ),
    "numerical_error": ErrorCode(422, "The model's output under this adapter is not finite."),
    "adapter_quarantined": ErrorCode(
        422,
        "The engine stopped, or its numbers broke down, repeatedly under this version: check it "
        "and push a new one.",
    ),
    "request_cancelled": ErrorCode(409, "Somebody of the tenant, or an operator, ended it."),
    "request_quarantined": ErrorCode(
        422,
        "The engine stopped while this request ran, and again while it ran alone, or repeatedly "
        "under requests of this tenant: none of them is tried for ten minutes.",
    ),
}

PLATFORM_CODES: Mapping[str, ErrorCode] = {
    "tenant_not_found": ErrorCode(404, "No such tenant."),
    "tenant_exists": ErrorCode(409, "A tenant with this slug exists already."),
    "quota_exceeded": ErrorCode(
        403,
        "The tenant has as many adapters, versions, stored bytes, keys or users as its quota "
        "allows; the message says which. Remove some, or ask the operator for more.",
    ),
    "key_not_found": ErrorCode(404, "No such API key for this caller."),
    "user_not_found": ErrorCode(404, "No such user of this tenant."),
    "user_exists": ErrorCode(409, "The tenant has a user with this address already."),
    "operator_not_found": ErrorCode(404, "No such operator."),
    "operator_exists": ErrorCode(409, "An operator with this name exists already."),
    "grant_too_wide": ErrorCode(
        403, "Nobody gives away more than they have; `param` names what goes beyond it."
    ),
    "own_account": ErrorCode(403, "Nobody changes their own role, or disables themselves."),
    "last_administrator": ErrorCode(
        409,
        "The last active owner of a tenant, or administrator of the platform, can neither be "
        "disabled nor be given another role.",
    ),
}

RESOURCE_CODES: Mapping[str, ErrorCode] = {
    "request_not_found": ErrorCode(404, "No such request for this key, or its entry is too old."),
    "adapter_not_found": ErrorCode(404, "No such adapter for this key."),
    "version_not_found": ErrorCode(404, "The adapter has no such version."),
    "alias_not_found": ErrorCode(404, "The adapter has no such alias."),
    "version_aliased": ErrorCode(409, "An alias points at the version; move or remove it first."),
    "nothing_to_roll_back": ErrorCode(
        409, "The alias had no earlier target, or a version of that target is gone."
    ),
    "too_many_pins": ErrorCode(
        409, "The tenant has as many pinned versions as one tenant may have; unpin another first."
    ),
    "adapter_being_deleted": ErrorCode(
        409, "The same content is being deleted right now; push it again when that is done.", True
    ),
    "state_conflict": ErrorCode(409, "The version or upload is not in a state that allows this."),
    "upload_not_found": ErrorCode(404, "No such upload for this key."),
    "upload_elsewhere": ErrorCode(
        409, "The upload's bytes lie with another server: send it there, or declare it again."
    ),
    "upload_lost": ErrorCode(
        409,
        "The server that had the upload's bytes did not come back to examine them; push again.",
    ),
    "upload_conflict": ErrorCode(
        409, "The offset is not where the upload stands, or bytes are missing or too many."
    ),
    "disk_share_exceeded": ErrorCode(
        429,
        "The tenant's unfinished uploads, or all its adapters, take as much of the server's disk "
        "as one tenant may: finish or abandon uploads, or delete adapters.",
        True,
    ),
    "digest_mismatch": ErrorCode(422, "The received bytes do not have the declared SHA-256."),
}

SERVER_CODES: Mapping[str, ErrorCode] = {
    "internal_error": ErrorCode(500, "Something failed that should not have.", True),
    "engine_error": ErrorCode(500, "The engine failed on this request.", True),
    "engine_restarted": ErrorCode(
        503, "The engine stopped while this request ran; send it again.", True
    ),
    "overloaded": ErrorCode(
        503, "More requests wait than are taken, or this one could not end by its deadline.", True
    ),
    "too_many_connections": ErrorCode(
        503, "The server has as many connections at work as it may have open files.", True
    ),
    "deadline_exceeded": ErrorCode(504, "The request's deadline passed before it ended."),
    "shutting_down": ErrorCode(503, "The server is stopping; ask another one.", True),
    "engine_unavailable": ErrorCode(503, "The engine is starting or down.", True),
    "database_unavailable": ErrorCode(503, "The database did not answer in time.", True),
    "stale_extent": ErrorCode(503, "The adapter moved while the request ran; send it again.", True),
    "intake_unavailable": ErrorCode(
        503,
        "The server could not examine the adapter. What was sent is kept: commit the upload again.",
        True,
    ),
    "storage_full": ErrorCode(
        507,
        "The server's disk has no room for this now. What was sent is kept; what is left of the "
        "disk is for the database.",
        True,
    ),
    "store_unavailable": ErrorCode(503, "The adapter store did not answer in time.", True),
    "store_denied": ErrorCode(
        503, "The adapter store denies this server access; the server's operator has to mend it."
    ),
}

REJECTION_CODES: Mapping[str, ErrorCode] = {
    reason: ErrorCode(422, f"{rejection.meaning} {rejection.way_out}")
    for reason, rejection in REJECTIONS.items()
}

BASE_CODES: Mapping[str, str] = {error.code: str(error.__doc__) for error in BASE_ERRORS}
"""Of base models that `loraplex serve` refuses: its `Error:` line ends with one of them."""

START_CODES: Mapping[str, str] = {
    ConfinementMissing.code: "`--require-confinement` is set, and namespaces, Landlock or limits "
    "do not confine examinations here. The message names what is missing and what to do.",
}
"""Of machines on which `loraplex serve` does not start: its `Error:` line ends with one of them."""

ERROR_CODES: Mapping[str, ErrorCode] = {
    **REQUEST_CODES,
    **SIGN_IN_CODES,
    **MODEL_CODES,
    **RESOURCE_CODES,
    **PLATFORM_CODES,
    **SERVER_CODES,
    **REJECTION_CODES,
}

_SECTIONS: Mapping[str, Mapping[str, ErrorCode]] = {
    "The request": REQUEST_CODES,
    "Signing in": SIGN_IN_CODES,
    "The model it names": MODEL_CODES,
    "Adapters, versions and uploads": RESOURCE_CODES,
    "Tenants, users, keys and quotas": PLATFORM_CODES,
    "The server": SERVER_CODES,
    "Why an adapter is rejected": REJECTION_CODES,
}

_INTRODUCTION = """\
# Error codes

Every error answer, and the last event of a stream that failed, is one object:

```json
{"error": {"message": "...", "type": "...", "param": null, "code": "...", "retryable": false,
           "request_id": "req-..."}}
```

`code` is one of the codes below, `param` the field or tensor at fault. `retryable` says whether
the same request may succeed later; the header `x-should-retry` says it to the official clients and
`retry-after-ms` when. A stream ends in `data: [DONE]` only if it succeeded.

This page is printed by `python -m loraplex.api.error_codes`.
"""


_BASE_INTRODUCTION = """
## Why a base model is refused

`loraplex serve` checks the base model, a draft model and the reference base before it serves. It
stops with exit status 2 and one `Error:` line, which says what is wrong and ends with a code.

| code | meaning |
|---|---|
"""

_START_INTRODUCTION = """
## Why a server does not start

It stops with exit status 1 and one `Error:` line that ends with the code.

| code | meaning |
|---|---|
"""


def error_reference() -> str:
    """The text of `docs/errors.md`."""
    return (
        _INTRODUCTION
        + "".join(
            f"\n## {title}\n\n| code | status | retry | meaning |\n|---|---|---|---|\n"
            + "".join(_table_rows(codes))
            for title, codes in _SECTIONS.items()
        )
        + _BASE_INTRODUCTION
        + "".join(f"| `{code}` | {meaning} |\n" for code, meaning in BASE_CODES.items())
        + _START_INTRODUCTION
        + "".join(f"| `{code}` | {meaning} |\n" for code, meaning in START_CODES.items())
    )


def _table_rows(codes: Mapping[str, ErrorCode]) -> Iterator[str]:
    for code, published in codes.items():
        retry = "yes" if published.retryable else "no"
        yield f"| `{code}` | {published.status} | {retry} | {published.meaning} |\n"


if __name__ == "__main__":
    sys.stdout.write(error_reference())
