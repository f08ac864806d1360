"""The file that continues an interrupted `loraplex batch run`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loraplex.api.cli.batch_job import BatchJob
from support.synced import record_synced


def test_each_step_is_on_the_disk_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"url": "/v1/completions"}\n')
    synced = record_synced(monkeypatch)
    once = [tmp_path / "out.jsonl.batch.new", tmp_path]

    def post_file(*_: object, **__: object) -> dict[str, str]:
        assert synced == once
        return {"id": "file-1"}

    def post(*_: object, **__: object) -> dict[str, str]:
        assert synced == once * 2
        return {"id": "batch-1"}

    client = cast(Any, SimpleNamespace(post_file=post_file, post=post))
    assert BatchJob.open(file, output).batch_id(client) == "batch-1"
    assert synced == once * 3
    assert BatchJob.open(file, output).batch_id(client) == "batch-1", "nothing is asked again"
