"""After a verified erasure no process of the server holds any of the adapter's bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.erasure import check_erasure, needs_proc
from support.server import Caller, ServerUnderTest


@pytest.mark.slow
@needs_proc
def test_no_process_holds_an_erased_adapter(
    server: ServerUnderTest, caller: Caller, tiny_base: Path, tmp_path: Path
) -> None:
    check_erasure(server, caller, tmp_path, tiny_base)
