"""The error codes of the API, with HTTP status and meaning.

`docs/errors.md` is the output of `python -m loraplex.api.contract.error_codes`. Tests compare the
table with what the layers can raise.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ...adapters.errors import ConfinementMissing
from ...adapters.rejections import REJECTIONS
from ...engine.errors import BASE_ERRORS, LINK_ERRORS

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


class ErrorCode(NamedTuple):
    """The meaning of one code."""

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
    "invalid_form": ErrorCode(400, "The body is not a valid form of the declared boundary."),
    "invalid_parameter": ErrorCode(
        400, "A parameter is missing, out of range or of the wrong type; `param` names it."
    ),
    "unsupported_parameter": ErrorCode(
        400, "The parameter, or this value of it, would change the answer and is not supported."
    ),
    "proposer_not_served": ErrorCode(
        400, "This proposer is not active on the server; the message lists the active ones."
    ),
    "kv_policy_not_served": ErrorCode(
        400, "The server's base or KV cache does not support `kv_policy`; the message says why."
    ),
    "slo_too_strict": ErrorCode(
        400,
        "`slo` asks for a shorter target than the request has without it (the tenant's, or else "
        "the server's), or for one where it has none; the message says what is allowed.",
    ),
    "endless_not_served": ErrorCode(
        400, "The server's base or KV cache does not support `endless`; the message says why."
    ),
    "invalid_grammar": ErrorCode(
        400, "The schema or grammar is invalid or not supported; the message says where and why."
    ),
    "grammar_not_served": ErrorCode(400, "The server does not support schemas and grammars."),
    "grammar_failed": ErrorCode(
        422,
        "The output can no longer follow its grammar: the work limit was reached, or no "
        "token continues it.",
    ),
    "context_length_exceeded": ErrorCode(
        400, "The prompt and the requested output exceed the context length or the KV cache."
    ),
    "missing_api_key": ErrorCode(
        401, "The request has neither an `Authorization: Bearer <key>` header nor a session."
    ),
    "invalid_api_key": ErrorCode(401, "The API key is malformed, unknown, expired or revoked."),
    "insufficient_scope": ErrorCode(403, "The key does not have the required scope."),
    "address_not_allowed": ErrorCode(403, "The key cannot be used from this network."),
    "tenant_required": ErrorCode(
        400, "An operator must name the tenant: `X-Loraplex-Tenant: <slug>`."
    ),
    "tenant_suspended": ErrorCode(403, "The tenant of this key is suspended."),
    "not_found": ErrorCode(404, "No such path."),
    "method_not_allowed": ErrorCode(405, "The path does not support this method."),
    "etag_mismatch": ErrorCode(
        412, "The resource has changed and does not match `If-Match`: read it again."
    ),
    "idempotency_conflict": ErrorCode(
        409, "The `Idempotency-Key` was used for another request: use a new key for each request."
    ),
    "idempotency_in_progress": ErrorCode(
        409, "The first request with this `Idempotency-Key` is still running.", True
    ),
    "idempotent_answer_lost": ErrorCode(
        409,
        "The first request with this `Idempotency-Key` was executed, but its response was "
        "not stored: check what changed.",
    ),
    "tenant_queue_full": ErrorCode(
        429, "The tenant has reached its limit of waiting requests.", True
    ),
    "request_timeout": ErrorCode(408, "The request did not arrive in time.", True),
    "malformed_request": ErrorCode(400, "The request is not valid HTTP/1.1."),
    "headers_too_large": ErrorCode(431, "The request line and headers exceed 64 KiB."),
    "host_not_allowed": ErrorCode(
        421, "The server is not configured for this `Host`; the operator sets the allowed ones."
    ),
    "rate_limited": ErrorCode(
        429,
        "The tenant's requests or tokens per minute are used up. The message names the "
        "limit; `retry-after-ms` says when this request fits.",
        True,
    ),
    "too_many_requests_at_once": ErrorCode(
        429, "The tenant has reached its limit of concurrent requests.", True
    ),
    "insufficient_quota": ErrorCode(
        429,
        "The tenant has fewer tokens left for this day or month than the request may use, or none "
        "that a fine-tuning job may train on; the message has the numbers.",
    ),
    "budget_exhausted": ErrorCode(
        429,
        "The tenant, the user or the key has less money left in its budget for this day or month "
        "than the request may cost; the message has the amounts.",
    ),
    "body_too_large": ErrorCode(413, "The body exceeds the limit of the route."),
    "unsupported_media_type": ErrorCode(
        415, "The route does not accept this content type or encoding."
    ),
}

SIGN_IN_CODES: Mapping[str, ErrorCode] = {
    "sign_in_failed": ErrorCode(401, "Incorrect name or password."),
    "sign_in_locked": ErrorCode(
        429,
        "Too many failed sign-ins for this name or from this address; `Retry-After` says "
        "when to try again.",
        True,
    ),
    "sign_in_rejected": ErrorCode(
        401,
        "The identity provider's answer is invalid, or belongs to another browser or an earlier "
        "sign-in; the message says why. Sign in again.",
    ),
    "identity_not_mapped": ErrorCode(
        403,
        "The identity provider has authenticated the person, but `oidc_roles` gives none of "
        "the person's groups a role.",
    ),
    "identity_conflict": ErrorCode(
        409,
        "A new user needs an email address that the identity provider has verified and that no "
        "other user of the tenant has; or a user cannot be linked to another user's identity.",
    ),
    "identity_not_found": ErrorCode(404, "The user has no identity at the identity provider."),
    "account_disabled": ErrorCode(403, "The person's user or operator is disabled."),
    "identity_provider_missing": ErrorCode(404, "The server has no identity provider."),
    "identity_provider_unavailable": ErrorCode(
        503, "The identity provider cannot be used now; the message says why.", retryable=True
    ),
    "session_ended": ErrorCode(401, "The session has expired or was ended: sign in again."),
    "session_required": ErrorCode(403, "This requires a session; API keys are not accepted."),
    "confirmation_required": ErrorCode(
        403,
        "Confirm the password again with `POST /v1/session/confirmation`; this is valid for "
        "ten minutes.",
    ),
    "csrf_failed": ErrorCode(
        403,
        "Changes in a session must come from the same origin and send the session's "
        "`csrf_token` as `X-CSRF-Token`.",
    ),
    "insecure_transport": ErrorCode(
        403,
        "Sign-in over plain HTTP is only allowed from localhost: use HTTPS through a proxy "
        "that is in `LORAPLEX_TRUSTED_PROXIES` and sets `X-Forwarded-Proto`.",
    ),
    "invitation_ended": ErrorCode(
        403, "The invitation is invalid, expired or already used: request a new one."
    ),
}

MODEL_CODES: Mapping[str, ErrorCode] = {
    "model_not_found": ErrorCode(
        404, "No such model, adapter, version or alias is available to this key."
    ),
    "adapter_not_ready": ErrorCode(
        409, "The version is still being checked or was rejected; see its `state`."
    ),
    "adapter_loading": ErrorCode(503, "The adapter is still being loaded to the device.", True),
    "adapter_load_failed": ErrorCode(
        503,
        "The adapter's weights could not be loaded to the device. `retryable` is false if "
        "the stored weights are lost or damaged: push the same files again.",
        True,
    ),
    "adapter_too_large": ErrorCode(
        422, "The adapter is larger than the memory reserved for adapters."
    ),
    "invalid_composition": ErrorCode(
        400,
        "A composition has too many adapters, the same version twice, or a weight out of range.",
    ),
    "adapter_not_composable": ErrorCode(
        400,
        "An adapter of the composition has more than LoRA matrices: DoRA, biases, full matrices, "
        "trained or added tokens, a classification head or a draft head. Use it alone.",
    ),
    "adapter_deleted": ErrorCode(404, "The adapter was deleted while the request used it."),
    "quantization_drift": ErrorCode(
        422,
        "With this adapter, the quantized base differs more from the unquantized one than "
        "the operator allows. Push it to a server of the unquantized base, lower alpha, or "
        "train on the quantized base.",
    ),
    "not_a_classifier": ErrorCode(
        400, "The model has no classification head; name an adapter that was trained as one."
    ),
    "not_a_scorer": ErrorCode(
        400, "The model's classification head does not have exactly one label, as scores need."
    ),
    "classifier_only": ErrorCode(
        400,
        "The adapter is a classifier and generates no text; use `/v1/classify`, `/v1/score` or "
        "`/v1/rerank`.",
    ),
    "chat_template_missing": ErrorCode(
        400, "The base model has no chat template; use `/v1/completions`."
    ),
    "numerical_error": ErrorCode(422, "The model's output with this adapter is not finite."),
    "adapter_quarantined": ErrorCode(
        422,
        "The engine repeatedly crashed or computed non-finite values with this version: "
        "check it and push a new one.",
    ),
    "request_cancelled": ErrorCode(
        409, "A user of the tenant or an operator cancelled the request."
    ),
    "request_quarantined": ErrorCode(
        422,
        "The engine crashed while this request ran, and again while it ran alone, or "
        "repeatedly under requests of this tenant. They are refused for ten minutes.",
    ),
}

PLATFORM_CODES: Mapping[str, ErrorCode] = {
    "tenant_not_found": ErrorCode(404, "No such tenant."),
    "tenant_deletion_not_found": ErrorCode(404, "No tenant with this id was deleted."),
    "tenant_exists": ErrorCode(
        409, "A tenant with this slug already exists, or its deletion has not finished."
    ),
    "quota_exceeded": ErrorCode(
        403,
        "The tenant has reached its quota of adapters, versions, stored bytes, keys, "
        "users, files, batches, fine-tuning jobs, golden sets or evaluations; the message says "
        "which. Remove some, or ask "
        "the operator for more.",
    ),
    "key_not_found": ErrorCode(404, "No such API key for this caller."),
    "user_not_found": ErrorCode(404, "No such user of this tenant."),
    "user_exists": ErrorCode(409, "The tenant already has a user with this address."),
    "replica_not_found": ErrorCode(404, "The fleet has no such replica."),
    "operator_not_found": ErrorCode(404, "No such operator."),
    "operator_exists": ErrorCode(409, "An operator with this name already exists."),
    "grant_too_wide": ErrorCode(
        403, "You can only grant permissions that you hold yourself; `param` names the excess."
    ),
    "own_account": ErrorCode(403, "You cannot change your own role or disable yourself."),
    "last_administrator": ErrorCode(
        409,
        "The last active owner of a tenant or administrator of the platform cannot be "
        "disabled or given another role.",
    ),
}

RESOURCE_CODES: Mapping[str, ErrorCode] = {
    "request_not_found": ErrorCode(404, "No such request for this key, or its entry has expired."),
    "file_not_found": ErrorCode(404, "No such file for this key, or it has expired."),
    "file_in_use": ErrorCode(
        409,
        "A batch, fine-tuning job or evaluation that has not ended, or a golden set, uses the "
        "file; the message says which. Cancel or remove it first.",
    ),
    "batch_not_found": ErrorCode(404, "No such batch for this key."),
    "price_not_found": ErrorCode(
        404, "The tenant has no price of its own for this base at that time."
    ),
    "tuning_job_not_found": ErrorCode(404, "No such fine-tuning job for this key."),
    "tuning_disabled": ErrorCode(
        403, "The operator has not turned fine-tuning on for this server (`--tuning`)."
    ),
    "model_not_tunable": ErrorCode(
        400, "Adapters are trained from the base model only; `model` is another name."
    ),
    "golden_set_not_found": ErrorCode(404, "The adapter has no such golden set."),
    "invalid_golden_set": ErrorCode(
        400, "The file is no golden set; the message names the first line that is wrong."
    ),
    "golden_set_in_use": ErrorCode(
        409, "A gate of an alias needs the golden set: remove or change the gate first."
    ),
    "gate_not_found": ErrorCode(404, "The alias has no gate."),
    "gate_not_passed": ErrorCode(
        409,
        "The alias has a gate, and the version has not been evaluated against the alias's present "
        "one. An evaluation was started or runs, unless the message says why not: repeat the "
        "change when it has succeeded.",
    ),
    "gate_refused": ErrorCode(
        409,
        "The alias has a gate, and the version is worse than the alias's present one; the message "
        "names the slices. `override` changes the alias nevertheless.",
    ),
    "evaluation_not_found": ErrorCode(404, "The adapter has no such evaluation."),
    "budget_not_found": ErrorCode(404, "The tenant, user or key has no such budget."),
    "response_not_found": ErrorCode(
        404, "No such stored response for this key, or it has expired."
    ),
    "sampling_forbidden": ErrorCode(403, "The operator allows no samples (`--sample-days 0`)."),
    "sample_not_found": ErrorCode(404, "No such sample for this key, or it has expired."),
    "sample_unreadable": ErrorCode(
        500, "The server no longer has the secret under which the sample is encrypted."
    ),
    "no_samples": ErrorCode(
        409, "No kept sample can be exported: none is of this kind, or all answers are cut off."
    ),
    "webhook_not_found": ErrorCode(404, "No such webhook in this tenant."),
    "webhook_url_invalid": ErrorCode(
        400,
        "The URL of a webhook must be `https://name[:port][/path][?query]`, with a DNS name; the "
        "message says what is wrong.",
    ),
    "webhook_host_not_allowed": ErrorCode(
        403, "The operator has not listed this host and port for webhooks (`--webhook-hosts`)."
    ),
    "conversation_too_large": ErrorCode(
        413, "The stored responses that the request continues have too many bytes."
    ),
    "key_required": ErrorCode(
        403,
        "Batches and evaluations need a tenant's API key: their lines are requests of this key. "
        "The key of an evaluation must have the scope `infer` and not be restricted to adapters.",
    ),
    "adapter_not_found": ErrorCode(404, "No such adapter for this key."),
    "version_not_found": ErrorCode(404, "The adapter has no such version."),
    "alias_not_found": ErrorCode(404, "The adapter has no such alias."),
    "shadow_not_found": ErrorCode(404, "The alias has no shadow."),
    "version_aliased": ErrorCode(409, "An alias points at the version; move or remove it first."),
    "nothing_to_roll_back": ErrorCode(
        409, "The alias had no earlier target, or a version of that target no longer exists."
    ),
    "too_many_pins": ErrorCode(
        409, "The tenant has reached its limit of pinned versions; unpin another one first."
    ),
    "adapter_being_deleted": ErrorCode(
        409, "The same content is being deleted; push it again when that is done.", True
    ),
    "state_conflict": ErrorCode(
        409,
        "The state of the version, upload, batch, fine-tuning job or evaluation does not allow "
        "this.",
    ),
    "upload_not_found": ErrorCode(404, "No such upload for this key."),
    "upload_elsewhere": ErrorCode(
        409, "The upload's bytes are on another server: send it there, or declare it again."
    ),
    "too_many_parts": ErrorCode(
        409,
        "The upload has the most parts that one may have: declare it again, and send larger ones.",
    ),
    "upload_lost": ErrorCode(
        409,
        "The server with the upload's bytes did not return to examine them; push again.",
    ),
    "upload_conflict": ErrorCode(
        409,
        "The offset is not the number of received bytes, or there are too few or too many bytes.",
    ),
    "disk_share_exceeded": ErrorCode(
        429,
        "The tenant's unfinished uploads, or all its adapters, use the tenant's share of the "
        "server's disk: finish or abandon uploads, or delete adapters.",
        True,
    ),
    "digest_mismatch": ErrorCode(422, "The received bytes do not have the declared SHA-256."),
}

SERVER_CODES: Mapping[str, ErrorCode] = {
    "internal_error": ErrorCode(500, "An unexpected error occurred.", True),
    "engine_error": ErrorCode(500, "The engine failed to process this request.", True),
    "engine_restarted": ErrorCode(
        503, "The engine stopped while this request ran; send it again.", True
    ),
    "overloaded": ErrorCode(
        503,
        "The queue is full, or the request cannot finish by its deadline or begin in time for its "
        "TTFT target.",
        True,
    ),
    "too_many_connections": ErrorCode(
        503, "All connections that the server's limit of open files allows are in use.", True
    ),
    "deadline_exceeded": ErrorCode(504, "The request's deadline passed before it finished."),
    "shutting_down": ErrorCode(503, "The server is shutting down; use another one.", True),
    "engine_unavailable": ErrorCode(503, "The engine is starting or down.", True),
    "database_unavailable": ErrorCode(503, "The database did not answer in time.", True),
    "stale_extent": ErrorCode(503, "The adapter moved while the request ran; send it again.", True),
    "intake_unavailable": ErrorCode(
        503,
        "The server could not examine the adapter. The uploaded bytes are kept: commit the "
        "upload again.",
        True,
    ),
    "storage_full": ErrorCode(
        507,
        "The server's disk is full: the remaining space is reserved for the database. The "
        "uploaded bytes are kept.",
        True,
    ),
    "store_unavailable": ErrorCode(503, "The adapter store did not answer in time.", True),
    "store_denied": ErrorCode(
        503, "The adapter store denies this server access; the operator must fix it."
    ),
}

REJECTION_CODES: Mapping[str, ErrorCode] = {
    reason: ErrorCode(422, f"{rejection.meaning} {rejection.way_out}")
    for reason, rejection in REJECTIONS.items()
}

BASE_CODES: Mapping[str, str] = {error.code: str(error.__doc__) for error in BASE_ERRORS}
"""For base models that `loraplex serve` refuses: its `Error:` line ends with one of them."""

TUNING_CODES: Mapping[str, str] = {
    "file_not_found": "A file of the job cannot be read.",
    "invalid_training_data": "A line of the training or validation file is wrong; the message says "
    "which, and `param` in which file.",
    "invalid_recipe": "The base cannot be trained with these settings of `lora` or `method`.",
    "base_not_tunable": "Adapters for this base or quantization cannot be trained.",
    "out_of_memory": "A step needs more memory than there is: use a smaller `batch_size`, "
    "`lora.max_tokens` or `lora.rank`.",
    "training_failed": "The trainer reported another error, or ended without a result and was "
    "restarted too often.",
}
"""For `error.code` of fine-tuning jobs that have failed."""

EVALUATION_CODES: Mapping[str, str] = {
    "file_not_found": "The file of the golden set, or of the answers, cannot be read.",
    "invalid_golden_set": "The file is no golden set; the message names the line.",
    "requests_failed": "Requests have failed; the message names the first error, and the file with "
    "all of them.",
    "batch_not_completed": "A batch of the evaluation was cancelled, has expired or is gone.",
    "quota_exceeded": "The tenant may have no more files or batches.",
    "scoring_failed": "The scores took more processor time or memory than allowed: simplify the "
    "schemas of the set, or divide it.",
}
"""For `error.code` of evaluations that have failed."""

START_CODES: Mapping[str, str] = {
    ConfinementMissing.code: "`--require-confinement` is set, but namespaces, Landlock or limits "
    "are not in force for examinations. The message names what is missing and what to do.",
}
"""For machines on which `loraplex serve` does not start: its `Error:` line ends with one of
them."""

LINK_CODES: Mapping[str, str] = {error.code: str(error.__doc__) for error in LINK_ERRORS}
"""For connections between machines, whose ends log one of them."""

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
    "Sign-in": SIGN_IN_CODES,
    "The requested model": MODEL_CODES,
    "Adapters, versions, uploads, files, batches and jobs": RESOURCE_CODES,
    "Tenants, users, keys and quotas": PLATFORM_CODES,
    "The server": SERVER_CODES,
    "Why an adapter is rejected": REJECTION_CODES,
}

_INTRODUCTION = """\
# Error codes

