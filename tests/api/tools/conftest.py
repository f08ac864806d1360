"""Servers whose bases have templates with tool support and with reasoning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.chat_templates import HERMES_TEMPLATE
from support.models import make_tiny_llama
from support.server import Caller, serving
from support.thinking import make_thinking_base


@pytest.fixture(scope="session")
def tool_caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    """A tenant of that server, whose base is `tooled`."""
    base: Path = tmp_path_factory.mktemp("tooled") / "tooled"
    make_tiny_llama(base, max_position_embeddings=4096)
    (base / "chat_template.jinja").write_text(HERMES_TEMPLATE)
    data_dir = tmp_path_factory.mktemp("tool-server")
    with serving(base, data_dir, "--tool-format", "hermes") as running:
        yield running.make_caller("tools")


@pytest.fixture(scope="session")
def thinking_caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    """A tenant of a server whose base is `thinking`."""
    base: Path = tmp_path_factory.mktemp("thinking") / "thinking"
    make_thinking_base(base)
    data_dir = tmp_path_factory.mktemp("thinking-server")
    with serving(base, data_dir) as running:
        yield running.make_caller("thinking")
