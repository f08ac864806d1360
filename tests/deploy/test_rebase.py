"""Changing the base as in docs/operations.md: push to the new base's server, check, switch."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.models import make_adapter, make_tiny_llama
from support.server import LORAPLEX, Caller, serving

pytestmark = pytest.mark.slow


def run(url: str, key: str, folder: Path, *arguments: str) -> tuple[int, str, str]:
    result = subprocess.run(
        [*LORAPLEX, "rebase", *arguments, "--report", str(folder / "rebase.json")],
        env={**os.environ, "LORAPLEX_URL": url, "LORAPLEX_API_KEY": key},
        capture_output=True,
        text=True,
        check=False,
    )
    return result.returncode, result.stdout, result.stderr


def answer(url: str, caller: Caller) -> tuple[str, str]:
    """The text and the version of `bot@prod` there."""
    there = Caller(url, caller.tenant_id, caller.slug, caller.key)
    raw = there.openai.completions.with_raw_response.create(
        model="bot@prod", prompt="once upon", max_tokens=8, temperature=0
    )
    there.close()
    return raw.parse().choices[0].text, raw.headers["x-loraplex-adapter-version"]


def test_every_alias_is_taken_to_the_new_base_and_can_be_taken_back(
    tiny_base: Path, tmp_path: Path
) -> None:
    new_base = make_tiny_llama(tmp_path / "new-base", seed=7)
    with ExitStack() as servers:
        old = servers.enter_context(serving(tiny_base, tmp_path / "old"))
        shared = {
            "LORAPLEX_DATABASE": old.settings.database_url,
            "LORAPLEX_STORE": old.settings.store_url,
            "LORAPLEX_SECRET": (old.settings.data_dir / "secret").read_text().strip(),
        }
        new = servers.enter_context(serving(new_base, tmp_path / "new", **shared))
        operator, caller = old.make_operator("root"), old.make_caller("acme")
        adapter = make_adapter(tiny_base, tmp_path / "adapter", seed=1)
        caller.push(adapter, "bot", aliases=["prod"])
        before = answer(old.url, caller)

        code, out, err = run(old.url, operator, tmp_path, "push", "--to", new.url, "--json")
        assert code == 0, err
        (row,) = json.loads(out)
        assert (row["aliases"], row["version"], row["new_version"]) == (["prod"], 1, 2)
        assert answer(old.url, caller) == before, "nothing changes before the switch"

        code, _, err = run(new.url, operator, tmp_path, "switch")
        assert (code, err) == (0, "Moved 1 aliases.\n")
        after = answer(new.url, caller)
        assert after[1] == "2"
        assert after[0] != before[0]

        code, _, err = run(new.url, operator, tmp_path, "switch", "--back")
        assert code == 0, err
        assert answer(old.url, caller) == before


@pytest.mark.parametrize("content", ["", "{"])
def test_a_switch_without_a_report_says_so(tmp_path: Path, content: str) -> None:
    if content:
        (tmp_path / "rebase.json").write_text(content)
    code, _, err = run("http://127.0.0.1:1", "key", tmp_path, "switch")
    assert code == 2
    assert "rebase.json" in err