Every error response, and the last event of a failed stream, is one object:

```json
{"error": {"message": "...", "type": "...", "param": null, "code": "...", "retryable": false,
           "request_id": "req-..."}}
```

`code` is one of the codes below, `param` the field or tensor at fault. `retryable` says whether the
same request may succeed later; the header `x-should-retry` tells the official clients, and
`retry-after-ms` says when. A stream ends in `data: [DONE]` only if it succeeded.

This page is generated by `python -m loraplex.api.contract.error_codes`.
"""


_BASE_INTRODUCTION = """
## Why a base model is refused

`loraplex serve` checks the base model, a draft model and the reference base before it serves. It
stops with exit status 2 and one `Error:` line, which ends with a code.

| code | meaning |
|---|---|
"""

_START_INTRODUCTION = """
## Why a server does not start

The server stops with exit status 1 and one `Error:` line that ends with the code.

| code | meaning |
|---|---|
"""

_TUNING_INTRODUCTION = """
## Why a fine-tuning job fails

`error.code` of a job that has failed is one of these codes, or the code with which the resulting
adapter was refused.

| code | meaning |
|---|---|
"""

_EVALUATION_INTRODUCTION = """
## Why an evaluation fails

`error.code` of an evaluation that has failed is one of these codes.

| code | meaning |
|---|---|
"""

_LINK_INTRODUCTION = """
## Why a connection between machines is refused or ends

An API server and the agent of an engine on another machine log the code. Requests are not answered
with it.

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
        + "".join(_meaning_rows(BASE_CODES))
        + _TUNING_INTRODUCTION
        + "".join(_meaning_rows(TUNING_CODES))
        + _EVALUATION_INTRODUCTION
        + "".join(_meaning_rows(EVALUATION_CODES))
        + _START_INTRODUCTION
        + "".join(_meaning_rows(START_CODES))
        + _LINK_INTRODUCTION
        + "".join(_meaning_rows(LINK_CODES))
    )


def _meaning_rows(codes: Mapping[str, str]) -> Iterator[str]:
    for code, meaning in codes.items():
        yield f"| `{code}` | {' '.join(meaning.split())} |\n"


def _table_rows(codes: Mapping[str, ErrorCode]) -> Iterator[str]:
    for code, published in codes.items():
        retry = "yes" if published.retryable else "no"
        yield f"| `{code}` | {published.status} | {retry} | {published.meaning} |\n"


if __name__ == "__main__":
    sys.stdout.write(error_reference())
