"""The packages that a server needs for its trainers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loraplex.api.server import tuning_services
from loraplex.api.server.tuning_services import open_tuning
from loraplex.api.settings import Settings
from loraplex.platform.errors import InvalidValue


@pytest.mark.parametrize(
    ("values", "param", "package"),
    [({}, "tuning", "peft"), ({"tuning_ray": "auto"}, "tuning_ray", "ray")],
)
def test_a_server_without_the_packages_of_its_trainers_does_not_start(
    values: dict[str, Any],
    param: str,
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning_services, "find_spec", lambda _name: None)
    monkeypatch.setattr(tuning_services, "missing_packages", lambda: ["peft"])
    planes: Any = SimpleNamespace(settings=Settings(data_dir=tmp_path, tuning=True, **values))
    rest: dict[str, Any] = dict.fromkeys(
        ("pushes", "files", "metrics", "memories", "readiness", "stack")
    )
    with pytest.raises(InvalidValue, match=package) as refused:
        asyncio.run(open_tuning(planes, **rest))
    assert refused.value.param == param
