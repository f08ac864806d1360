"""Parameter types for names: adapters, aliases, and `NAME[@VERSION]`.

A name contains no slash, so a path is never mistaken for a name.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..client.references import MAX_VERSION_DIGITS, check_alias, check_name, parse_reference

Name = Annotated[str, typer.Argument(callback=check_name, help="Adapter name.")]
Alias = Annotated[str, typer.Argument(callback=check_alias, help="Alias, such as prod.")]
VersionNumber = Annotated[int, typer.Argument(min=1, max=10**MAX_VERSION_DIGITS - 1)]
Version = Annotated[
    Any,
    typer.Argument(
        parser=parse_reference,
        metavar="NAME[@VERSION]",
        help="Version number, alias or 'latest' after @; without @, the version that requests get.",
    ),
]
