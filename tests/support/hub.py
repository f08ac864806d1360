"""A stand-in for the Hugging Face Hub: the routes that huggingface_hub asks for one repository."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_token_of_the_caller"


class Hub:
    """Repositories by name, each with files by path. `private` needs `TOKEN`."""

    def __init__(self) -> None:
        self.repositories: dict[str, Mapping[str, bytes]] = {}
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.requests: list[str] = []
        self.is_down = False

    def answer(self, path: str, authorization: str | None) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body."""
        self.requests.append(path)
        if self.is_down:
            return 503, {}, b""
        if path == "/api/models":
            return _json([{"id": name} for name in sorted(self.repositories)])
        head, is_file, file = path.partition("/resolve/")
        name = head.removeprefix("/api/models/").strip("/")
        name, _, rest = name.partition("/revision/")
        name, has_refs, _ = name.partition("/refs")
        if name not in self.repositories or (
            name in self.private and authorization != f"Bearer {TOKEN}"
        ):
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        if name in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        if has_refs:
            branches = [{"name": "main", "ref": "refs/heads/main", "targetCommit": COMMIT}]
            return _json({"branches": branches, "converts": [], "tags": []})
        revision = file.partition("/")[0] if is_file else rest
        if revision not in ("", "main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        files = self.repositories[name]
        if not is_file:
            siblings = [{"rfilename": path} for path in files]
            return _json({"id": name, "sha": COMMIT, "siblings": siblings})
        wanted = file.partition("/")[2]
        if wanted not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        headers = {"ETag": f'"{hash(files[wanted]):x}"', "X-Repo-Commit": COMMIT}
        return 200, headers, files[wanted]


@contextmanager
def emulated_hub() -> Iterator[tuple[str, Hub]]:
    """The endpoint of a hub in this process, until the block is left."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(has_body=False)

        def do_GET(self) -> None:
            self._answer(has_body=True)

        def _answer(self, *, has_body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            status, headers, body = hub.answer(path, self.headers["authorization"])
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if has_body:
                self.wfile.write(body)

        def log_message(self, *_arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _json(content: Any) -> tuple[int, Mapping[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(content).encode()
