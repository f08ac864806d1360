"""The committed OpenAPI document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PRINTED = Path(__file__).parents[2] / "docs" / "openapi.json"
DOCUMENT: dict[str, Any] = json.loads(PRINTED.read_text())
OPEN = {
    *("GET /health", "GET /ready", "GET /metrics", "GET /openapi.json"),
    *("POST /v1/session", "POST /v1/session/enrolment"),
    *("GET /v1/session/oidc", "POST /v1/session/oidc", "POST /v1/session/oidc/callback"),
}
"""What is answered without a key."""
