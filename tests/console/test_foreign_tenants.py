"""A tenant's user sees nothing of another tenant on any page, whatever URL is entered."""

from __future__ import annotations

import pytest
from playwright.sync_api import Response

from support.console import PAGES, Visitor
from support.seeded import PUSHES, Seeded

FOREIGN = "globex"
SECRETS = ("Globex", "pirate", "globex.example")
"""What a user of `acme` could only know from an answer: names that are in no address below."""


@pytest.fixture(scope="module")
def trespasser(owner: Visitor) -> Visitor:
    """The owner of `acme`, whose browser was told that `globex` was picked."""
    owner.open("/")
    owner.pick(FOREIGN)
    return owner


@pytest.mark.parametrize("name", PAGES)
def test_no_page_shows_or_fetches_anything_of_another_tenant(
    trespasser: Visitor, seeded: Seeded, name: str
) -> None:
    """With the other tenant in the address, in the query and as the one that was picked."""
    answers: list[Response] = []

    def keep(response: Response) -> None:
        answers.append(response)

    # An answer to the page before could still come, and its body is gone with that page.
    trespasser.page.goto("about:blank")
    trespasser.page.on("response", keep)
    trespasser.open(PAGES[name].replace("acme", FOREIGN) + f"?tenant={FOREIGN}")
    trespasser.page.remove_listener("response", keep)
    told = "\n".join(answer.text() for answer in answers if "/console/" not in answer.url)
    shown = trespasser.page.locator("main").inner_text()
    hidden = (*SECRETS, seeded.callers[FOREIGN].tenant_id)
    assert "object" in told or "tenant_not_found" in told
    assert [word for word in hidden if word in told or word in shown] == []
    assert trespasser.executed() == []


def test_no_adapter_of_ones_own_is_shown_under_anothers_name(trespasser: Visitor) -> None:
    """`assistant` is `acme`'s: at the other's address it would be changed in that one's place."""
    with trespasser.page.expect_response("**/v1/adapters/assistant") as answer:
        trespasser.open(f"/adapters/{FOREIGN}/assistant")
    assert answer.value.status == 404
    assert "tenant_not_found" in trespasser.page.locator("main").inner_text()


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
