"""The time of decode steps by kind of work."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.engine import step_profile
from loraplex.engine.config import Quantization
from loraplex.engine.step_profile import (
    TENANT,
    DecodeLoad,
    Kernel,
    ProfileFailed,
    Work,
    kernel_seconds,
    profile_decode,
)
from support.engine import LocalEngine
from support.models import make_adapter


@pytest.fixture(scope="module")
def engine(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> LocalEngine:
    return LocalEngine(tiny_base, tmp_path_factory.mktemp("profiled"))


def test_each_kind_of_work_on_the_cpu_takes_its_part(
    engine: LocalEngine, tiny_base: Path, tmp_path: Path
) -> None:
    block = tmp_path / "block"
    adapter = make_adapter(tiny_base, tmp_path / "adapter", seed=1)
    report = engine.examine(adapter, block)
    load = DecodeLoad(3, 5, {AdapterKey(TENANT, report.digest): block})

    profile = profile_decode(engine.core, load, 4)

    assert set(profile.milliseconds) == set(Work) - {Work.WAITING}
    assert profile.step_milliseconds == sum(profile.milliseconds.values())
    assert not engine.core.has_work


def test_the_base_alone_has_no_adapters_work(engine: LocalEngine) -> None:
    profile = profile_decode(engine.core, DecodeLoad(2, 5, {}), 2)
    assert Work.LORA not in profile.milliseconds
    assert engine.generate([1, 2, 3])  # nothing is left of the profile


def test_the_products_of_every_layer_are_timed(tiny_base: Path, tmp_path: Path) -> None:
    """The output head, which is not quantized, is of another form than the projections."""
    core = LocalEngine(tiny_base, tmp_path, quantization=Quantization.INT8).core
    timed = {owner for owner, _name, work in step_profile._calls(core) if work is Work.PRODUCTS}
    assert {type(linear) for linear in core.parts.base.linears} <= timed


def test_an_adapter_that_cannot_be_loaded_ends_the_profile(
    engine: LocalEngine, tmp_path: Path
) -> None:
    load = DecodeLoad(1, 5, {AdapterKey(TENANT, "sha256:missing"): tmp_path / "missing"})
    with pytest.raises(ProfileFailed):
        profile_decode(engine.core, load, 1)


def test_kernels_are_told_apart_by_name_and_sampling_by_its_span() -> None:
    kernels = [
        Kernel("shrink_kernel", 0.0, 1.0),
        Kernel("nvjet_tst_64x8", 0.5, 3.0),  # beside it, on another stream
        Kernel("attend_kernel", 3.0, 4.0),
        Kernel("void at::native::elementwise_kernel<4>", 4.0, 6.0),
        Kernel("sampling", 7.0, 9.0),
        Kernel("void at::native::elementwise_kernel<4>", 7.0, 8.0),
    ]
    assert kernel_seconds(kernels) == {
        Work.LORA: 1.0,
        Work.PRODUCTS: 2.0,
        Work.ATTENTION: 1.0,
        Work.LAYERS: 2.0,
        Work.SAMPLING: 1.0,
    }
