"""The access table: who may call which route. Written by hand; a route that is missing fails.

The declarations in the code are compared with it, and it is never generated from them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from loraplex.platform.keys.principal import Scope


class Kind(Enum):
    """Whose a route is."""

    OPEN = "open"
    """Nobody's: answered without a key."""
    ANY = "any"
    """Of everybody with a valid key."""
    TENANT = "tenant"
    """A tenant's own resource: of its keys with the scope, and of operators who name the tenant."""
    OPERATOR = "operator"
    """Of operators who act on no tenant."""
    ADMINISTRATOR = "administrator"
    """Of those among them who may change something."""
    SESSION = "session"
    """Of whoever is signed in, whatever they may do."""


class Access(NamedTuple):
    kind: Kind
    scope: Scope | None = None


OPEN = Access(Kind.OPEN)
ANY = Access(Kind.ANY)
INFER = Access(Kind.TENANT, Scope.INFER)
READ = Access(Kind.TENANT, Scope.ADAPTERS_READ)
WRITE = Access(Kind.TENANT, Scope.ADAPTERS_WRITE)
USAGE = Access(Kind.TENANT, Scope.USAGE_READ)
AUDIT = Access(Kind.TENANT, Scope.AUDIT_READ)
KEYS = Access(Kind.TENANT, Scope.KEYS_MANAGE)
USERS = Access(Kind.TENANT, Scope.USERS_MANAGE)
WEBHOOKS_READ = Access(Kind.TENANT, Scope.WEBHOOKS_READ)
WEBHOOKS_WRITE = Access(Kind.TENANT, Scope.WEBHOOKS_WRITE)
SAMPLES_READ = Access(Kind.TENANT, Scope.SAMPLES_READ)
SAMPLES_WRITE = Access(Kind.TENANT, Scope.SAMPLES_WRITE)
OPERATOR = Access(Kind.OPERATOR)
ADMINISTRATOR = Access(Kind.ADMINISTRATOR)
SESSION = Access(Kind.SESSION)

