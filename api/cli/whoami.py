"""`loraplex whoami`: shows a key's owner and permissions."""

from __future__ import annotations

import typer

from .client import open_client
from .output import AsJson, print_json, print_rows

app = typer.Typer(add_completion=False)

COLUMNS = ["kind", "name", "tenant", "scopes", "adapters", "networks", "expires_at"]


@app.command()
def whoami(as_json: AsJson = False) -> None:
    """Show the key's owner, tenant, scopes, restrictions and expiry."""
    with open_client() as client:
        me = client.get("/me")
    if as_json:
        print_json(me)
        return
    tenant = me["tenant"]
    row = {**me, **me["actor"], "tenant": tenant["slug"] if tenant else None}
    print_rows([row], COLUMNS)
