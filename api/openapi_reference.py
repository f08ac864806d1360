"""Prints `docs/openapi.json`: `python -m loraplex.api.openapi_reference`."""

from __future__ import annotations

import sys

from .app import create_app
from .http.openapi import openapi_json

if __name__ == "__main__":
    sys.stdout.buffer.write(openapi_json(create_app(None)))  # type: ignore[arg-type]
