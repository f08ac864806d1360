"""The served and the reference base with an adapter, compared with PEFT's own figures."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from loraplex.adapters.errors import StoreUnavailable
from loraplex.adapters.fetcher import FetchedBlock
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.manager import Tier
from loraplex.api.adapters import quantization_contract
from loraplex.api.adapters.probes import Logits, probe_prompts
from loraplex.api.adapters.quantization_contract import (
    REFERENCE_COMMAND,
    NotMeasured,
    QuantizationContract,
    check_reference,
    compare_with_reference,
)
from loraplex.api.client.uploads import SETTLED_STATES
from loraplex.engine.config import Quantization
from loraplex.platform.errors import InvalidValue
from support.command import Command
from support.engine import LocalEngine
from support.http_uploads import WEIGHTS, commit, open_upload, put
from support.models import make_adapter, make_tiny_llama
from support.quantized_checkpoints import FORMATS, write_checkpoint
from support.server import Caller, serving
from support.waiting import wait_for

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Served:
    """An adapter on the quantized base: what it answers to the probes, and its block."""

    base: Path
    base_id: str
    adapter: Path
    key: AdapterKey
    block: Path
    prompts: list[list[int]]
    logits: list[Logits]


@pytest.fixture(autouse=True)
def reference_has_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside busy test workers, a process of low priority takes minutes."""
    monkeypatch.setattr(quantization_contract, "yield_processor", lambda _pid: None)


@pytest.fixture(scope="module")
def served(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("served")
    adapter = make_adapter(tiny_base, directory / "adapter", seed=5)
    engine = LocalEngine(tiny_base, directory, quantization=Quantization.INT8)
    yield probe(engine, tiny_base, adapter)
    engine.close()


def probe(engine: LocalEngine, reference: Path, adapter: Path) -> Served:
    key = engine.add_adapter(adapter)
    info = engine.core.info
    prompts = probe_prompts([5, 6, 7], info.vocab_size)
    names = [engine.submit(prompt, key, return_logits=True, max_tokens=1) for prompt in prompts]
    engine.run()
    found = [engine.answers[name].tokens[0].logits for name in names]
    logits = [np.frombuffer(entry or b"", np.float32) for entry in found]
    return Served(reference, info.base_id, adapter, key, engine.paths[key], prompts, logits)


ONCE = """
import pathlib, subprocess, sys
answer = pathlib.Path({path!r})
if not answer.exists():
    run = subprocess.run([*{command!r}, *sys.argv[1:]], stdout=subprocess.PIPE, check=True)
    answer.write_bytes(run.stdout)
sys.stdout.buffer.write(answer.read_bytes())
"""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The reference, run for the first question only: it takes 4 s of CPU to start."""
    path = str(tmp_path_factory.mktemp("reference") / "answer")
    return script(ONCE.format(path=path, command=REFERENCE_COMMAND))


def script(text: str) -> tuple[str, ...]:
    """A child that runs this in place of the reference."""
    return (sys.executable, "-c", text)


def peft_logits(base: Path, adapter: Path, prompts: Sequence[list[int]]) -> list[torch.Tensor]:
    """The next token's logits of the unquantized base under the adapter, by PEFT."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    with torch.no_grad():
        return [model(torch.tensor([prompt])).logits[0, -1].double() for prompt in prompts]


def peft_divergences(served: Served) -> list[float]:
    """KL(reference ‖ served) by prompt."""
    reference = peft_logits(served.base, served.adapter, served.prompts)
    return [
        torch.nn.functional.kl_div(
            torch.tensor(found).double().log_softmax(-1),
            expected.log_softmax(-1),
            log_target=True,
            reduction="sum",
        ).item()
        for expected, found in zip(reference, served.logits, strict=True)
    ]


def make_contract(
    served: Served, *, command: Sequence[str] = REFERENCE_COMMAND, **changes: object
) -> QuantizationContract:
    async def fetch(key: AdapterKey) -> FetchedBlock:
        assert key == served.key
        return FetchedBlock(served.block, Tier.DISK)

    settings: dict[str, object] = {
        "reference_dir": served.base,
        "reference_id": served.base_id,
        "base_id": served.base_id,
        "prompts": served.prompts,
        "fetch": fetch,
        "limit": None,
        "num_threads": 1,
        "command": command,
        **changes,
    }
    return QuantizationContract(**settings)  # type: ignore[arg-type]


def test_the_drift_is_what_peft_on_the_unquantized_base_says(
    served: Served, reference: tuple[str, ...]
) -> None:
    contract = make_contract(served, command=reference)
    drift = asyncio.run(contract.measure(served.key, served.logits))
    expected = peft_divergences(served)
    assert max(expected) > 1e-5  # there is something to measure
    assert drift.kl == pytest.approx(expected, rel=0.02)
    assert drift.kl_max == max(drift.kl)
    assert drift.kl_mean == pytest.approx(sum(expected) / len(expected), rel=0.02)
    dense = peft_logits(served.base, served.adapter, served.prompts)
    changed = [
        expected.argmax().item() != found.argmax()
        for expected, found in zip(dense, served.logits, strict=True)
    ]
    assert drift.top_token_changed == sum(changed)
    assert drift.num_probes == len(served.prompts)


def test_an_unquantized_base_hardly_drifts(served: Served, reference: tuple[str, ...]) -> None:
    dense = peft_logits(served.base, served.adapter, served.prompts)
    same = [logits.float().numpy() for logits in dense]
    contract = make_contract(served, command=reference, limit=1e-6)
    drift = asyncio.run(contract.measure(served.key, same))
    assert drift.kl_max < 1e-7
    assert drift.is_within_limit


def test_the_limit_is_of_the_largest_divergence() -> None:
    one, other = np.zeros(4, np.float32), np.array([0, 0, 0, 5], np.float32)
    drift = compare_with_reference([one, one], [one, other], limit=None)
    assert drift.is_within_limit
    assert drift.kl_mean == pytest.approx(drift.kl_max / 2)
    assert replace(drift, limit=drift.kl_max).is_within_limit
    assert not replace(drift, limit=drift.kl_max * 0.99).is_within_limit
    assert "--max-reference-kl" in replace(drift, limit=0.1).sentence


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (script("import sys; print('no memory'); sys.exit(1)"), "no memory"),
        (script("import os; os.kill(os.getpid(), 9)"), "status -9"),
        (script("print('short')"), "no whole answer"),
        (script("raise SystemExit(3)"), "status 3"),
    ],
)
def test_a_reference_that_fails_is_not_measured(
    command: tuple[str, ...], reason: str, served: Served
) -> None:
    contract = make_contract(served, command=command)
    with pytest.raises(NotMeasured, match=reason):
        asyncio.run(contract.measure(served.key, served.logits))


