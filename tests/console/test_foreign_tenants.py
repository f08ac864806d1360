"""A tenant's user gets nothing of another tenant on any page, whatever address is typed."""

from __future__ import annotations

import pytest
from playwright.sync_api import Response

from support.console import PAGES, Visitor
from support.seeded import PUSHES, Seeded

FOREIGN = ("globex", "initech")
SECRETS = ("Globex", "Initech", "pirate", "globex.example", "initech.example")
"""What a user of `acme` could only know from an answer: names that are in no address below."""


@pytest.fixture
def answers(owner: Visitor) -> list[Response]:
    """What the API answered on the pages since."""
    kept: list[Response] = []

    def keep(response: Response) -> None:
        if "/console/" not in response.url:
            kept.append(response)

    owner.page.on("response", keep)
    yield kept
    owner.page.remove_listener("response", keep)


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize("name", PAGES)
def test_no_page_shows_or_fetches_anything_of_another_tenant(
    owner: Visitor, seeded: Seeded, answers: list[Response], name: str, foreign: str
) -> None:
    """With the other tenant in the address, in the query and as the one that was picked."""
    owner.open("/")
    owner.pick(foreign)
    owner.open(PAGES[name].replace("acme", foreign) + f"?tenant={foreign}")
    told = "\n".join(answer.text() for answer in answers if answer.status != 204)
    shown = owner.page.locator("body").inner_text()
    hidden = (*SECRETS, seeded.callers[foreign].tenant_id)
    assert [word for word in hidden if word in told or word in shown] == []
    assert owner.executed() == []


def test_the_api_refuses_the_session_what_is_not_its_tenants(
    owner: Visitor, seeded: Seeded
) -> None:
    """What the pages do not offer, asked for by hand with the same cookie."""
    request = owner.page.context.request
    own = {"origin": seeded.server.url}
    for path in ("/admin/tenants", "/admin/overview", "/admin/memory", "/admin/settings"):
        assert request.get(seeded.server.url + path, headers=own).status == 403
    for slug, _, name in PUSHES:
        if slug == "acme":
            continue
        foreign = {**own, "x-loraplex-tenant": slug}
        answer = request.get(f"{seeded.server.url}/v1/adapters/{name}", headers=foreign)
        assert answer.status in (403, 404)
