"""Serves the console's pages below `/console/`, from a bundle in the package.

The files contain no user data; pages load their data from the API.
"""

from __future__ import annotations

import gzip
import mimetypes
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from ..contract.errors import ApiError
from .error_responses import error_response

BUNDLE = Path(__file__).parents[1] / "static" / "console"
HOME = "/console/"
INDEX = "index.html"
ASSETS = "assets/"
"""Files whose names contain a hash of their content."""
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
IMMUTABLE = "public, max-age=31536000, immutable"
NO_STORE = "no-store"


class _File:
    """One file of the bundle."""

    def __init__(self, name: str, path: Path) -> None:
        self.media_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
        self.cache_control = IMMUTABLE if name.startswith(ASSETS) else NO_STORE
        self._path = path

    @cached_property
    def content(self) -> bytes:
        return self._path.read_bytes()

    @cached_property
    def compressed(self) -> bytes | None:
        """None where that saves nothing: images and fonts are compressed already."""
        packed = gzip.compress(self.content, mtime=0)
        return packed if len(packed) < len(self.content) else None


class ConsoleFiles:
    """The bundle's files by name. Other names are not looked up on disk."""

    def __init__(self, folder: Path = BUNDLE) -> None:
        self._files: Mapping[str, _File] = {
            name: _File(name, path)
            for path in sorted(folder.rglob("*"))
            if path.is_file() and (name := path.relative_to(folder).as_posix())
        }

    @property
    def routes(self) -> list[BaseRoute]:
        return [
            Route("/", self._redirect),
            Route("/console", self._redirect),
            Route("/console/{name:path}", self._answer),
        ]

    async def _redirect(self, request: Request) -> Response:
        """Redirects browsers to the console; other clients get the normal error."""
        if "text/html" not in request.headers.get("accept", ""):
            return error_response(request, ApiError("not_found"))
        return RedirectResponse(HOME, status_code=307)

    async def _answer(self, request: Request) -> Response:
        name = request.path_params["name"]
        is_page = not name.startswith(ASSETS)
        # Below the home every path is a page of the console, which finds its own way.
        file = self._files.get(name) or (self._files.get(INDEX) if is_page else None)
        if file is None:
            return error_response(request, ApiError("not_found"))
        headers = {
            "content-security-policy": CONTENT_SECURITY_POLICY,
            "cache-control": file.cache_control,
            "vary": "accept-encoding",
        }
        content = file.content
        if "gzip" in request.headers.get("accept-encoding", "") and file.compressed is not None:
            content = file.compressed
            headers["content-encoding"] = "gzip"
        return Response(content, headers=headers, media_type=file.media_type)
