"""A server whose base has a template with tool support and a sufficient context."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.chat_templates import HERMES_TEMPLATE
from support.models import make_tiny_llama
from support.server import Caller, serving


@pytest.fixture(scope="session")
def tool_caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    """A tenant of that server, whose base is `tooled`."""
    base: Path = tmp_path_factory.mktemp("tooled") / "tooled"
    make_tiny_llama(base, max_position_embeddings=4096)
    (base / "chat_template.jinja").write_text(HERMES_TEMPLATE)
    data_dir = tmp_path_factory.mktemp("tool-server")
    with serving(base, data_dir, "--tool-format", "hermes") as running:
        yield running.make_caller("tools")
