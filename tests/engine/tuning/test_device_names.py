"""Names of devices and lists of CPUs that an operator gives to trainers."""

from __future__ import annotations

import pytest

from loraplex.engine.tuning.cpu_list import parse_cpus
from loraplex.engine.tuning.devices import is_device_name, is_same_device


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:12"])
def test_names_of_devices_are_known(name: str) -> None:
    assert is_device_name(name)


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:-1", "cuda:1:2", "cpu:0", "cuda:²"])
def test_other_names_are_none(name: str) -> None:
    assert not is_device_name(name)


@pytest.mark.parametrize(
    ("trainer", "engine", "is_same"),
    [
        ("auto", "cuda:1", True),
        ("cuda", "cuda:0", True),
        ("cuda:0", "cuda", True),
        ("cuda:1", "cuda", False),
        ("cpu", "cpu", True),
        ("cpu", "cuda", False),
    ],
)
def test_cuda_without_a_number_is_the_first_device(
    trainer: str, engine: str, is_same: bool
) -> None:
    assert is_same_device(trainer, engine) == is_same


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("3", (3,)), ("2-4", (2, 3, 4)), ("6, 1-2,2", (1, 2, 6)), ("0-0", (0,))],
)
def test_lists_of_cpus_are_read_as_the_kernel_writes_them(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-2", "1,,2", "1-2-3", "²"])
def test_other_lists_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a list of CPUs|ends before"):
        parse_cpus(text)
