"""Where trainers run, and what they may take."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from loraplex.adapters.layout import BaseLayout, Projection, Slice
from loraplex.api.settings import Settings
from loraplex.api.tuning import trainer_place
from loraplex.api.tuning.memory_lines import memory_lines
from loraplex.api.tuning.trainer_place import (
    MAPPED_BYTES,
    TrainerPlace,
    place_trainers,
    trainer_cpus,
)
from loraplex.platform.errors import InvalidValue

MIB = 1 << 20


def settings(tmp_path: Path, **values: Any) -> Settings:
    return Settings(data_dir=tmp_path, tuning=True, **values)


@pytest.fixture
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})


@pytest.mark.parametrize(
    ("asked", "engine", "device", "shares"),
    [
        ("auto", "cpu", "cpu", True),
        ("auto", "cuda:1", "cuda:1", True),
        ("cuda:0", "cuda", "cuda:0", True),
        ("cuda:1", "cuda:0", "cuda:1", False),
        ("cpu", "cuda:0", "cpu", False),
        ("cpu", "cpu", "cpu", True),
    ],
)
def test_training_pauses_for_the_engine_only_on_its_own_device(
    asked: str, engine: str, device: str, shares: bool, tmp_path: Path
) -> None:
    place = place_trainers(settings(tmp_path, tuning_device=asked), engine_device=engine)
    assert (place.device, place.shares_engine) == (device, shares)


@pytest.mark.parametrize(
    ("asked", "replicas", "device", "shares"),
    [
        ("auto", "cpu", "cpu", True),
        ("auto", "cuda:0", "cpu", False),
        ("cuda:0", "cuda:0", "cuda:0", True),
    ],
)
def test_a_server_of_a_fleet_trains_on_its_own_machine(
    asked: str, replicas: str, device: str, shares: bool, tmp_path: Path
) -> None:
    values = settings(tmp_path, tuning_device=asked)
    place = place_trainers(values, engine_device=replicas, has_own_engine=False)
    assert (place.device, place.shares_engine) == (device, shares)


@pytest.mark.usefixtures("four_cpus")
def test_cpus_of_their_own_are_not_shared_with_the_engine(tmp_path: Path) -> None:
    place = place_trainers(settings(tmp_path, tuning_cpus="3,1-2"), engine_device="cpu")
    assert (place.cpus, place.shares_engine) == ((1, 2, 3), False)


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize(
    ("cpus", "engine", "reason"),
    [
        ("2-5", "cpu", "has no CPU 4, 5"),
        ("0-3", "cpu", "no CPU is left"),
        ("3", "cuda:0", "run on cuda:0"),
    ],
)
def test_cpus_that_cannot_be_used_are_refused(
    cpus: str, engine: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidValue, match=reason):
        place_trainers(settings(tmp_path, tuning_cpus=cpus), engine_device=engine)


def test_without_tuning_the_engine_keeps_all_cpus(tmp_path: Path) -> None:
    assert trainer_cpus(Settings(data_dir=tmp_path, tuning_cpus="0-99")) == ()


@pytest.mark.parametrize(
    "values",
    [
        {"tuning_device": "gpu"},
        {"tuning_device": "cuda:x"},
        {"tuning_cpus": "3-1"},
        {"tuning_cpus": "a"},
        {"tuning_cpus": ""},
        {"tuning_bytes": 0},
        {"tuning_ray_cpus": 0},
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(values: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValidationError):
        settings(tmp_path, **values)


def test_trainers_divide_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_place, "available_host_bytes", lambda: 1000 * MIB)
    values = settings(tmp_path, tuning_bytes=800 * MIB, max_tuning_jobs=2)
    host = place_trainers(values, engine_device="cpu")
    assert (host.address_bytes(), host.device_bytes()) == (400 * MIB + MAPPED_BYTES, None)
    device = place_trainers(values, engine_device="cuda:0")
    assert (device.address_bytes(), device.device_bytes()) == (None, 400 * MIB)


@pytest.mark.parametrize(("asked", "device"), [("auto", "cpu"), ("cpu", "cpu"), ("cuda", "cuda")])
@pytest.mark.parametrize("engine", ["cpu", "cuda:0"])
def test_trainers_on_ray_never_pause_and_the_memory_here_does_not_limit_them(
    asked: str, device: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_place, "available_host_bytes", lambda: MIB)
    values = settings(tmp_path, tuning_ray="auto", tuning_device=asked, tuning_bytes=800 * MIB)
    place = place_trainers(values, engine_device=engine)
    assert place == TrainerPlace(device, max_bytes=800 * MIB, shares_engine=False, is_here=False)
    assert place.free_bytes() == 800 * MIB


@pytest.mark.parametrize(
    ("values", "param"),
    [({"tuning_cpus": "1"}, "tuning_cpus"), ({"tuning_device": "cuda:1"}, "tuning_device")],
)
def test_what_ray_chooses_is_not_set_beside_it(
    values: dict[str, Any], param: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidValue) as refused:
        place_trainers(settings(tmp_path, tuning_ray="auto", **values), engine_device="cpu")
    assert refused.value.param == param


def test_a_trainer_gets_no_more_than_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_place, "available_host_bytes", lambda: 1000 * MIB)
    assert TrainerPlace("cpu", max_bytes=1 << 40).free_bytes() == 900 * MIB
    assert TrainerPlace("cpu").free_bytes() == 900 * MIB
    assert TrainerPlace("cuda:1").free_bytes() is None


@pytest.mark.parametrize(
    ("place", "verdict"),
    [
        (TrainerPlace("cpu", max_bytes=600 * MIB), "no job fits"),
        (TrainerPlace("cpu", max_bytes=800 * MIB), "need a smaller `batch_size`"),
        (TrainerPlace("cuda:0"), "set --tuning-bytes"),
        (TrainerPlace("cuda:0", max_bytes=1 << 40), None),
        (TrainerPlace("cpu", is_here=False), "run on nodes of Ray"),
    ],
    ids=str,
)
def test_the_operator_is_told_whether_a_trainer_fits(
    place: TrainerPlace, verdict: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_place, "available_host_bytes", lambda: 1 << 40)
    layout = BaseLayout("base", (Projection((Slice("q", 64, 64),)),))
    info: Any = SimpleNamespace(
        layout=layout, vocab_size=500, max_model_len=512, weight_bytes=200 * MIB, num_query_heads=8
    )
    needs, *verdicts = memory_lines(info, place)
    assert "712.0 MiB with its own base" in needs
    assert "8 sequences of 512 tokens" in needs
    assert [verdict in line for line in verdicts if verdict] == [True] * bool(verdict)
    assert bool(verdicts) == bool(verdict)