def test_a_reference_that_stalls_is_ended_and_the_next_one_gets_its_turn(
    served: Served, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    stall = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(1e6)"
    contract = make_contract(served, command=script(stall), measure_seconds=2.0)

    async def twice() -> None:
        for _ in range(2):
            with pytest.raises(NotMeasured, match="longer than 2 s"):
                await contract.measure(served.key, served.logits)

    asyncio.run(twice())
    assert not Path(f"/proc/{pid.read_text()}").exists()


def test_another_folder_than_at_the_start_is_not_measured(served: Served, tmp_path: Path) -> None:
    other = make_tiny_llama(tmp_path / "other", seed=9)
    contract = make_contract(served, reference_dir=other)
    with pytest.raises(NotMeasured, match="no longer the one"):
        asyncio.run(contract.measure(served.key, served.logits))


def test_an_outage_of_the_store_is_not_measured(served: Served) -> None:
    async def fetch(_key: AdapterKey) -> FetchedBlock:
        raise StoreUnavailable

    contract = make_contract(served, fetch=fetch)
    with pytest.raises(NotMeasured, match="store"):
        asyncio.run(contract.measure(served.key, served.logits))


def test_a_reference_of_another_base_is_refused_at_the_start(
    served: Served, tmp_path: Path
) -> None:
    assert check_reference(served.base, served.base, served.base_id) == served.base_id
    other = make_tiny_llama(tmp_path / "other", seed=9)
    with pytest.raises(InvalidValue, match="another model"):
        check_reference(other, served.base, served.base_id)


def test_a_quantized_checkpoint_is_compared_with_the_model_that_it_was_made_from(
    tiny_base: Path, tmp_path: Path
) -> None:
    dense = Path(shutil.copytree(tiny_base, tmp_path / "dense"))
    packed = write_checkpoint(dense, tmp_path / "packed", FORMATS["gptq"])
    adapter = make_adapter(tiny_base, tmp_path / "adapter", seed=5)
    engine = LocalEngine(packed, tmp_path)
    served = probe(engine, tiny_base, adapter)
    engine.close()
    reference_id = check_reference(tiny_base, packed, served.base_id)
    assert reference_id != served.base_id
    contract = make_contract(served, reference_dir=tiny_base, reference_id=reference_id)
    drift = asyncio.run(contract.measure(served.key, served.logits))
    assert drift.kl_max == pytest.approx(max(peft_divergences(served)), rel=0.02)
    assert drift.kl_max > 1e-3
    with pytest.raises(InvalidValue, match="quantized itself: gptq-int4"):
        check_reference(packed, packed, served.base_id)
    narrow = make_tiny_llama(tmp_path / "narrow", intermediate_size=48)
    with pytest.raises(InvalidValue, match="its intermediate_size is 48, not 96"):
        check_reference(narrow, packed, served.base_id)


def push_until_settled(caller: Caller, folder: Path, name: str) -> dict[str, Any]:
    upload = open_upload(caller, folder, name)
    put(caller, upload, (folder / WEIGHTS).read_bytes(), 0)
    path = f"/v1/adapters/{name}/versions/{commit(caller, upload).json()['version']}"
    wait_for(lambda: caller.http.get(path).json()["state"] in SETTLED_STATES, seconds=120)
    version: dict[str, Any] = caller.http.get(path).json()
    return version


def test_a_version_beyond_the_limit_is_rejected_and_one_that_cannot_be_measured_is_not(
    served: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reference = Path(shutil.copytree(served.base, tmp_path / "reference"))
    limit = min(peft_divergences(served)) / 100
    options = ("--quantize", "int8", "--reference-base", str(reference))
    with serving(
        served.base, tmp_path / "server", *options, "--max-reference-kl", str(limit)
    ) as server:
        caller = server.make_caller("acme")
        rejected = push_until_settled(caller, served.adapter, "bot")
        (reference / "model.safetensors").unlink()
        other = make_adapter(served.base, tmp_path / "other", seed=6)
        unmeasured = push_until_settled(caller, other, "other")
        _, told, _ = Command(monkeypatch, capsys, caller)("show", "bot")
    assert rejected["state"] == "rejected"
    assert rejected["reason"]["code"] == "quantization_drift"
    assert rejected["attestation"]["max_logit_delta"] > 0
    drift = rejected["attestation"]["reference"]
    assert drift["limit"] == pytest.approx(limit)
    assert drift["kl_max"] > limit
    assert drift["num_probes"] == len(drift["kl"]) == len(served.prompts)
    assert f"KL to the unquantized base up to {drift['kl_max']:.2g}" in told
    assert unmeasured["state"] == "ready"
    assert unmeasured["attestation"]["reference"].startswith("not measured: ")
