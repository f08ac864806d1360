"""A browser user: a session's cookie, and the headers that a console page sends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from support.secrets_scan import MARK
from support.server import Caller, ServerUnderTest

PASSWORD = f"{MARK} horse battery"
"""Of everybody in tests: it must be found in no log and no database."""
COOKIE = "loraplex_session"


class Browser:
    """Signs in and calls the API as the console's pages do."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, headers={"origin": url}, timeout=60.0)

    def sign_in(
        self, name: str, tenant: str | None = None, password: str = PASSWORD
    ) -> httpx.Response:
        body = {"name": name, "password": password, "tenant": tenant}
        return self._begin(self.http.post("/v1/session", json=body))

    def enrol(self, token: str, password: str = PASSWORD) -> httpx.Response:
        body = {"token": token, "password": password}
        return self._begin(self.http.post("/v1/session/enrolment", json=body))

    def confirm(self) -> None:
        answer = self.http.post("/v1/session/confirmation", json={"password": PASSWORD})
        answer.raise_for_status()

    @property
    def headers(self) -> dict[str, str]:
        """What makes a request one of this browser's."""
        token = self.http.cookies[COOKIE]
        sent = {name: self.http.headers[name] for name in ("origin", "x-csrf-token")}
        return {"cookie": f"{COOKIE}={token}", **sent}

    def _begin(self, answer: httpx.Response) -> httpx.Response:
        if answer.is_success:
            self.http.headers["x-csrf-token"] = answer.json()["csrf_token"]
        return answer


@contextmanager
def signed_in_operator(server: ServerUnderTest, name: str, key: str) -> Iterator[Browser]:
    """The operator of this name and key, at a browser."""
    with _enrolled(server, f"/admin/operators/{name}/invitation", key) as browser:
        yield browser


@contextmanager
def signed_in_user(
    server: ServerUnderTest, caller: Caller, role: str, *, name: str | None = None
) -> Iterator[Browser]:
    """A new user of the caller's tenant, at a browser. `name`: before the address's '@'."""
    body = {"email": f"{name or role}@{caller.slug}.example", "role": role}
    user: dict[str, Any] = caller.http.post("/v1/users", json=body).json()
    with _enrolled(server, f"/v1/users/{user['id']}/invitation", caller.key) as browser:
        yield browser


@contextmanager
def _enrolled(server: ServerUnderTest, path: str, key: str) -> Iterator[Browser]:
    headers = {"authorization": f"Bearer {key}"}
    invitation = httpx.post(f"{server.url}{path}", headers=headers)
    assert invitation.status_code == 201, invitation.text
    browser = Browser(server.url)
    with browser.http:
        assert browser.enrol(invitation.json()["token"]).is_success
        yield browser