ROUTES: Mapping[str, Access] = {
    "GET /health": OPEN,
    "GET /ready": OPEN,
    "GET /metrics": OPEN,
    "GET /openapi.json": OPEN,
    "POST /v1/session": OPEN,
    "POST /v1/session/enrolment": OPEN,
    "GET /v1/session/oidc": OPEN,
    "POST /v1/session/oidc": OPEN,
    "POST /v1/session/oidc/callback": OPEN,
    "GET /v1/session/oidc/sign-out": SESSION,
    "GET /v1/session": SESSION,
    "POST /v1/session/confirmation": SESSION,
    "POST /v1/session/password": SESSION,
    "DELETE /v1/session": SESSION,
    "DELETE /v1/sessions": SESSION,
    "GET /v1/me": ANY,
    "POST /v1/chat/completions": INFER,
    "POST /v1/completions": INFER,
    "POST /v1/responses": INFER,
    "GET /v1/responses/{response_id}": INFER,
    "DELETE /v1/responses/{response_id}": INFER,
    "GET /v1/responses/{response_id}/input_items": INFER,
    "GET /v1/stored-responses": AUDIT,
    "POST /v1/messages": INFER,
    "POST /v1/messages/count_tokens": INFER,
    "POST /v1/embeddings": INFER,
    "POST /v1/classify": INFER,
    "POST /classify": INFER,
    "POST /v1/score": INFER,
    "POST /score": INFER,
    "POST /v1/rerank": INFER,
    "POST /v2/rerank": INFER,
    "POST /rerank": INFER,
    "POST /v1/files": INFER,
    "GET /v1/files": INFER,
    "GET /v1/files/{file_id}": INFER,
    "GET /v1/files/{file_id}/content": INFER,
    "DELETE /v1/files/{file_id}": INFER,
    "POST /v1/batches": INFER,
    "GET /v1/batches": INFER,
    "GET /v1/batches/{batch_id}": INFER,
    "POST /v1/batches/{batch_id}/cancel": INFER,
    "GET /v1/adapters/{name}/golden-sets": READ,
    "GET /v1/adapters/{name}/golden-sets/{golden_set}": READ,
    "PUT /v1/adapters/{name}/golden-sets/{golden_set}": WRITE,
    "DELETE /v1/adapters/{name}/golden-sets/{golden_set}": WRITE,
    "GET /v1/adapters/{name}/aliases/{alias}/gate": READ,
    "PUT /v1/adapters/{name}/aliases/{alias}/gate": WRITE,
    "DELETE /v1/adapters/{name}/aliases/{alias}/gate": WRITE,
    "POST /v1/adapters/{name}/evaluations": WRITE,
    "GET /v1/adapters/{name}/evaluations": READ,
    "GET /v1/adapters/{name}/evaluations/{evaluation_id}": READ,
    "POST /v1/adapters/{name}/evaluations/{evaluation_id}/cancel": WRITE,
    "POST /v1/fine_tuning/jobs": WRITE,
    "GET /v1/fine_tuning/jobs": READ,
    "GET /v1/fine_tuning/jobs/{job_id}": READ,
    "GET /v1/fine_tuning/jobs/{job_id}/events": READ,
    "GET /v1/fine_tuning/jobs/{job_id}/checkpoints": READ,
    "POST /v1/fine_tuning/jobs/{job_id}/cancel": WRITE,
    "POST /v1/fine_tuning/jobs/{job_id}/pause": WRITE,
    "POST /v1/fine_tuning/jobs/{job_id}/resume": WRITE,
    "POST /tokenize": INFER,
    "POST /detokenize": INFER,
    "GET /v1/models": INFER,
    "GET /v1/models/{model}": INFER,
    "POST /v1/load_lora_adapter": WRITE,
    "POST /v1/unload_lora_adapter": WRITE,
    "GET /v1/base": READ,
    "GET /v1/base/layout": READ,
    "GET /v1/adapters": READ,
    "GET /v1/adapters/{name}": READ,
    "DELETE /v1/adapters/{name}": WRITE,
    "GET /v1/adapters/{name}/deletions": READ,
    "GET /v1/adapters/{name}/versions": READ,
    "GET /v1/adapters/{name}/versions/{number}": READ,
    "DELETE /v1/adapters/{name}/versions/{number}": WRITE,
    "GET /v1/adapters/{name}/versions/{number}/history": READ,
    "GET /v1/adapters/{name}/versions/{number}/readiness": READ,
    "GET /v1/adapters/{name}/versions/{number}/files/{file}": READ,
    "PUT /v1/adapters/{name}/versions/{number}/pin": WRITE,
    "DELETE /v1/adapters/{name}/versions/{number}/pin": WRITE,
    "POST /v1/adapters/{name}/versions/{number}/prefetch": WRITE,
    "GET /v1/adapters/{name}/aliases": READ,
    "GET /v1/adapters/{name}/aliases/{alias}": READ,
    "PUT /v1/adapters/{name}/aliases/{alias}": WRITE,
    "DELETE /v1/adapters/{name}/aliases/{alias}": WRITE,
    "GET /v1/adapters/{name}/aliases/{alias}/history": READ,
    "POST /v1/adapters/{name}/aliases/{alias}/rollback": WRITE,
    "GET /v1/adapters/{name}/sampling": READ,
    "PUT /v1/adapters/{name}/sampling": SAMPLES_WRITE,
    "DELETE /v1/adapters/{name}/sampling": SAMPLES_WRITE,
    "GET /v1/adapters/{name}/samples": SAMPLES_READ,
    "DELETE /v1/adapters/{name}/samples": SAMPLES_WRITE,
    "POST /v1/adapters/{name}/samples/export": SAMPLES_READ,
    "GET /v1/adapters/{name}/samples/{sample_id}": SAMPLES_READ,
    "DELETE /v1/adapters/{name}/samples/{sample_id}": SAMPLES_WRITE,
    "GET /v1/adapters/{name}/aliases/{alias}/shadow": READ,
    "PUT /v1/adapters/{name}/aliases/{alias}/shadow": WRITE,
    "DELETE /v1/adapters/{name}/aliases/{alias}/shadow": WRITE,
    "POST /v1/adapters/{name}/uploads": WRITE,
    "GET /v1/uploads": WRITE,
    "DELETE /v1/uploads/{upload_id}": WRITE,
    "GET /v1/uploads/{upload_id}": WRITE,
    "PUT /v1/uploads/{upload_id}/content": WRITE,
    "POST /v1/uploads/{upload_id}/commit": WRITE,
    "GET /v1/keys": KEYS,
    "POST /v1/keys": KEYS,
    "GET /v1/keys/{key_id}": KEYS,
    "DELETE /v1/keys/{key_id}": KEYS,
    "POST /v1/keys/{key_id}/rotate": KEYS,
    "GET /v1/users": USERS,
    "POST /v1/users": USERS,
    "GET /v1/users/{user_id}": USERS,
    "PATCH /v1/users/{user_id}": USERS,
    "POST /v1/users/{user_id}/invitation": USERS,
    "GET /v1/users/{user_id}/identity": USERS,
    "PUT /v1/users/{user_id}/identity": USERS,
    "DELETE /v1/users/{user_id}/identity": USERS,
    "GET /v1/webhooks": WEBHOOKS_READ,
    "POST /v1/webhooks": WEBHOOKS_WRITE,
    "GET /v1/webhooks/{webhook_id}": WEBHOOKS_READ,
    "PATCH /v1/webhooks/{webhook_id}": WEBHOOKS_WRITE,
    "DELETE /v1/webhooks/{webhook_id}": WEBHOOKS_WRITE,
    "POST /v1/webhooks/{webhook_id}/rotate": WEBHOOKS_WRITE,
    "POST /v1/webhooks/{webhook_id}/test": WEBHOOKS_WRITE,
    "GET /v1/webhooks/{webhook_id}/deliveries": WEBHOOKS_READ,
    "GET /v1/overview": USAGE,
    "GET /v1/memory": READ,
    "GET /v1/quota": USAGE,
    "GET /v1/usage": USAGE,
    "GET /v1/usage/requests/{request_id}": USAGE,
    "GET /v1/requests": USAGE,
    "GET /v1/requests/live": USAGE,
    "GET /v1/requests/{request_id}": USAGE,
    "DELETE /v1/requests/{request_id}": INFER,
    "GET /v1/budgets": USAGE,
    "GET /v1/keys/{key_id}/limits": KEYS,
    "PUT /v1/keys/{key_id}/limits": KEYS,
    "PUT /v1/keys/{key_id}/budgets/{period}": KEYS,
    "DELETE /v1/keys/{key_id}/budgets/{period}": KEYS,
    "GET /v1/users/{user_id}/limits": USERS,
    "PUT /v1/users/{user_id}/limits": USERS,
    "PUT /v1/users/{user_id}/budgets/{period}": USERS,
    "DELETE /v1/users/{user_id}/budgets/{period}": USERS,
    "GET /v1/audit": AUDIT,
    "GET /admin/overview": OPERATOR,
    "GET /admin/memory": OPERATOR,
    "GET /admin/settings": OPERATOR,
    "GET /admin/readiness": OPERATOR,
    "GET /admin/adapters": OPERATOR,
    "GET /admin/audit": OPERATOR,
    "GET /admin/audit/verification": OPERATOR,
    "GET /admin/usage": OPERATOR,
    "GET /admin/servers": OPERATOR,
    "GET /admin/replicas": OPERATOR,
    "POST /admin/replicas": ADMINISTRATOR,
    "DELETE /admin/replicas/{replica_id}": ADMINISTRATOR,
    "POST /admin/replicas/{replica_id}/drain": ADMINISTRATOR,
    "POST /admin/replicas/{replica_id}/resume": ADMINISTRATOR,
    "GET /admin/residency": OPERATOR,
    "GET /admin/requests": OPERATOR,
    "GET /admin/requests/live": OPERATOR,
    "GET /admin/requests/{request_id}": OPERATOR,
    "GET /admin/tenants": OPERATOR,
    "POST /admin/tenants": ADMINISTRATOR,
    "GET /admin/tenants/{slug}": OPERATOR,
    "PATCH /admin/tenants/{slug}": ADMINISTRATOR,
    "DELETE /admin/tenants/{slug}": ADMINISTRATOR,
    "GET /admin/tenant-deletions": OPERATOR,
    "GET /admin/tenant-deletions/{tenant_id}": OPERATOR,
    "GET /admin/tenants/{slug}/quota": OPERATOR,
    "PUT /admin/tenants/{slug}/quota": ADMINISTRATOR,
    "GET /admin/tenants/{slug}/budgets": OPERATOR,
    "PUT /admin/tenants/{slug}/budgets/{period}": ADMINISTRATOR,
    "DELETE /admin/tenants/{slug}/budgets/{period}": ADMINISTRATOR,
    "GET /admin/prices": OPERATOR,
    "POST /admin/prices": ADMINISTRATOR,
    "POST /admin/prices/end": ADMINISTRATOR,
    "GET /admin/operators": OPERATOR,
    "POST /admin/operators": ADMINISTRATOR,
    "GET /admin/operators/{name}": OPERATOR,
    "PATCH /admin/operators/{name}": ADMINISTRATOR,
    "POST /admin/operators/{name}/invitation": ADMINISTRATOR,
    "GET /admin/operators/{name}/identity": OPERATOR,
    "PUT /admin/operators/{name}/identity": ADMINISTRATOR,
    "DELETE /admin/operators/{name}/identity": ADMINISTRATOR,
    "GET /admin/operators/{name}/keys": OPERATOR,
    "POST /admin/operators/{name}/keys": ADMINISTRATOR,
    "DELETE /admin/operators/{name}/keys/{key_id}": ADMINISTRATOR,
}

MISSING = {
    "name": "no-such-name",
    "number": "1",
    "alias": "none",
    "file": "adapter_config.json",
    "upload_id": "0" * 36,
    "file_id": "file-" + "0" * 32,
    "batch_id": "batch_" + "0" * 32,
    "job_id": "ftjob-" + "0" * 32,
    "golden_set": "none",
    "evaluation_id": "eval-" + "0" * 32,
    "response_id": "resp_req-" + "0" * 24,
    "webhook_id": "whk_" + "0" * 32,
    "sample_id": "smp_" + "0" * 32,
    "model": "no-such-model",
    "key_id": "0" * 12,
    "user_id": "0" * 36,
    "replica_id": "0" * 36,
    "request_id": "req-" + "0" * 24,
    "slug": "no-such-tenant",
    "tenant_id": "0" * 36,
    "period": "month",
}
"""Something that nobody has, for each parameter of a path."""


def concrete(path: str, values: Mapping[str, str]) -> str:
    """The path with these values in the place of its parameters."""
    return re.sub(r"\{(\w+)\}", lambda match: values[match[1]], path)
