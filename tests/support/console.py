"""A console user: a signed-in browser page that watches for forbidden behaviour."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, Page, Request, expect

from support.chromium import WIDE
from support.seeded import Seeded

PAGES = {
    "overview": "/",
    "adapters": "/adapters",
    "adapter": "/adapters/acme/assistant",
    "fine-tuning": "/fine-tuning",
    "memory": "/memory",
    "replicas": "/replicas",
    "requests": "/requests",
    "tenants": "/tenants",
    "tenant": "/tenants/acme",
    "users": "/users",
    "keys": "/keys",
    "webhooks": "/webhooks",
    "usage": "/usage",
    "prices": "/prices",
    "playground": "/playground",
    "audit": "/audit",
    "settings": "/settings",
}
"""Every page of somebody who is signed in, where the seeded server has something to show."""
PASSWORD = "correct horse battery staple"
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(`${event.violatedDirective}: ${event.blockedURI} ${event.sample}`));
"""


OVERHANG = """
[document.documentElement, ...document.querySelectorAll(".table-wrap")]
  .reduce((most, element) => Math.max(most, element.scrollWidth - element.clientWidth), 0)
"""


@dataclass
class Visitor:
    """One page, and what went wrong on it."""

    page: Page
    url: str
    """Of the server, without a trailing slash."""
    faults: list[str] = field(default_factory=list)
    """Dialogs, uncaught errors, requests to others: a healthy console causes none."""

    def __post_init__(self) -> None:
        self.page.add_init_script(WATCH)
        self.page.on("dialog", lambda dialog: self._dismiss(dialog))
        self.page.on("pageerror", lambda error: self.faults.append(f"uncaught: {error}"))
        self.page.on("request", self._check_request)

    def open(self, route: str) -> None:
        """Go to a page of the console, and wait until it has shown what it asked for."""
        self.page.goto(f"{self.url}/console{route}")
        self.settle()

    def pick(self, tenant: str | None) -> None:
        """As an operator, look at one tenant from now on, or at all of them."""
        change = "setItem('loraplex.tenant', slug)" if tenant else "removeItem('loraplex.tenant')"
        self.page.evaluate(f"slug => sessionStorage.{change}", tenant)

    def settle(self) -> None:
        """Wait until nothing is on its way and no part of the page says that it loads."""
        self.page.locator("main").wait_for()
        expect(self.page.locator("[aria-busy=true], .loading")).to_have_count(0, timeout=15_000)

    def overhang(self) -> int:
        """By how many pixels the page, or a table on it, is wider than what is in sight."""
        pixels: int = self.page.evaluate(OVERHANG)
        return pixels

    def go(self, link: str) -> None:
        """Follow a link of the navigation."""
        places = self.page.get_by_role("navigation", name="Pages")
        places.get_by_role("link", name=link, exact=True).click()
        self.settle()

    def executed(self) -> list[str]:
        """What ran, or tried to, on the page that is open, and all faults so far."""
        ran = self.page.evaluate("window.executed === undefined ? [] : ['window.executed is set']")
        violations = self.page.evaluate("window.violations")
        return [*ran, *violations, *self.faults]

    def _dismiss(self, dialog: object) -> None:
        self.faults.append(f"dialog: {dialog}")
        dialog.dismiss()  # type: ignore[attr-defined]

    def _check_request(self, request: Request) -> None:
        asked = urlsplit(request.url)
        if f"{asked.scheme}://{asked.netloc}" != self.url and asked.scheme not in ("data", "blob"):
            self.faults.append(f"foreign request: {request.url}")


@contextmanager
def visiting(
    browser: Browser, url: str, *, dark: bool = False, viewport: dict[str, int] = WIDE
) -> Iterator[Visitor]:
    """A visitor with no cookie."""
    scheme = "dark" if dark else "light"
    context = browser.new_context(
        viewport=viewport,  # type: ignore[arg-type]
        color_scheme=scheme,  # type: ignore[arg-type]
        reduced_motion="reduce",
        locale="en-GB",
        timezone_id="UTC",
    )
    context.set_default_timeout(15_000)
    try:
        yield Visitor(context.new_page(), url)
    finally:
        context.close()


def invite_operator(seeded: Seeded, name: str = "root") -> str:
    """A one-time token for an operator."""
    token: str = seeded.change("POST", f"/admin/operators/{name}/invitation")["token"]
    return token


def invite_user(seeded: Seeded, tenant: str, email: str) -> str:
    """A one-time token for a tenant's user."""
    users = seeded.admin.get(
        "/v1/users", params={"email": email}, headers={"x-loraplex-tenant": tenant}
    )
    (user,) = users.json()["data"]
    path = f"/v1/users/{user['id']}/invitation"
    token: str = seeded.change("POST", path, tenant=tenant)["token"]
    return token


def enrol(context: BrowserContext, url: str, token: str) -> None:
    """Give the context the cookie of somebody who was invited, without the page for it."""
    answer = context.request.post(
        f"{url}/v1/session/enrolment",
        data={"token": token, "password": PASSWORD},
        headers={"origin": url},
    )
    assert answer.ok, answer.text()


def confirm_if_asked(page: Page) -> None:
    """Type the password where no secret is shown without it; its field has the focus."""
    asked = page.get_by_role("heading", name="Confirm your identity")
    asked.or_(page.locator("[data-secret]")).first.wait_for()
    if asked.is_visible():
        expect(page.get_by_label("Password", exact=True)).to_be_focused()
        page.keyboard.type(PASSWORD)
        page.keyboard.press("Enter")
